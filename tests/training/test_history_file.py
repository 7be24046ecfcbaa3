"""history.parquet: whole, in the folder of the run, readable by `embedgeo report`, also of a run
that broke off.
"""

import errno
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as hf
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from embedgeo import Anisotropy, GeometryCallback, GeometryMonitor, StepMonitor, load_results
from embedgeo.report.runs import read_runs
from embedgeo.results import parquet
from embedgeo.results.parquet import HistoryFile
from embedgeo.training.clock import Clock
from tests.records import layer_records
from tests.training.hf_runs import hf_trainer
from tests.training.loops import go_on
from tests.training.runs import (
    OPTIONS,
    RESUMED,
    fit,
    loader,
    moments,
    n_at,
    of_monitors,
    steps,
)

pytestmark = RESUMED


class Remote(DummyLogger):
    """Writes nothing on this machine but knows a folder, as the loggers of tracking services do."""

    log_dir = None
    save_dir = None


def read(folder, name="history.parquet"):
    return pd.read_parquet(folder / name)


def written(folder):
    """The steps in each file."""
    files = folder.glob("*.parquet")
    return {path.name: sorted(read(folder, path.name)["step"].unique()) for path in files}


def small_model():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))


def looped(folder, numbers, every=2, state=None, model=None, **options):
    """The state of a monitor after a loop over these steps, which it has written into the
    folder.
    """
    model = model or small_model()
    options = {"layers": "1", "folder": folder, "measure_last": False, **OPTIONS, **options}
    monitor = StepMonitor(model, every, **options)
    if state is not None:
        monitor.load_state_dict(state)
    go_on(monitor, numbers, lambda: model(torch.arange(3)))
    state = monitor.state_dict()
    monitor.close()
    return state


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        (None, None),
        ("mlflow-artifacts:/1/abc/artifacts", None),
        ("s3://bucket/runs", None),
        ("my runs/abc", "my runs/abc"),
    ],
)
def test_a_logger_on_a_server_or_without_a_folder_makes_none_here(
    tmp_path, monkeypatch, place, folder
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Remote, "save_dir", place)
    looped(None, [0], log=Remote())
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")]
    assert found == ([f"{folder}/history.parquet"] if folder else [])
    assert folder or not list(tmp_path.iterdir())


@pytest.mark.parametrize("with_state", [False, True])
def test_a_loop_that_goes_on_keeps_its_file_and_one_that_starts_again_keeps_the_other(
    tmp_path, caplog, with_state
):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    state = looped(tmp_path, range(5))
    looped(tmp_path, range(5, 9), state=state if with_state else None)
    assert written(tmp_path) == {"history.parquet": [0, 2, 4, 6, 8]}
    first = read(tmp_path)
    looped(tmp_path, range(1, 4))  # another one, that counts from 1
    kept = tmp_path / "history.1.parquet"
    told = f"StepMonitor: the history of an earlier run is kept in {kept}."
    assert caplog.messages.count(told) == 1
    pd.testing.assert_frame_equal(read(tmp_path, kept.name), first, check_exact=True)
    assert [each.steps for each in read_runs([tmp_path])] == [[2]]
    assert sorted(load_results(tmp_path)["step"].unique()) == [2]  # of the last run
    assert sorted(load_results(kept)["step"].unique()) == [0, 2, 4, 6, 8]
    assert written(tmp_path) == {"history.parquet": [2], "history.1.parquet": [0, 2, 4, 6, 8]}
    state = looped(tmp_path, range(1, 2), 5)  # broken off before its first measurement
    assert written(tmp_path)["history.parquet"] == [2]
    looped(tmp_path, range(2, 11), 5, state)
    assert written(tmp_path) == {
        "history.parquet": [5, 10],
        "history.1.parquet": [0, 2, 4, 6, 8],
        "history.2.parquet": [2],
    }


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    looped("~/run", range(3))
    assert len(load_results("~/run")) == len(read(tmp_path / "run"))


