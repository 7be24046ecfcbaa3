"""history.parquet: whole, in the folder of the run, readable by `embedgeo report`, also of a run
that broke off.
"""

import errno
import importlib.metadata
import json
import logging
import pickle
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from itertools import count
from math import isnan
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from embedgeo import GeometryMonitor, StepMonitor, load_results, observe
from embedgeo.report.runs import read_runs
from embedgeo.results import parquet
from embedgeo.results.parquet import HISTORY, HistoryFile, monitored_runs
from tests.models import VOCABULARY, gpt_neox, token_batch
from tests.records import layer_records
from tests.training.loops import loop
from tests.training.runs import (
    TinyLM,
    UserError,
    WithoutDropout,
    fit,
    loader,
    moments,
    raises_in,
    steps,
    value,
)


class Remote(DummyLogger):
    """Writes nothing on this machine but knows a folder, as the loggers of tracking services do."""

    log_dir = None

    def __init__(self, save_dir):
        super().__init__()
        self._save_dir = save_dir

    @property
    def save_dir(self):
        return self._save_dir


def read(folder, name="history.parquet"):
    return pd.read_parquet(folder / name)


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("kind", ["csv", "tensorboard", "remote", "two", "told", "told and logger"])
def test_the_history_is_in_the_loggers_folder_else_where_told(tmp_path, kind):
    csv = CSVLogger(tmp_path, name="csv", version="")
    board = TensorBoardLogger(tmp_path, name="tb", version="")
    loggers, folder = {
        "csv": (csv, tmp_path / "csv"),
        "tensorboard": (board, tmp_path / "tb"),
        "remote": (Remote(str(tmp_path / "wandb")), tmp_path / "wandb"),
        "two": ([csv, board], tmp_path / "csv"),
        "told": (False, tmp_path / "told"),
        "told and logger": (csv, tmp_path / "told"),
    }[kind]
    told = {"folder": str(folder)} if "told" in kind else {}
    monitor = GeometryMonitor(2, metrics=moments, on_error="raise", **told)
    fit(tmp_path, monitor, max_steps=5, logger=loggers)
    written = read(folder)
    assert (
        list(written)
        == HISTORY.names
        == ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    )
    pd.testing.assert_frame_equal(
        written, pd.DataFrame(monitor.history, columns=HISTORY.names), check_exact=True
    )
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    (run,) = read_runs([folder])
    assert run.steps == [0, 2, 4, 5]
    assert run.label == folder.name


def test_the_records_of_a_run_are_dicts_of_half_the_size(tmp_path):
    module, monitor = WithoutDropout(), GeometryMonitor(1, metrics=moments, on_error="raise")
    with observe(module.model, metrics=moments) as geometry, torch.no_grad():
        module.model(**next(iter(loader())))
    fit(tmp_path, monitor, module=module, data=loader(), max_steps=3)
    records = monitor.history
    assert value(monitor, 0, "block.01", "Q") == pytest.approx(
        float(geometry.compute()["block.01"]["Q"]), rel=1e-6
    )
    assert all(isnan(record["stderr"]) for record in records)
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    assert all(type(record) is dict and list(record) == columns for record in records)
    # the first ones have room for more keys
    assert sys.getsizeof(records[-1]) <= sys.getsizeof(dict([*records[-1].items()])) / 2
    assert repr(pickle.loads(pickle.dumps(records))) == repr(records)


