import pytest
import torch
from transformers import AutoTokenizer

import embedgeo
from tests.models import gpt_neox
from tests.observed import observed, rows_seen
from tests.sweep.tiny import TEXT, model, tokenizer_files, write_files
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit, moments, value


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """Texts for BERT, padded, and the word of each token: no word for special tokens and
    padding.
    """
    folder = write_files(tmp_path_factory.mktemp("tokenizer"), tokenizer_files("bert"))
    encoding = AutoTokenizer.from_pretrained(folder)(
        [*TEXT, TEXT[0]], padding=True, truncation=True, max_length=60, return_tensors="pt"
    )
    words = [
        [-1 if word is None else word for word in encoding.word_ids(i)]
        for i in range(len(TEXT) + 1)
    ]
    return dict(encoding), torch.tensor(words)


def naive_words(batch, word_ids, state):
    """The mean of each word of the tokenizer, and its token ids."""
    means, spellings = [], []
    for ids, words, states in zip(
        batch["input_ids"].tolist(), word_ids.tolist(), state, strict=True
    ):
        for word in sorted({*words} - {-1}):
            places = [i for i, each in enumerate(words) if each == word]
            means.append(sum(states[i].double() for i in places) / len(places))
            spellings.append(tuple(ids[i] for i in places))
    return torch.stack(means), spellings


def test_words_of_a_tokenizer_are_the_rows_and_their_spellings_the_types(encoded):
    batch, word_ids = encoded
    bert = model(0, "bert")
    with torch.no_grad():
        state = bert(**batch, output_hidden_states=True).hidden_states[2]
    means, spellings = naive_words(batch, word_ids, state)
    assert max(map(len, spellings)) > 2
    assert len(set(spellings)) < len(spellings)
    rows, types = rows_seen(
        observed(bert, batch, "block.01", rows="words", word_ids=word_ids), "block.01"
    )
    torch.testing.assert_close(rows.double(), means, rtol=0, atol=1e-6)
    same = [[a == b for a in spellings] for b in spellings]
    assert (types[:, None] == types).tolist() == same


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
