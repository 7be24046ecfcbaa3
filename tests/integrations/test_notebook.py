"""The notebook runs from top to bottom, and shows each figure once."""

import os
import shutil
import subprocess
import sys

import nbformat

from tests.files import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_shows_a_table_and_each_figure_once(tmp_path):
    shutil.copy(NOTEBOOK, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--nbmake",
        "--overwrite",
        "-p",
        "no:cacheprovider",
        NOTEBOOK.name,
    ]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": path},
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(command, check=False, timeout=600, **options)
    assert done.returncode == 0, done.stdout[-3000:]
    cells = [
        cell
        for cell in nbformat.read(tmp_path / NOTEBOOK.name, 4).cells
        if cell.cell_type == "code"
    ]
    assert len(cells) < 10
    pictures, tables = [], []
    for cell in cells:
        data = [output.get("data", {}) for output in cell.outputs]
        pictures.append(sum("image/png" in each for each in data))
        tables.append(sum("text/html" in each for each in data))
        assert pictures[-1] == ("embedgeo.plot(" in cell.source)
    assert sum(pictures) == 3
    assert sum(tables) == 1


def test_the_notebook_is_kept_without_outputs():
    for cell in nbformat.read(NOTEBOOK, 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