@pytest.mark.parametrize("logger", [False, Remote(None), Remote("s3://bucket/runs")])
def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, logger):
    monkeypatch.chdir(tmp_path)
    monitor = GeometryMonitor(2, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=3, logger=logger)
    assert list(tmp_path.iterdir()) == []
    assert steps(monitor) == [0, 2, 3]


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_a_run_that_breaks_off_has_its_history(tmp_path, monkeypatch, error):
    # writing takes 1 s of a few: too long to repeat it
    monkeypatch.setattr(parquet, "monotonic", count().__next__)
    monitor = GeometryMonitor(1, metrics=moments, folder=tmp_path)
    with pytest.raises((UserError, SystemExit)):
        fit(tmp_path, monitor, module=raises_in("training_step", error), max_steps=6)
    assert sorted(read(tmp_path)["step"].unique()) == steps(monitor) == [0, 1]


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_goes_on_with_the_file_and_a_new_run_keeps_it_beside_its_own(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO, "lightning.pytorch")

    def run(**options):
        monitor = GeometryMonitor(
            2, metrics=moments, folder=tmp_path, measure_last=False, on_error="raise"
        )
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)
        fit(tmp_path, monitor, saving, data=loader(), enable_checkpointing=True, **options)
        return steps(monitor), sorted(read(tmp_path)["step"].unique())

    assert run(max_steps=8) == ([0, 2, 4, 6], [0, 2, 4, 6])
    at_3 = tmp_path / "saved" / "epoch=0-step=3.ckpt"
    assert run(max_steps=9, ckpt_path=at_3) == ([4, 6, 8], [0, 2, 4, 6, 8])
    assert not read(tmp_path).duplicated(["step", "layer", "metric"]).any()
    assert "is kept" not in caplog.text
    first = read(tmp_path)
    assert run(max_steps=3) == ([0, 2], [0, 2])
    pd.testing.assert_frame_equal(read(tmp_path, "history.1.parquet"), first, check_exact=True)
    told = (
        "GeometryMonitor: the history of an earlier run is kept in "
        f"{tmp_path / 'history.1.parquet'}."
    )
    assert caplog.messages.count(told) == 1
    assert run(max_steps=1) == ([0], [0])
    assert sorted(read(tmp_path, "history.2.parquet")["step"].unique()) == [0, 2]
    assert sorted(load_results(tmp_path)["step"].unique()) == [0]  # of the last run
    assert [each.steps for each in read_runs([tmp_path])] == [[0]]
    assert sorted(load_results(tmp_path / "history.2.parquet")["step"].unique()) == [0, 2]


def looped(folder, model, steps, every=2, state=None):
    """The state of a monitor after a loop over these steps, which it has written into the
    folder.
    """
    monitor = StepMonitor(
        model, every, metrics=moments, folder=folder, measure_last=False, on_error="raise"
    )
    if state is not None:
        monitor.load_state_dict(state)
    for step in steps:
        with monitor.step(step):
            model(**token_batch())
    state = monitor.state_dict()
    monitor.close()
    return state


@pytest.mark.parametrize("with_state", [False, True])
def test_a_loop_that_goes_on_keeps_its_file_and_one_that_starts_again_keeps_the_other(
    tmp_path, with_state
):
    def written(name="history.parquet"):
        return sorted(read(tmp_path, name)["step"].unique())

    model = gpt_neox()
    state = looped(tmp_path, model, range(5))
    looped(tmp_path, model, range(5, 9), state=state if with_state else None)
    assert (written(), len(list(tmp_path.iterdir()))) == ([0, 2, 4, 6, 8], 1)
    looped(tmp_path, model, range(1, 4))  # another one, that counts from 1
    assert (written(), written("history.1.parquet")) == ([2], [0, 2, 4, 6, 8])
    looped(tmp_path, model, range(4))
    assert (written(), written("history.2.parquet")) == ([0, 2], [2])


def test_a_loop_that_counts_from_1_loses_no_measurement_of_the_one_before(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")

    def written():
        return {
            path.name: sorted(read(tmp_path, path.name)["step"].unique())
            for path in tmp_path.iterdir()
        }

    model = gpt_neox()
    looped(tmp_path, model, range(1, 9), 2)
    state = looped(tmp_path, model, range(1, 2), 5)  # broken off before its first measurement
    assert written() == {"history.parquet": [2, 4, 6, 8]}
    looped(tmp_path, model, range(2, 11), 5, state)
    assert written() == {"history.parquet": [5, 10], "history.1.parquet": [2, 4, 6, 8]}
    looped(tmp_path, model, range(1, 6), 5)
    assert written()["history.2.parquet"] == [5, 10]
    kept = [message for message in caplog.messages if "of an earlier run is kept" in message]
    assert [message.rpartition("/")[2] for message in kept] == [
        "history.1.parquet.",
        "history.2.parquet.",
    ]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_fit_that_was_raised_from_one_step_goes_on(tmp_path):
    monitor = GeometryMonitor(
        1, metrics=moments, folder=tmp_path, measure_last=False, on_error="raise"
    )
    module, run = fit(tmp_path, monitor, data=loader(4), max_epochs=1)
    first = run.global_step
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(4))
    assert (first, sorted(read(tmp_path)["step"].unique())) == (1, [0, 1])
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["history.parquet"]


