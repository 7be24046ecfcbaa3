"""What changes between and beside sweeps: weights that are replaced, other models, damaged files,
other processes.
"""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from embedgeo.results.folder import SweepFolder
from tests.files import contents
from tests.sweep.reader import Reader
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import changed, checkpoint_files, local_run, write_files

WEIGHTS = "model.safetensors"
pytestmark = pytest.mark.usefixtures("reader")


def done_of(said):
    return next(line for line in said.splitlines() if "checkpoints done" in line)


# ── weights that are replaced
# ───────────────────────────────────────────────────────────────────────────────────────


def test_weights_that_were_replaced_are_named_and_measured_again(tmp_path, options, printed):
    run = local_run(tmp_path / "run", steps=(1, 2))
    sweep(run, **options)
    folder = SweepFolder(options["out"])
    first, second = folder.read("step1"), folder.read("step2")
    kept = (folder.checkpoints / "step1.parquet").stat().st_mtime_ns
    (run / "step2" / WEIGHTS).write_bytes(checkpoint_files(8)[WEIGHTS])
    os.utime(run / "step2" / WEIGHTS, (1, 1))  # copied with its time, as by cp -p
    printed()
    assert sweep(run, **options, dry_run=True) == 0
    assert re.search(r"step2 .* measured with other weights or config.json: to be ", printed())
    assert folder.read("step2").equals(second)
    assert sweep(run, **options) == 0
    said = printed()
    assert "replaced: step2 was measured before with other weights or config.json; measu" in said
    again = folder.read("step2")
    assert again["weights_sha256"].iloc[0] != second["weights_sha256"].iloc[0]
    assert not again["value"].equals(second["value"])
    assert folder.read("step1").equals(first)
    assert (folder.checkpoints / "step1.parquet").stat().st_mtime_ns == kept
    assert sweep(run, **options) == 0
    assert "replaced" not in printed()
    expected = {**options, "out": tmp_path / "expected"}
    sweep(run, **expected)
    assert (options["out"] / "metrics.csv").read_bytes() == (
        tmp_path / "expected" / "metrics.csv"
    ).read_bytes()


def test_a_folder_of_another_run_is_another_model_under_the_same_relative_path(
    tmp_path, options, monkeypatch
):
    for name in ("a", "b"):
        local_run(tmp_path / name / "checkpoints", steps=(1,))
    monkeypatch.chdir(tmp_path / "a")
    sweep("checkpoints", **options)
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ValueError, match=r"model was \['../a/checkpoints'\], is \['../b/"):
        sweep("checkpoints", **options)
    monkeypatch.chdir(tmp_path)
    assert sweep("a/checkpoints", **options) == 0
    (tmp_path / "latest").symlink_to("a")
    assert sweep("latest/checkpoints", **options) == 0
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("b")
    with pytest.raises(ValueError, match=r"is \['../b/"):
        sweep("latest/checkpoints", **options)


def test_replaced_weights_that_cannot_be_measured_are_not_done(tmp_path, options, printed):
    run = local_run(tmp_path / "run", steps=(1, 2))
    sweep(run, **options)
    kept = checkpoint_files(2)[WEIGHTS]
    for step, content, left in ((2, b"", [1]), (2, b"no", [1]), (1, b"", []), (2, kept, [2])):
        (run / f"step{step}" / WEIGHTS).write_bytes(content)
        printed()
        assert sweep(run, **options) == 3
        assert done_of(printed()) == f"{len(left)} of 2 checkpoints done"
        assert pd.read_csv(options["out"] / "metrics.csv")["step"].unique().tolist() == left


def test_a_configuration_that_was_replaced_is_measured_again_and_not_copied(
    tmp_path, options, printed
):
    run = local_run(tmp_path / "run", steps=(1,))
    sweep(run, **options)
    folder = SweepFolder(options["out"])
    first = folder.read("step1")
    other = changed(checkpoint_files(1), hidden_act="relu")
    write_files(run / "step2", other)
    assert sweep(run, **options) == 0
    assert not folder.read("step2")["value"].equals(first["value"])
    write_files(run / "step1", {"config.json": other["config.json"]})
    write_files(run / "step3", other)
    printed()
    assert sweep(run, **options) == 0
    assert "replaced: step1 was" in (said := printed())
    assert done_of(said) == "3 of 3 checkpoints done"
    values = [folder.read(f"step{step}")["value"] for step in (1, 2, 3)]
    assert all(each.equals(values[1]) for each in values)
    assert sweep(run, **options) == 0
    assert "replaced" not in printed()


