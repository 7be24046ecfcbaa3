import torch

from tests.models import gpt_neox
from tests.observed import observed, rows_seen


def test_words_of_packed_sequences_are_told_apart():
    net = gpt_neox().eval()
    ids = torch.randint(2, 96, (1, 8), generator=torch.Generator().manual_seed(0))
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    words = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1]], dtype=torch.int32)
    rows, _ = rows_seen(observed(net, packed, "embed", rows="words", word_ids=words), "embed")
    with torch.no_grad():
        state = net(**packed, output_hidden_states=True).hidden_states[0][0]
    expected = [
        state[part].mean(0) for part in (slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8))
    ]
    torch.testing.assert_close(rows, torch.stack(expected))