def batched(size):
    return lambda dim: [Anisotropy(dim, batch_size=size)]


@pytest.mark.parametrize(
    ("options", "others", "name"),
    [
        ({}, {"probe": [torch.arange(3)]}, "measured_on"),
        ({}, {"window": 2}, "window"),
        ({"metrics": batched(2)}, {"metrics": batched(3)}, "Anisotropy"),
    ],
)
def test_numbers_of_other_rows_or_arguments_are_no_continuation(
    tmp_path, caplog, options, others, name
):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    state = looped(tmp_path, range(5), **options)
    looped(tmp_path, range(5, 9), state=state, **{**options, **others})
    assert written(tmp_path)["history.1.parquet"] == [0, 2, 4]
    assert f"an earlier run, with another {name}, is kept" in caplog.text


@pytest.mark.parametrize(
    "others",
    [{"model": nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8))}, {"layers": "0"}],
    ids=["width", "layers"],
)
def test_another_model_or_layer_at_later_steps_is_no_continuation_unless_a_state_says_so(
    tmp_path, caplog, others
):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    state = looped(tmp_path / "a", range(5))
    looped(tmp_path / "a", range(5, 9), state=state, **others)
    assert written(tmp_path / "a") == {"history.parquet": [0, 2, 4, 6, 8]}
    looped(tmp_path / "b", range(5))
    looped(tmp_path / "b", range(5, 9), **others)
    assert written(tmp_path / "b") == {"history.1.parquet": [0, 2, 4], "history.parquet": [6, 8]}
    assert "earlier run, with another set of layers or widths, is kept in" in caplog.text
    _, last = read_runs(sorted((tmp_path / "b").glob("*.parquet")))
    assert last.differences == ({"layers": ("1", "0")} if "layers" in others else {})


def test_a_prefix_names_no_history_of_an_earlier_run_or_another_monitor(tmp_path):
    for prefix in ("1", "a.20", "", "..", ".a", "a."):
        with pytest.raises(ValueError, match=rf"^prefix must not .* number; got '{prefix}'\."):
            StepMonitor(small_model(), folder=tmp_path, prefix=prefix)
    for prefix in ("a1", "1a", "1.a"):
        looped(tmp_path, range(3), prefix=prefix)
    assert set(load_results(tmp_path)["run"]) == {
        f"{tmp_path.name} {p}" for p in ("a1", "1a", "1.a")
    }


def test_what_a_killed_process_left_of_a_history_is_removed_and_all_it_wrote_is_there(tmp_path):
    write = (
        "import os, sys; from pathlib import Path; from embedgeo.results import parquet\n"
        "file = parquet.HistoryFile(Path(sys.argv[1]))\n"
        "record = {'step': 0, 'layer': 'a', 'layer_index': 0, 'width': 4, 'metric': 'V'}\n"
        "file.add([{**record, 'value': 1.0}])\n"
        "parquet.pq.write_table = lambda table, path: path.touch() or os.kill(os.getpid(), 9)\n"
        "file._paused_until = 0; file.add([{**record, 'step': 2, 'value': 2.0}])\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", write, str(tmp_path)], check=False).returncode == -9
    )
    assert len([*tmp_path.glob(".embedgeo-*")]) == 1
    assert read(tmp_path)["step"].tolist() == [0]
    of_others = tmp_path / ".tmp-3a12f9d4-9dad-41d1-80b4-00c04fd430c8"
    of_others.mkdir()
    os.utime(of_others, (0, 0))
    looped(tmp_path, range(3))
    assert [*tmp_path.glob(".*")] == [of_others]


