"""The depth table of a tiny model has the numbers that `observe` measures."""

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import embedgeo
from embedgeo.text import cut_sequences
from research import real_models
from tests.sweep.tiny import TEXT, checkpoint_files, write_files


@pytest.mark.slow
def test_the_table_has_what_observe_measures_without_the_first_position(tmp_path):
    folder = write_files(tmp_path / "tiny", checkpoint_files(8))
    text = " ".join(TEXT * 9)
    (tmp_path / "text.txt").write_text(text)
    sizes = ["--num-tokens", "256", "--seq-len", "16", "--sweeps", str(tmp_path / "sweeps")]
    options = [*sizes, "--text", str(tmp_path / "text.txt"), "--csv", str(tmp_path / "found.csv")]
    real_models.main([str(folder), *options])
    found = pd.read_csv(tmp_path / "found.csv").set_index("layer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = cut_sequences([tokenizer.encode(text)], 16, 256)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), embedgeo.observe(model, skip_first_positions=1) as geometry:
        model(token_ids)
    for layer, values in geometry.compute().items():
        keys = [key for key in real_models.HEADLINES if key in values]
        assert found.loc[layer, keys].to_dict() == pytest.approx(
            {key: float(values[key]) for key in keys}, rel=6e-4, nan_ok=True
        )
