"""Files of saved samples: what is in them, and what is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from embedgeo import load_sample
from embedgeo.results.samples import LayerSample, write_sample

ABOUT = {"model": "lab/tiny", "revision": "step8", "step": 8}
LAYERS = {
    "embed": LayerSample(40, mean=torch.ones(3).double(), eigenvalues=torch.arange(3).double()),
    "a/b": LayerSample(40, rows=torch.randn(5, 3).bfloat16(), row_numbers=torch.arange(5)),
}


@pytest.fixture
def folder(tmp_path):
    write_sample(tmp_path, "step8", LAYERS, ABOUT)
    return tmp_path


def file(folder):
    return folder / "samples" / "step8.safetensors"


def test_what_is_written_is_read(folder):
    for path in (folder, str(folder)):
        sample = load_sample(path, "step8")
        assert (sample.model, sample.revision, sample.step) == ("lab/tiny", "step8", 8)
        assert list(sample.layers) == ["embed", "a/b"]
        rows = sample.layers["a/b"].rows
        assert rows.equal(LAYERS["a/b"].rows)
        assert sample.layers["a/b"].mean is None
        assert sample.layers["embed"].n == 40
    assert {path.name for path in folder.rglob("*")} == {"samples", "step8.safetensors"}


def test_the_file_says_what_it_holds(folder):
    names = {"embed/mean", "embed/eigenvalues", "a/b/rows", "a/b/row_numbers"}
    assert set(load_file(file(folder))) == names
    with safe_open(file(folder), "pt") as opened:
        about = json.loads(opened.metadata()["embedgeo"])
    assert about.pop("row_numbers").startswith("position among the rows that count")
    assert about == {
        "version": 1,
        **ABOUT,
        "layers": {"embed": {"n": 40}, "a/b": {"n": 40}},
    }


@pytest.mark.parametrize("how", ["cut", "foreign", "no layers"])
def test_a_damaged_or_foreign_file_is_named(folder, how):
    path = file(folder)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        metadata = {} if how == "foreign" else {"embedgeo": '{"version": 1}'}
        save_file({"x": torch.zeros(1)}, path, metadata)
    with pytest.raises(
        ValueError, match="must be a saved sample; it is none, or damaged"
    ) as caught:
        load_sample(folder, "step8")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_said(folder):
    write_sample(folder, "step9", LAYERS, ABOUT)
    with pytest.raises(FileNotFoundError, match=r"got 'step1', and .* has step8, step9"):
        load_sample(folder, "step1")
    with pytest.raises(FileNotFoundError, match="has none: sweep with --save-samples true"):
        load_sample(folder / "samples", "step8")