def test_another_probe_is_named(tmp_path):
    one, other = ({"probe": [torch.arange(3) + i]} for i in range(2))
    state = looped(tmp_path, range(5), **one)
    state = looped(tmp_path, range(5, 9), state=state, **one)
    with pytest.warns(UserWarning, match="probe are others than those of earlier steps"):
        looped(tmp_path, range(9, 13), state=state, **other)
    assert written(tmp_path) == {"history.parquet": [0, 2, 4, 6, 8, 10, 12]}
    (run,) = read_runs([tmp_path])
    assert run.settings["probe"].count(", ") == 1  # neither one nor the other


def test_time_between_batches_is_not_taken_for_that_of_batches(monkeypatch):
    now = iter((0, 0, 3, 13, 24, 27, 30))  # 1 for a batch, 2 to measure it, 10 between
    monkeypatch.setattr("embedgeo.training.clock.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    for is_plain in (False, True, False):
        clock.begin(is_plain=is_plain)
        clock.end()
    clock.num_measured = 2
    assert str(clock).startswith("measured 2 steps in 4.0 s, 13.3 % of the run; the first took 2.0")


def test_a_resumed_run_drops_nothing_that_was_measured(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    model = small_model()
    resumed = {"model": model, "state": looped(tmp_path, range(5), model=model)}
    looped(tmp_path, range(5, 9), **resumed)
    for _ in range(2):  # the second time all is the same
        looped(tmp_path, range(5, 7), **resumed)
    looped(tmp_path, range(3))  # another run
    looped(tmp_path, range(5, 7), **resumed)
    looped(tmp_path, range(5, 7), **resumed, ignore_token_ids=[0])
    assert written(tmp_path) == {
        "history.1.parquet": [0, 2, 4, 6, 8],
        "history.2.parquet": [0, 2, 4, 6],
        "history.3.parquet": [0, 2],
        "history.4.parquet": [6],
        "history.parquet": [6],
    }
    assert "an earlier run, with another ignore_token_ids, is kept" in caplog.text


@pytest.mark.parametrize("way", ["lightning", "hugging face", "loop"])
def test_what_a_checkpoint_counts_as_measured_is_in_the_file(way, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PAUSE", 1e9)  # it is written once, unless it has to be
    options, seen = {"folder": tmp_path / "own", "every_n_steps": 1, **OPTIONS}, []

    def see(*args, **kwargs):
        seen.extend(written(options["folder"])["history.parquet"])

    if way == "lightning":
        sees, saving = Callback(), ModelCheckpoint(tmp_path, every_n_train_steps=3)
        sees.on_save_checkpoint = see
        callbacks = GeometryMonitor(**options), sees, saving
        fit(tmp_path, *callbacks, enable_checkpointing=True, max_steps=4)
    elif way == "hugging face":
        sees, saving = hf.TrainerCallback(), {"save_strategy": "steps", "save_steps": 3}
        sees.on_save = see
        hf_trainer(tmp_path, GeometryCallback(**options), sees, max_steps=4, **saving).train()
    else:
        model = small_model()
        monitor = StepMonitor(model, layers="1", **options)
        go_on(monitor, range(3), lambda: model(torch.arange(3)))
        monitor.state_dict()
        see()
    assert seen[:2] == [0, 1]


def test_what_a_broken_off_run_holds_is_written_before_another_one_opens_its_file(
    tmp_path, monkeypatch
):
    """Also if it was told a relative folder, and the process works elsewhere now."""
    monkeypatch.setattr(parquet, "PAUSE", 1e9)
    monkeypatch.chdir(tmp_path)
    model = small_model()
    broken_off = StepMonitor(model, 1, layers="1", folder="own", **OPTIONS)
    go_on(broken_off, range(4), lambda: model(torch.arange(3)))
    assert written(tmp_path / "own") == {"history.parquet": [0]}
    monkeypatch.chdir("/")
    looped(tmp_path / "own", range(1), 1)
    assert written(tmp_path / "own")["history.1.parquet"] == [0, 1, 2]


def test_a_second_fit_of_one_trainer_goes_on_with_the_file_and_one_of_another_does_not(
    tmp_path, caplog
):
    caplog.set_level("INFO", "lightning.pytorch")
    monitor = GeometryMonitor(2, folder=tmp_path, **OPTIONS)
    module, run = fit(tmp_path, monitor, data=loader(16), max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(16))
    assert written(tmp_path) == {"history.parquet": [0, 2, 4, 6, 8]}
    assert not pd.DataFrame(monitor.history).duplicated(["step", "layer", "metric"]).any()
    said = "history drops what an earlier fit measured from step 0 on"
    fit(tmp_path, monitor, data=loader(16), max_epochs=1)
    assert caplog.text.count(said) == 1
    assert written(tmp_path) == {
        "history.parquet": [0, 2, 4],
        "history.1.parquet": [0, 2, 4, 6, 8],
    }


def test_lines_at_the_start_and_at_the_end_with_a_command_to_paste(tmp_path, caplog):
    folder = tmp_path / "my run"
    monitor = GeometryMonitor(50, extra_steps=(1, 2), metrics=moments, folder=folder)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, monitor, max_steps=6, accumulate_grad_batches=2)
    start, *_, took, end = (each for each in caplog.messages if "GeometryMonitor" in each)
    assert start == (
        "GeometryMonitor: 5 layers (embed, block.00, block.01, block.02 and 1 more), "
        f"EmbeddingMoments, every 50 steps and at 1, 2; written to {folder / 'history.parquet'}.\n"
        "GeometryMonitor: up to 96 rows a measurement (batches like the first, each run once: 2), "
        "token ids of gpt_neox.embed_in, the model's mask where it is given one.\n"
        "GeometryMonitor: It takes at most 8.67 MB of the device beside the model, and 200 kB of "
        "the host for sampled rows; max_bytes= is 1.07 GB."
    )
    assert n_at(monitor)[0] == 96
    said = r"measured 4 steps in \d+\.\d s, \d+\.\d % of the run; the first took \d+\.\d s\."
    assert re.search(said, took)
    assert "\n" not in end
    assert shlex.split(end.split("to look at it: ")[1])[-2:] == ["report", str(folder)]


@pytest.mark.parametrize("failures", [1, 99])
def test_a_full_disk_ends_nothing_and_the_file_is_written_once_there_is_room(
    tmp_path, monkeypatch, failures
):
    write_table, full = parquet.pq.write_table, [OSError(errno.ENOSPC, "No space left")] * failures

    def full_at_first(*args):
        if full:
            raise full.pop()
        write_table(*args)

    monkeypatch.setattr(parquet.pq, "write_table", full_at_first)
    monitor = GeometryMonitor(2, metrics=moments, folder=tmp_path / "told")
    logger = CSVLogger(tmp_path, name="log", version="")
    said = "file cannot be written.* OSError: .*No space left"
    with pytest.warns(UserWarning, match=said) as caught:
        _, run = fit(tmp_path, monitor, max_steps=5, logger=logger)
    assert len(of_monitors(caught)) == 1
    assert run.global_step == 5
    assert steps(monitor) == [0, 2, 4, 5]
    logged = pd.read_csv(tmp_path / "log" / "metrics.csv")
    assert sorted(logged.dropna(subset="geometry.V/mean")["step"]) == [0, 2, 4, 5]
    there = {"history.parquet": [0, 2, 4, 5]} if failures == 1 else {}
    assert written(tmp_path / "told") == there


@pytest.mark.parametrize("is_parquet", [False, True])
def test_a_file_of_that_name_that_is_no_history_is_kept_beside_it_and_named_once(
    tmp_path, is_parquet
):
    path = tmp_path / "history.parquet"
    path.write_bytes(b"PAR1 not really")
    if is_parquet:
        pd.DataFrame({"loss": [1.0]}).to_parquet(path)
    before = path.read_bytes()
    said = "must have the columns" if is_parquet else "must be a Parquet file"
    with pytest.warns(UserWarning, match=f"history.parquet {said}.* kept as") as caught:
        looped(tmp_path, range(5), on_error="warn")
    assert len(caught) == 1
    assert (tmp_path / "history.1.unreadable").read_bytes() == before
    assert written(tmp_path) == {"history.parquet": [0, 2, 4]}
    assert sorted(load_results(tmp_path)["step"].unique()) == [0, 2, 4]


def test_the_step_of_a_resumption_has_records_of_one_measurement_alone(tmp_path):
    def at_two(records, start=0):
        HistoryFile(tmp_path, start=start, run="1").add(records)
        return {*read(tmp_path).query("step == 2")["metric"]}

    both = {"V", "V_without_massive"}
    assert at_two(layer_records(2, metrics=both)) == both
    assert at_two(layer_records(4), 2) == both  # which has no record of 2
    assert at_two(layer_records(2), 2) == {"V"}


def test_what_could_not_be_or_was_not_yet_written_is_written_at_the_interpreters_exit(tmp_path):
    code = f"""if True:
        from pathlib import Path
        from embedgeo.results.parquet import HistoryFile
        from tests.records import layer_records
        folders = [Path({str(tmp_path)!r}, name) for name in ("back", "lost")]
        for folder in folders:
            folder.touch()
            file = HistoryFile(folder)
            for write in (lambda: file.add(layer_records(0)), file.close):
                try:
                    write()
                except OSError:
                    print("full")
        folders[0].unlink()
        broken_off = HistoryFile(Path({str(tmp_path)!r}, "held"))
        for step in range(2):  # the second one waits, and nobody closes
            broken_off.add(layer_records(step))
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "full\n" * 4
    assert (written(tmp_path / "back"), written(tmp_path / "held")) == (
        {"history.parquet": [0]},
        {"history.parquet": [0, 1]},
    )
    said = f"embedgeo: {tmp_path / 'lost' / 'history.parquet'} could not be written: .*\n"
    assert re.fullmatch(said, done.stderr)


def test_a_second_monitor_of_one_prefix_and_folder_loses_nothing_of_the_first(
    tmp_path, monkeypatch
):
    # as if other processes took names just after a look at them
    monkeypatch.setattr(
        Path, "exists", lambda path: path.name == "history.parquet" and path.is_file()
    )
    one, two = (HistoryFile(tmp_path, run=run) for run in ("1", "2"))

    def goes_on(file, step):
        file.add(layer_records(step))
        file.close()

    one.add(layer_records(0))
    with monkeypatch.context() as failing:
        failing.setattr(Path, "replace", lambda path, other: os.stat("none"))
        with pytest.raises(FileNotFoundError):
            two.add(layer_records(1))
    assert written(tmp_path) == {"history.parquet": [0], "history.1.parquet": [0]}
    two.write()
    with pytest.warns(UserWarning, match=r"another one writes to .*history\.parquet") as caught:
        goes_on(one, 2)
    goes_on(two, 3)
    assert len(caught) == 1
    assert written(tmp_path) == {
        "history.parquet": [1, 3],
        "history.1.parquet": [0],
        "history.2.parquet": [0, 2],
    }


FORKS = """
import os, sys
from pathlib import Path
from embedgeo.results.parquet import HistoryFile
from embedgeo.results.records import model_record

file = HistoryFile(Path(sys.argv[1]))
for step in range(2):  # the second one waits
    file.add([{"step": step, **model_record("loss", 1.0)}])
read, written = os.pipe()
if not os.fork():
    os.close(written)
    os.read(read, 1)
    sys.exit()
file.add([{"step": 2, **model_record("loss", 1.0)}])
file.close()
os.close(written)
os.wait()
"""


def test_a_fork_that_ends_leaves_the_history_as_it_is(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True)
    assert [*load_results(tmp_path)["step"]] == [0, 1, 2]
