"""The presets of papers as they are written, on small models and texts behind the names that they
ask for.
"""

import pandas as pd
import pytest
import yaml

from embedgeo.cli import main
from embedgeo.results.folder import SweepFolder
from tests.sweep.papers import FEWER, ROOT, dataset_files, model_files


@pytest.fixture
def ran(datasets_hub, tmp_path, capsys, request):
    """A preset that was run after a dry run: its options, and the folder."""
    preset = ROOT / "configs" / f"{request.param}.yaml"
    asked = yaml.safe_load(preset.read_text())
    for i, model in enumerate(asked["model"]):
        for revision in (
            ["main"] if asked["steps"] == "final" else ["main", "step1-tokens1B", "step2-tokens2B"]
        ):
            datasets_hub.add(model, revision, model_files(model, i + len(revision)))
    given = ["sweep", "--config", str(preset), "--out", str(tmp_path / "out")]
    assert main([*given, "--dry-run"]) == 0  # there is no dataset yet
    assert (
        f"{len(asked['model']) * (1 if asked['steps'] == 'final' else 2)} checkpoints"
        in capsys.readouterr().out
    )
    name, files = dataset_files(asked["text"])
    datasets_hub.add(name, "main", files)
    given += [f"--{name.replace('_', '-')}={value}" for name, value in FEWER[request.param].items()]
    assert main(given) == 0
    return asked, SweepFolder(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("ran", ["yamagiwa2025"], indirect=True)
def test_the_six_models_of_yamagiwa(ran):
    asked, folder = ran
    assert folder.done() == {f"{model.replace('/', '--')}--main" for model in asked["model"]}
    groups = {
        model.replace("/", "--"): folder.facts(f"{model.replace('/', '--')}--main")["group"]
        for model in asked["model"]
    }
    assert {name for name, group in groups.items() if group == "decoder"} == {
        "openai-community--gpt2",
        "openai-community--gpt2-medium",
    }
    for name in folder.done():
        assert folder.facts(name)["has_step"] == "false"
        records = folder.read(name).set_index(["layer", "metric"])["value"]
        table = pd.read_parquet(folder.path / "tokens" / f"{name}.parquet")
        first = table[(table["layer"] == "hidden.00") & table["n"].between(10, 100_000)]
        assert records["hidden.00", "n"] == first["n"].sum()
        assert records["hidden.02", "V_on_M_r2"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("ran", ["razzhigaev2024"], indirect=True)
def test_the_batches_of_razzhigaev(ran):
    asked, folder = ran
    assert len(folder.done()) == len(asked["model"])
    for name in folder.done():
        records = folder.read(name).set_index(["layer", "metric"])["value"]
        assert records["hidden.01", "anisotropy_batch_std"] > 0
        assert records["hidden.01", "intrinsic_dimension_std"] >= 0


@pytest.mark.parametrize("ran", ["li2025"], indirect=True)
def test_the_last_rows_of_li(ran):
    asked, folder = ran
    assert {len(run) for run in folder.runs().values()} == {2}
    assert len(folder.runs()) == len(asked["model"])
    for name in folder.done():
        records = folder.read(name)
        assert set(records["layer"]) == {"final_norm", "model"}
        values = records.set_index(["layer", "metric"])["value"]
        assert values["final_norm", "n"] < 2048 / 16
        assert 1 < values["final_norm", "effective_rank"] <= 16
