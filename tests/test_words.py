import torch

import embedgeo
from tests.models import gpt_neox
from tests.observed import observed, rows_seen
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit, moments, value


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


def test_a_monitor_takes_the_words_of_its_batches(tmp_path):
    def words(batch):
        return torch.arange(12).expand_as(batch["input_ids"]) // 3

    asked = {"rows": "words", "word_ids": words, "metrics": moments, "on_error": "raise"}
    monitor = embedgeo.GeometryMonitor(1, **asked)
    fit(tmp_path, monitor, max_steps=2)
    assert [value(monitor, step, "block.00", "n") for step in (0, 1, 2)] == [16] * 3
    callback = embedgeo.GeometryCallback(1, **asked)
    hf_trainer(tmp_path, callback, max_steps=1).train()
    assert value(callback, 0, "block.00", "n") == 8
