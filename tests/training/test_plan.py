"""The lines that open a run."""

import pytest
import torch
from torch import nn

from embedgeo import StepMonitor
from tests.models import NanoGPT, token_batch

IDS = torch.arange(24).view(2, 12)
MANY_IDS = torch.arange(50).repeat(24).view(100, 12)
OF_NANO = "token ids of transformer.wte, the model's mask where it is given one."
BY_HAND = {
    "token_ids": lambda batch: torch.zeros(batch.shape[:2], dtype=torch.int64),
    "mask": lambda batch: torch.ones(batch.shape[:2]),
}


def opened(model, batch, caplog, call=None, **options):
    """The lines of a monitor that measures one step, and its history."""
    caplog.clear()
    with caplog.at_level("INFO", "lightning.pytorch"):
        options = {"measure_last": False, "on_error": "raise", **options}
        with StepMonitor(model, 1, **options) as monitor, monitor.step(0, batch):
            model(batch if call is None else call)
    return caplog.text.splitlines(), monitor.history


def test_it_says_which_main_numbers_will_be_absent_without_token_ids(caplog):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    said = (
        "StepMonitor: V_W / V, dimension between tokens and other values over token types will be "
        "absent, because TransformerEncoder has no embedding table that is called with token ids. "
        "Give token_ids=, a function of the batch."
    )
    rows = torch.randn(2, 3, 16)
    given = {"token_ids": lambda batch: torch.zeros(2, 3, dtype=torch.int64)}
    for model, call, options, count in (
        (encoder, rows, {}, 1),
        (encoder, rows, given, 0),
        (NanoGPT(), token_batch(2)["input_ids"], {}, 0),
    ):
        lines, history = opened(model, None, caplog, call, **options)
        assert lines.count(said) == count
        found = {record["metric"] for record in history}
        assert ("V_W_over_V_unbiased" in found) == (not count)


@pytest.mark.parametrize(
    ("batch", "options", "sources", "n"),
    [
        (MANY_IDS, {}, OF_NANO, 1200),
        (IDS, BY_HAND, "token ids of token_ids=, mask of mask=.", 24),
        (
            IDS,
            {"rows": "mean", "mask": lambda ids: ids < 23},
            "no token ids, mask of mask=.",
            2,
        ),
    ],
)
def test_it_says_how_many_rows_of_which_tokens_and_what_they_are_too_few_for(
    batch, options, sources, n, caplog
):
    lines, history = opened(NanoGPT(), batch, caplog, **options)
    rows = f"up to {n:,} rows a measurement (batches like the first, each run once: 1)"
    assert lines[1] == f"StepMonitor: {rows}, {sources}"
    assert {record["value"] for record in history if record["metric"] == "n"} == {n}


def test_the_rows_of_a_probe_and_of_a_batch_that_does_not_tell_them(caplog):
    probe = [MANY_IDS[:20], MANY_IDS[20:40]]
    lines, _ = opened(NanoGPT(), None, caplog, IDS, probe=probe)
    assert "up to 480 rows a measurement (batches like the first, each run once: 2)" in lines[1]
    lines, _ = opened(NanoGPT(), None, caplog, IDS)
    assert lines[1] == f"StepMonitor: {OF_NANO}"