@pytest.mark.parametrize(
    ("place", "is_local"),
    [
        ("mlflow-artifacts:/1/abc/artifacts", False),
        ("dbfs:/databricks/mlflow/1", False),
        ("s3://bucket/runs", False),
        ("file:runs/my%20artifacts", True),
        ("my runs/abc", True),
    ],
)
def test_a_logger_on_a_server_makes_no_folder_here(tmp_path, monkeypatch, place, is_local):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    monitor = StepMonitor(
        model, 1, layers="1", metrics=moments, log=Remote(place), on_error="raise"
    )
    with monitor, monitor.step(0):
        model(torch.arange(3))
    assert steps(monitor) == [0]
    folder = place.removeprefix("file:").replace("%20", " ")
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")]
    assert found == ([f"{folder}/history.parquet"] if is_local else [])
    assert is_local or not list(tmp_path.iterdir())


def test_a_new_run_that_does_not_measure_or_cannot_write_leaves_the_file_where_it_is(
    tmp_path, monkeypatch
):
    for prefix in ("geometry", "held"):
        file = HistoryFile(tmp_path, prefix)
        file.add([*layer_records(0), *layer_records(5)])
        file.close()
    stops = raises_in("training_step", UserError)
    with pytest.raises(UserError):
        fit(tmp_path, GeometryMonitor(9, window=9, metrics=moments, folder=tmp_path), module=stops)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.held.parquet",
        "history.parquet",
    ]
    file = HistoryFile(tmp_path, "held")
    with monkeypatch.context() as patched:
        patched.setattr(parquet.pq, "write_table", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            file.add(layer_records(0))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.held.parquet",
        "history.parquet",
    ]
    assert file.close() == tmp_path / "history.held.1.parquet"
    assert len(read(tmp_path, "history.held.1.parquet")) == 4
    assert set(load_results(tmp_path)["step"]) == {0, 5}  # of the two that are current


def test_a_prefix_that_is_a_number_is_no_earlier_run(tmp_path):
    for prefix in ("geometry", "1", "geometry"):
        file = HistoryFile(tmp_path, prefix)
        file.add(layer_records(0))
        file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.1.parquet",
        "history.2.parquet",
        "history.parquet",
    ]
    assert [run.name for run in monitored_runs(tmp_path)] == [f"{tmp_path.name} 1", tmp_path.name]


def test_a_second_fit_of_one_trainer_goes_on_with_the_file(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, folder=tmp_path, on_error="raise")
    module, run = fit(tmp_path, monitor, data=loader(16), max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(16))
    assert sorted(read(tmp_path)["step"].unique()) == [0, 2, 4, 6, 8]
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["history.parquet"]
    fit(tmp_path, monitor, data=loader(16), max_epochs=1)  # of another trainer
    assert sorted(read(tmp_path)["step"].unique()) == [0, 2, 4]
    assert sorted(read(tmp_path, "history.1.parquet")["step"].unique()) == [0, 2, 4, 6, 8]


