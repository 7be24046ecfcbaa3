"""The tables of docs/sampling.md can be made, and what they rest on."""

import math
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import ModernBertConfig

from benchmarks import sampling, small_models
from benchmarks.sampling import NUMBERS, Errors, SimulatedText, enough
from embedgeo.demo import DemoSettings


@pytest.mark.slow
def test_errors_of_simulated_text_shrink_with_the_rows():
    text = SimulatedText()
    few, many = (sampling.errors(text, 4, size, 32, in_a_row=False) for size in (512, 8192))
    assert sampling.expected(text, 4, 32)["V_W_over_V_unbiased"] == pytest.approx(0.618, abs=0.001)
    for key in ("V_W_over_V_unbiased", "M_over_Q", "effective_rank", "intrinsic_dimension"):
        assert many[key].size < few[key].size
        assert many[key].size < 0.05
    assert few["intrinsic_dimension"].bias < -0.1


def test_rows_are_enough_from_which_on_the_error_stays_small():
    small, large, none = Errors(0.03, 0.04), Errors(-0.04, 0.031), Errors(math.nan, math.nan)
    assert enough([[large], [small], [small]], (1, 2, 4)) == 2
    assert enough([[small], [large], [small]], (1, 2, 4)) == 4
    assert enough([[small], [small], [none]], (1, 2, 4)) == 0
    assert enough([[Errors(0.06, 0.0), Errors(0.0, 0.03)]], (1,)) == 1  # over both layers
    assert [str(each) for each in (small, large, none)] == ["+3 ± 4", "−4 ± 3", "–"]


def can_have_an_encoder():
    """Some versions of transformers refuse a ModernBERT without blocks that see a part of the
    sequence alone.
    """
    try:
        ModernBertConfig(num_hidden_layers=1, global_attn_every_n_layers=1)
    except StrictDataclassError:
        return False
    return True


needs_an_encoder = pytest.mark.skipif(
    not can_have_an_encoder(),
    reason="needs a later transformers, whose ModernBERT can have full attention alone",
)


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder", marks=needs_an_encoder)])
def test_small_models_learn_from_the_text(kind):
    settings = DemoSettings(
        max_steps=8, num_layers=1, hidden_size=32, vocab_size=512, seq_len=32, batch_size=8
    )
    found = small_models.trained(kind, settings)
    assert not found.model.training
    assert found.loss < math.log(512)
    assert found.unigram_loss == pytest.approx(5.24, abs=0.2)
    assert found.token_ids.max() < 512 <= found.model.config.vocab_size
    hidden = found.model(
        input_ids=found.token_ids[None, :32], output_hidden_states=True
    ).hidden_states
    assert [tuple(each.shape) for each in hidden] == [(1, 32, 32)] * 2


def test_an_encoder_is_shown_four_fifths_of_the_tokens_and_asked_for_the_others():
    torch.manual_seed(0)
    ids = torch.arange(100_000)
    found = small_models.filling_in(ids, -1)
    asked = found["labels"] >= 0
    assert float(asked.double().mean()) == pytest.approx(0.2, abs=0.01)
    assert torch.equal(found["labels"][asked], ids[asked])
    assert torch.equal(found["input_ids"][~asked], ids[~asked])
    assert float((found["input_ids"][asked] == -1).double().mean()) == pytest.approx(0.9, abs=0.01)


@pytest.mark.slow
def test_all_tables_are_printed(capsys):
    sampling.main("all", draws=1, max_steps=1, largest=1024, num_tokens=2048)
    tables = re.split(r"\n\n(?=\|)", capsys.readouterr().out)[1:]
    assert len(tables) == 1 + 2 + 4 * 3 + 1
    for table in tables[1:]:
        head, _, *rows = (
            line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")
        )
        assert [row[0].strip(" `") for row in rows] == [*NUMBERS]
        assert {len(row) for row in rows} == {len(head)}
