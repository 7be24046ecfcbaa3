"""Models that accelerate has spread over devices: its hooks replace `forward`, and come and go as
they like.
"""

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from embedgeo import observe
from tests.models import gpt_neox, token_batch

BATCH = token_batch(padding="right")
OUTPUT = list(dict(gpt_neox().named_children()))[-1]  # lm_head, or embed_out in older versions
PARTS = {
    "gpt_neox.embed_in": "cpu",
    "gpt_neox.layers.0": "cpu",
    "gpt_neox.layers.2": "cpu",
    "gpt_neox.layers.1": "disk",
}
PARTS |= {"gpt_neox.final_layer_norm": "disk", "gpt_neox.rotary_emb": "cpu", OUTPUT: "disk"}


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return gpt_neox().eval()


@pytest.fixture
def spread(whole, tmp_path):
    """The same model, loaded with a part of it on the disk."""
    whole.save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, device_map=PARTS)


def measured(model, **options):
    with observe(model, **options) as geometry, torch.no_grad():
        output = model(**BATCH)
    return geometry.to_frame(), output.logits


@pytest.mark.parametrize("rows", ["tokens", "last"])
def test_the_numbers_and_the_output_are_those_of_the_whole_model(whole, spread, rows):
    options = {"rows": rows, "skip_first_positions": 1, "layers": ["blocks", "mean(last2)"]}
    (frame, logits), (expected, expected_logits) = (
        measured(model, **options) for model in (spread, whole)
    )
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-9)
    assert torch.equal(logits, expected_logits)
