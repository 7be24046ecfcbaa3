"""Runs that a whole session of tests reads: each is made once, by the first process that needs it.

Nothing may be written into their folders.
"""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

OPTIONS = {
    "seq_len": 16,
    "num_tokens": 512,
    "batch_size": 8,
    "token_tables": True,
    "save_samples": True,
    "spectrum": True,
    "jackknife": 4,
}
"""Of the shared sweep."""
DEMO_STEPS = [0, 1, 2]
DEMO = {
    "max_steps": 2,
    "every_n_steps": 4,
    "num_layers": 1,
    "hidden_size": 32,
    "vocab_size": 512,
    "seq_len": 64,
    "batch_size": 2,
}


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Returns the folder of a name, which is made by a function of it unless another process of
    the session has made it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name, make):
        folder, is_made = base / name, base / f"{name}.made"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made.exists():
                folder.mkdir()
                make(folder)
                is_made.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def swept(made_once):
    """The folder of a sweep with all tables over steps 0, 2, 8, and 9, which has the weights of
    step 8; and what `embedgeo drift` adds.
    """
    from embedgeo.cli import drift
    from embedgeo.sweep import SweepSettings, sweep
    from tests.sweep.tiny import TEXT, checkpoint_files, local_run, write_files

    def make(folder):
        run = local_run(folder / "run", (0, 2, 8))
        write_files(run / "step9", checkpoint_files(8))
        (folder / "text.txt").write_text("\n".join(TEXT * 8))
        asked = {**OPTIONS, "text": str(folder / "text.txt"), "out": str(folder / "out")}
        assert sweep(SweepSettings(str(run), **asked)) == 0
        drift(folder / "out")

    return made_once("swept", make) / "out"


class Demo(NamedTuple):
    """The folder of a demo, and what the command printed to stdout."""

    out: Path
    printed: str


@pytest.fixture(scope="session")
def demo(made_once):
    """A tiny demo by the console script with a configuration file: a training run with a monitor,
    its sweep in ``sweep`` and the report of that in ``sweep/report``.
    """

    def make(folder):
        (folder / "tiny.yaml").write_text("".join(f"{key}: {DEMO[key]}\n" for key in DEMO))
        script = Path(sys.executable).with_name("embedgeo")
        done = subprocess.run(
            [script, "demo", "--config", folder / "tiny.yaml", "--out", folder / "out"],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # what the report opens with, its flags and how far it is, and nothing else
        assert "M / Q: " in done.stderr
        for line in done.stderr.splitlines():
            if line.startswith(("drawing ", "Read with care: ")):
                continue
            assert re.match(r"[\w /]+: -?[\d.]+ ± [\d.]+ at step 0, ", line)
        (folder / "printed.txt").write_text(done.stdout)

    folder = made_once("demo", make)
    return Demo(folder / "out", (folder / "printed.txt").read_text())
