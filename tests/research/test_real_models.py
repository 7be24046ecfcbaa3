"""The depth table of a tiny model has the numbers that `observe` measures."""

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import embedgeo
from embedgeo.checkpoints.files import hashed_file
from embedgeo.checkpoints.loading import load_tokenizer
from embedgeo.metrics import OutlierCoordinates
from research import real_models
from research.findings import PAGE
from tests.sweep.tiny import TEXT, checkpoint_files, tokenize_sequences, write_files

ROWS = {  # of the table of the page, by what heads them
    "M / Q": "M_over_Q",
    "V_W / V": "V_W_over_V_unbiased",
    "slope of V on M": "V_on_M_slope",
    "its R²": "V_on_M_r2",
    "anisotropy": "anisotropy",
    "with the first position": "anisotropy_with_first",
    "largest coordinate's share of V": "top_dim_share",
}


def observed(folder, text, skip_first_positions):
    """The values of each layer, its coordinate of the largest share of V, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    token_ids = tokenize_sequences([text], load_tokenizer(folder), seq_len=16, num_tokens=256)

    def metrics(dim):
        return [*embedgeo.default_metrics(dim), OutlierCoordinates(dim)]

    with (
        torch.no_grad(),
        embedgeo.observe(model, "blocks", metrics, skip_first_positions) as geometry,
    ):
        losses = [float(model(batch, labels=batch).loss) for batch in token_ids.split(8)]
    of_coordinates = geometry.layer_tables()["coordinates"].set_index("coordinate")
    largest = of_coordinates.groupby("layer")["share_of_V"].idxmax()
    return geometry.compute(), largest, sum(losses) / len(losses)


@pytest.mark.slow
def test_the_table_has_what_observe_measures_with_and_without_the_first_position(tmp_path, capsys):
    folder = write_files(tmp_path / "tiny", checkpoint_files(8))
    text = " ".join(TEXT * 9)
    (tmp_path / "text.txt").write_text(text)
    sizes = ["--num-tokens", "256", "--seq-len", "16", "--sweeps", str(tmp_path / "sweeps")]
    options = [*sizes, "--text", str(tmp_path / "text.txt"), "--csv", str(tmp_path / "found.csv")]
    real_models.main([str(folder), *options])
    found = pd.read_csv(tmp_path / "found.csv").set_index("layer")
    every, _, loss = observed(folder, text, 0)
    rest, largest, _ = observed(folder, text, 1)
    assert list(found.index) == list(rest) == ["embed", "block.00", "block.01", "final_norm"]
    printed = capsys.readouterr().out
    assert f"tiny, loss {loss:.3f}:" in printed
    for i, (layer, row) in enumerate(found.iterrows()):
        true = {key: rest[layer][key] for key in real_models.KEYS}
        true |= {f"{key}_with_first": every[layer][key] for key in real_models.HEADLINES}
        true |= {"layer_index": i, "top_dim": largest[layer], "loss": loss}
        assert true == pytest.approx(row[[*true]].to_dict(), rel=6e-4, nan_ok=True)
        assert row["weights_sha256"] == hashed_file(folder / "model.safetensors").digest
    assert {*found} == {*true, "model", "weights_sha256"}


def test_the_page_has_the_numbers_of_the_file():
    table = pd.read_csv(PAGE.with_suffix("") / "real-models.csv")
    blocks = table[table["layer"].str.startswith("block.")].groupby("model", sort=False)
    of_models = [found.iloc[[0, len(found) // 2 - 1, -1]] for _, found in blocks]
    section = PAGE.read_text().partition("## Pretrained models")[2].partition("## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == [*ROWS]
    for key, (_, *cells, _) in zip(ROWS.values(), rows, strict=True):
        for cell, found in zip(cells, of_models, strict=True):
            shown = cell.replace("−", "-").split(", ")
            assert [*map(float, shown)] == pytest.approx([*found[key]], abs=0.0051)
