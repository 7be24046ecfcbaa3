"""`--save-samples`: of each checkpoint, the same tokens' rows, from which its recorded numbers
follow.
"""

from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from embedgeo import load_sample
from embedgeo.functional import twonn_dimension
from embedgeo.results.folder import SweepFolder
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    TEXT,
    checkpoint_files,
    local_run,
    model,
    tokenize_sequences,
    write_files,
)


@pytest.fixture
def run(tmp_path):
    local_run(tmp_path / "run", steps=(0, 8))
    write_files(tmp_path / "run" / "step9", checkpoint_files(8))  # a duplicate
    return tmp_path / "run"


def test_samples_are_of_the_same_tokens_at_every_layer_and_checkpoint(run, options):
    assert sweep(str(run), **options, save_samples=True) == 0
    out = Path(options["out"])
    assert {path.name for path in (out / "samples").iterdir()} == {
        f"step{step}.safetensors" for step in (0, 8, 9)
    }
    ids = tokenize_sequences(
        ["\n".join(TEXT)], AutoTokenizer.from_pretrained(run / "step0"), seq_len=16, num_tokens=64
    )
    numbers = []
    for name, step, same_as in (("step0", 0, 0), ("step8", 8, 8), ("step9", 9, 8)):
        sample = load_sample(out, name)
        assert (sample.model, sample.revision, sample.step) == (str(run), name, step)
        recorded = SweepFolder(out).read(name).set_index(["layer", "metric"])["value"]
        with torch.no_grad():
            states = model(same_as)(ids, output_hidden_states=True).hidden_states
        for layer, state in zip(("embed", "block.00"), states, strict=False):
            of_layer = sample.layers[layer]
            torch.testing.assert_close(
                of_layer.rows, state.flatten(0, 1)[of_layer.row_numbers], rtol=1e-4, atol=1e-6
            )
        for layer, of_layer in sample.layers.items():
            numbers.append(of_layer.row_numbers)
            dimension = twonn_dimension(of_layer.rows).dimension
            assert dimension == pytest.approx(
                recorded[layer, "intrinsic_dimension"], rel=1e-9, nan_ok=True
            )
            share = of_layer.eigenvalues[0] / of_layer.eigenvalues.sum()
            assert float(share) == pytest.approx(recorded[layer, "anisotropy"], rel=1e-9)
            assert float(of_layer.mean.square().sum()) == pytest.approx(
                recorded[layer, "M"], rel=1e-6
            )
    assert len(numbers) == 3 * 4
    assert all(each.equal(numbers[0]) for each in numbers)


def test_the_sample_is_there_before_the_checkpoint_is_done_and_is_part_of_the_settings(
    run, options, written
):
    folder = SweepFolder(options["out"])
    assert sweep(str(run), **options, save_samples=True) == 0
    assert written.index(("samples", set())) < written.index(("checkpoints", set()))
    with pytest.raises(ValueError, match="save_samples was True, is False"):
        sweep(str(run), **options)
    pd.testing.assert_frame_equal(folder.read("step8")[["value"]], folder.read("step9")[["value"]])


def test_metrics_without_a_sample_are_refused_before_anything_is_measured(
    run, options, tmp_path, monkeypatch
):
    (tmp_path / "only_moments.py").write_text(
        "from embedgeo import EmbeddingMoments\n\n\ndef made(dim):\n    return "
        "[EmbeddingMoments(dim)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match="save_samples needs IntrinsicDimension or Anisotropy among the metrics"
    ):
        sweep(str(run), **options, save_samples=True, metrics="only_moments.made")
