import sys
from functools import partial

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

import embedgeo
from embedgeo import observe
from embedgeo.cli import main
from embedgeo.results.folder import SweepFolder
from tests.metrics.own_metric import PositiveShare
from tests.sweep.sweeping import command, sweep
from tests.sweep.tiny import TEXT, checkpoint_files, local_run, model, write_files

OWN = """
from embedgeo import Anisotropy, EmbeddingMoments
from tests.metrics.own_metric import PositiveShare

def moments(dim, spectrum=False):
    return [EmbeddingMoments(dim), Anisotropy(dim, spectrum=spectrum), PositiveShare(dim)]
"""


def numbers(out, name):
    records = SweepFolder(out).read(name)
    of_layers = records[records["layer"] != "model"]
    return {(r.layer, r.metric): r.value for r in of_layers.itertuples()}


def observed(folder, make, rows="tokens"):
    """The numbers of `observe` on the batches of the sweep of ``options``."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder).encode("\n".join(TEXT)))[:64].view(
        4, 16
    )
    with observe(model(1), metrics=make, rows=rows) as geometry, torch.no_grad():
        for batch in ids.split(2):
            model(1)(batch)
    return {
        (layer, key): value
        for layer, values in geometry.compute().items()
        for key, value in values.items()
    }


SOME = {
    "rows": "first",
    "count_range": [2, 9],
    "discard_fraction": 0.5,
    "id_batches": 2,
    "anisotropy_batch": 20,
}


def test_a_sweep_gives_the_numbers_of_observe(tmp_path, options):
    local_run(tmp_path / "run", steps=(1,))
    assert sweep(tmp_path / "run", **options, **SOME) == 0
    make = partial(embedgeo.default_metrics, **{k: SOME[k] for k in SOME if k != "rows"})
    expected = observed(tmp_path / "run" / "step1", make, SOME["rows"])
    assert numbers(options["out"], "step1") == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_a_function_of_ones_own_in_the_working_directory(tmp_path, options, monkeypatch, request):
    local_run(tmp_path / "run", steps=(1,))
    write_files(tmp_path / "run" / "step3", checkpoint_files(1))
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    request.addfinalizer(lambda: sys.modules.pop("mine", None))
    asked = {**options, "metrics": "mine.moments", "spectrum": "true"}
    assert main(command("./run", asked)) == 0

    def make(dim):
        return [
            embedgeo.EmbeddingMoments(dim),
            embedgeo.Anisotropy(dim, spectrum=True),
            PositiveShare(dim),
        ]

    assert numbers(options["out"], "step1") == pytest.approx(
        observed(tmp_path / "run" / "step1", make), rel=1e-9
    )
    folder = SweepFolder(options["out"])
    assert folder.manifest()["asked"]["metrics"] == "mine.moments"
    signs, of_copy = (folder.read_tables(name)["signs"] for name in ("step1", "step3"))
    assert folder.read("step3")["duplicate_of"].unique().tolist() == ["step1"]
    pd.testing.assert_frame_equal(of_copy, signs)
