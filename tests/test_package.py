import subprocess
import sys
from pathlib import Path

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


PUBLIC = ["functional.two_nearest_distances", "metrics.TokenMoments", "observe", "text.builtin_corpus"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there_after_import_embedgeo_alone(name):
    done = run(f"import embedgeo; print(embedgeo.{name}.__name__)")
    assert done.stdout.strip() == name.split(".")[-1], done.stderr


def test_import_alone_loads_neither_torch_nor_lightning():
    done = run("import embedgeo, sys; print({'torch', 'lightning', 'transformers'} & sys.modules.keys())")
    assert done.stdout.strip() == "set()", done.stderr


def test_the_mathematics_and_the_metrics_load_no_estimators():
    """``embedgeo.metrics`` loads scipy, by way of torchmetrics."""
    done = run("import embedgeo.functional, sys; print({'scipy', 'numba', 'sklearn', 'skdim'} & sys.modules.keys())")
    assert done.stdout.strip() == "set()", done.stderr
    done = run("import embedgeo.metrics, sys; print({'numba', 'sklearn', 'skdim'} & sys.modules.keys())")
    assert done.stdout.strip() == "set()", done.stderr


def test_an_unknown_name_is_an_attribute_error():
    done = run("import embedgeo; embedgeo.nothing")
    assert "AttributeError: module 'embedgeo' has no attribute 'nothing'" in done.stderr


def test_make_clean_leaves_what_runs_have_written():
    lines = (Path(__file__).parents[1] / "Makefile").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("clean:"))
    recipe = " ".join(line for line in lines[start + 1 :] if line.startswith("\t"))
    assert recipe.split()[:3] == ["rm", "-rf", ".venv"]
    assert not {"runs", "lightning_logs", "runs/"} & set(recipe.split())