def test_one_monitor_in_two_runs_writes_each_into_its_own_file(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, on_error="raise")
    for name in ("a", "b"):
        fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path, name=name, version=""))
        assert sorted(read(tmp_path / name)["step"]) == sorted(
            [0, 2, 3] * (len(read(tmp_path / name)) // 3)
        )


def test_means_over_blocks_are_in_the_history_and_its_file_as_they_are_logged(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, on_error="raise")
    _, run = fit(tmp_path, monitor, max_steps=2, logger=CSVLogger(tmp_path, name="run", version=""))
    means = [record for record in monitor.history if record["layer"] == "mean"]
    assert {record["layer_index"] for record in means} == {-1}
    for record in means:
        if record["step"] == 2:
            logged = run.callback_metrics[f"geometry.{record['metric']}/mean"]
            assert float(logged) == pytest.approx(record["value"], rel=1e-6, nan_ok=True)
    table = (
        load_results(tmp_path / "run")
        .query("layer == 'mean'")
        .set_index(["step", "metric"])["value"]
    )
    assert {**table} == {(record["step"], record["metric"]): record["value"] for record in means}
    of_blocks = {record["metric"] for record in monitor.history if record["layer"] == "block.00"}
    assert len(means) == len(steps(monitor)) * len(of_blocks)


def test_two_monitors_have_a_file_each_and_the_report_tells_them_apart(tmp_path):
    first = GeometryMonitor(2, metrics=moments, on_error="raise")
    second = GeometryMonitor(
        3, layers="embed", metrics=moments, prefix="held/out", on_error="raise"
    )
    fit(tmp_path, first, second, max_steps=5, logger=CSVLogger(tmp_path, name="run", version=""))
    assert sorted(p.name for p in (tmp_path / "run").glob("*.parquet")) == [
        "history.held%2Fout.parquet",
        "history.parquet",
    ]
    runs = {run.label: run.steps for run in read_runs([tmp_path / "run"])}
    assert runs == {"run": [0, 2, 4, 5], "run held/out": [0, 3, 5]}
    assert {run.label for run in read_runs([tmp_path])} == {*runs}


def test_one_line_at_the_start_and_one_at_the_end_with_a_command_to_paste(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        folder = tmp_path / "my run"
        fit(
            tmp_path,
            GeometryMonitor(50, extra_steps=(1, 2), metrics=moments, folder=folder),
            max_steps=3,
        )
    start, end = (
        record.message for record in caplog.records if "GeometryMonitor" in record.message
    )
    assert start == (
        "GeometryMonitor: 5 layers (embed, block.00, block.01, block.02 and 1 more), "
        "EmbeddingMoments, every 50 steps "
        f"and at 1, 2; written to {folder / 'history.parquet'}."
    )
    assert "\n" not in end
    assert shlex.split(end.split("to look at it: ")[1])[-2:] == ["report", str(folder)]


def test_where_the_file_cannot_be_written_training_measuring_and_logging_go_on(
    tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = CSVLogger(tmp_path, name="log", version="")
    with monkeypatch.context() as patched:
        patched.setattr(parquet.pq, "write_table", full)
        monitor = GeometryMonitor(2, metrics=moments, folder=tmp_path)
        with pytest.warns(
            UserWarning, match="file cannot be written.* OSError: .*No space left on device"
        ) as caught:
            _, run = fit(tmp_path, monitor, module=TinyLM(), max_steps=5, logger=logger)
    assert len([w for w in caught if "GeometryMonitor" in str(w.message)]) == 1
    assert run.global_step == 5
    assert steps(monitor) == [0, 2, 4, 5]
    logged = pd.read_csv(tmp_path / "log" / "metrics.csv")
    assert sorted(logged.dropna(subset="geometry.V/mean")["step"]) == [0, 2, 4, 5]
    assert [path.name for path in tmp_path.glob("*")] == ["log"]


def test_a_file_of_that_name_that_another_program_wrote_is_left_alone_and_named_once(
    tmp_path, caplog
):
    pd.DataFrame({"loss": [1.0]}).to_parquet(tmp_path / "history.parquet")
    monitor = GeometryMonitor(2, metrics=moments, folder=tmp_path)
    with pytest.warns(UserWarning, match="history.parquet must have the columns") as caught:
        fit(tmp_path, monitor, max_steps=5)
    assert len([w for w in caught if "GeometryMonitor" in str(w.message)]) == 1
    assert steps(monitor) == [0, 2, 4, 5]
    assert list(read(tmp_path)) == ["loss"]
    assert "its history is in" not in caplog.text


def named_model(name):
    """A model by hand, whose config takes any name."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4))
    model.config = SimpleNamespace(name_or_path=name)
    return model


def run_by_hand(monitor, model):
    with monitor:
        for step in range(3):
            with monitor.step(step):
                model(token_batch()["input_ids"])


def test_a_models_name_that_is_a_path_is_in_the_file_as_text(tmp_path):
    monitor = StepMonitor(
        model := named_model(Path("checkpoints") / "mine"), 2, layers="0", folder=tmp_path
    )
    run_by_hand(monitor, model)
    origin = json.loads(parquet.read_metadata(tmp_path / "history.parquet")["origin"])
    assert origin["model"] == str(Path("checkpoints") / "mine")


def test_without_the_packages_metadata_the_file_is_written_as_always(tmp_path, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", missing)
    _, monitor = loop(2, every_n_steps=2, metrics=moments, folder=tmp_path)
    assert steps(monitor) == [0, 2]
    assert sorted(read(tmp_path)["step"].unique()) == [0, 2]


def test_an_origin_that_cannot_be_told_turns_monitoring_off_and_leaves_training(tmp_path):
    class Nameless:
        def __str__(self):
            raise RuntimeError("no name")

    monitor = StepMonitor(model := named_model(Nameless()), 2, layers="0", folder=tmp_path)
    with pytest.warns(UserWarning, match="is off for the rest of this run.*no name") as caught:
        run_by_hand(monitor, model)
    assert len(caught) == 1
    assert monitor.history == []


def test_what_could_not_be_written_is_written_once_there_is_room(tmp_path, monkeypatch):
    write_table, failures = (
        parquet.pq.write_table,
        [OSError(errno.ENOSPC, "No space left on device")],
    )

    def full_at_first(*args):
        if failures:
            raise failures.pop()
        write_table(*args)

    monkeypatch.setattr(parquet.pq, "write_table", full_at_first)
    with pytest.warns(UserWarning, match="measuring and logging go on"):
        fit(tmp_path, GeometryMonitor(2, metrics=moments, folder=tmp_path), max_steps=5)
    assert sorted(read(tmp_path)["step"].unique()) == [0, 2, 4, 5]


@pytest.mark.slow
def test_the_file_is_rewritten_in_some_2_percent_of_the_time_and_at_the_end(tmp_path, monkeypatch):
    class Clock:
        now = 0.0

    written = []
    monkeypatch.setattr(parquet, "monotonic", lambda: Clock.now)

    def write_table(table, path):
        written.append(table.num_rows)
        Clock.now += 0.1  # what writing takes
        path.touch()

    monkeypatch.setattr(parquet.pq, "write_table", write_table)
    file = HistoryFile(tmp_path)
    for step in range(10_000):
        file.add(layer_records(step, layers=["embed"]))
        Clock.now += 0.05
    assert 0.1 * len(written) <= 0.025 * Clock.now
    file.close()
    assert written[-1] == 10_000
    file.close()
    assert written.count(10_000) == 1


def test_a_file_that_is_none_of_ours_is_named(tmp_path):
    (tmp_path / "history.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"history.parquet must be a Parquet file.*Remove it"):
        HistoryFile(tmp_path).add(layer_records(0))


def test_processes_that_were_launched_together_but_do_not_know_of_each_other_have_a_file_each(
    tmp_path, monkeypatch
):
    def train(num_rows):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
        with StepMonitor(
            model, 1, layers="1", metrics=moments, folder=tmp_path, measure_last=False
        ) as monitor:
            for step in range(2):
                with monitor.step(step):
                    model(torch.arange(num_rows)).sum().backward()

    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.warns(UserWarning, match=f"this is process {rank} of 2") as warned:
            train(num_rows=3 + rank)
        assert len(warned) == 1
    records = load_results(tmp_path).query("metric == 'n'")
    numbers = {run: set(of_run) for run, of_run in records.groupby("run")["value"]}
    assert numbers == {tmp_path.name: {3.0}, f"{tmp_path.name} rank1": {4.0}}
