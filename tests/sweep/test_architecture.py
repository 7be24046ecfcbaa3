"""Where a sweep says that layers are the output of norms, and of which architecture its models
are.
"""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from embedgeo.drawing import style
from embedgeo.report import figures
from embedgeo.report.runs import read_runs
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import REPOSITORY, checkpoint_files, local_run, model, write_files


def expected(out, name):
    records = pd.read_parquet(out / "checkpoints" / f"{name}.parquet")
    return records[records["metric"] == "norm_Q_expected"].set_index("layer")["value"]


def squares(norm):
    return float(sum(parameter.detach().double().square().sum() for parameter in norm.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "bert"])
def test_the_manifest_says_it_and_the_numbers_are_those_of_the_weights(kind, hub, options):
    hub.add(REPOSITORY, "main", checkpoint_files(8, kind))
    assert sweep(REPOSITORY, **options) == 0
    out, made = Path(options["out"]), model(8, kind)
    manifest = (out / "manifest.json").read_bytes()
    assert json.loads(manifest)["architecture"] == ("post-ln" if kind == "bert" else "pre-ln")
    norms = (
        {"final_norm": made.gpt_neox.final_layer_norm}
        if kind == "gpt_neox"
        else {
            "embed": made.bert.embeddings.LayerNorm,
            **{
                f"block.{i:02d}": block.output.LayerNorm
                for i, block in enumerate(made.bert.encoder.layer)
            },
        }
    )
    assert expected(out, "main").to_dict() == pytest.approx(
        {name: squares(norm) for name, norm in norms.items()}, rel=1e-9
    )
    assert sweep(REPOSITORY, **options) == 0
    assert (out / "manifest.json").read_bytes() == manifest


def test_models_that_differ_are_told_apart(options, tmp_path):
    models = [
        str(write_files(tmp_path / kind, checkpoint_files(0, kind)))
        for kind in ("gpt_neox", "bert")
    ]
    assert sweep(models, **options) == 0
    manifest = json.loads((Path(options["out"]) / "manifest.json").read_text())
    assert manifest["architecture"] == dict(zip(models, ("pre-ln", "post-ln"), strict=True))


@pytest.mark.slow
def test_the_report_draws_it_dashed_beside_Q(options, tmp_path):  # noqa: N802
    assert sweep(str(local_run(tmp_path / "run", (0, 8))), **options) == 0
    out = Path(options["out"])
    (run,) = read_runs([out])
    with style():
        drawn, other = figures.profile(run, "Q"), figures.profile(run, "V")
        course = figures.dynamics(run, "Q")
    labels = [line.get_label() for line in drawn.figure.axes[0].lines]
    assert "‖γ‖² + ‖β‖²" in labels
    assert not any("γ" in str(line.get_label()) for line in other.figure.axes[0].lines)
    column = course.numbers["expected at final_norm"]
    assert column.tolist() == pytest.approx(
        [expected(out, f"step{step}")["final_norm"] for step in (0, 8)]
    )
    assert torch.isfinite(torch.tensor(column.to_numpy())).all()