# ── damaged files and folders of other versions
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_file_is_named_and_removing_it_is_safe(tmp_path, options):
    run = local_run(tmp_path / "run", steps=(1, 2))
    sweep(run, **options)
    out = options["out"]
    path = out / "checkpoints" / "step2.parquet"
    before, records = path.read_bytes(), pd.read_parquet(path)
    removing = "Removing it is safe: the next sweep measures step2 again"
    earlier = r"step2\.parquet must have .*; stderr missing\. Was it written by another ver"
    for harm, said in (
        (lambda: path.write_bytes(before[:-50]), removing),
        (lambda: path.write_bytes(b""), removing),
        (lambda: records.assign(value="high").to_parquet(path), removing),
        (lambda: records.iloc[:0].to_parquet(path), removing),
        (lambda: records.drop(columns="stderr").to_parquet(path), earlier),
    ):
        harm()
        damaged = contents(out)
        with pytest.raises(ValueError, match=said) as caught:
            sweep(run, **options)
        assert str(path) in str(caught.value)
        assert contents(out) == damaged
    path.unlink()
    assert sweep(run, **options) == 0
    assert path.read_bytes() == before


def test_results_without_a_manifest_are_refused_as_they_are(tmp_path, options):
    run = local_run(tmp_path / "run", steps=(1,))
    sweep(run, **options)
    (options["out"] / "manifest.json").unlink()
    before = contents(options["out"])
    with pytest.raises(ValueError, match=r"does not say which, for its manifest\.json is gone"):
        sweep(run, **options)
    assert contents(options["out"]) == before


# ── two sweeps of the same checkpoints
# ──────────────────────────────────────────────────────────────────────────────

HOLD = """
import sys
from pathlib import Path
from embedgeo.sweep.locks import Locks
locks = Locks(Path(sys.argv[1]))
print(locks.take(sys.argv[2]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold():
    """Processes that hold names, as a sweep holds what it has begun."""
    started = []

    def start(path, name):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        assert process.stdout.readline() == "True\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_another_sweep_has_begun_is_left_to_it_and_taken_when_it_is_killed(
    tmp_path, options, printed, monkeypatch, hold
):
    run = local_run(tmp_path / "run", steps=(1,))
    sweep(run, **options)
    folder = SweepFolder(options["out"])
    local_run(run, steps=(2, 8))
    # a duplicate of what the other has begun waits, too
    write_files(run / "step9", checkpoint_files(2))
    others = [hold(folder.path, name) for name in ("step2", "step3")]
    seen = []

    def killed(seconds):
        seen.append(folder.done())
        for other in others:
            other.kill()
            other.wait()

    monkeypatch.setattr("time.sleep", killed)
    printed()
    assert sweep(run, **options) == 0
    assert seen == [{"step1", "step8"}]
    assert folder.done() == {"step1", "step2", "step8", "step9"}
    assert list(folder.path.glob(".*")) == []
    said = printed()
    assert said.count("another sweep is at work in") == 1
    assert said.count("waiting for another sweep to be through with step2, step9") == 1
    assert done_of(said) == "4 of 4 checkpoints done"


def test_a_folder_that_cannot_be_locked_takes_steps_that_are_given_alone(
    tmp_path, options, monkeypatch
):
    def no_locks(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    run = str(local_run(tmp_path / "run", steps=(1, 2)))
    match = r"cannot be locked \(\[Errno 37\] .*\)\. Give each process --steps of its own"
    with pytest.raises(OSError, match=match):
        sweep(run, **options)
    other = {**options, "out": tmp_path / "other"}
    assert sweep(run, **other, steps="1") == 0
    assert SweepFolder(other["out"]).done() == {"step1"}


def test_metrics_csv_is_written_where_a_sweep_ends_or_is_stopped(tmp_path, options, monkeypatch):
    run = local_run(tmp_path / "run", steps=(0, 1, 2))
    table, seen, measure = options["out"] / "metrics.csv", [], Reader.measure

    def stopped(*args):
        seen.append(table.exists())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "measure", stopped)
        with pytest.raises(KeyboardInterrupt):
            sweep(run, **options)
    assert not any(seen)
    assert pd.read_csv(table)["step"].nunique() == 2
    sweep(run, **options)
    assert set(pd.read_csv(table)["step"]) == {0, 1, 2}
