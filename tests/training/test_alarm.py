"""GeometryAlarm and other listeners: by hand, in each monitor, over a resumed run and on ranks."""

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from embedgeo import GeometryAlarm, GeometryMonitor, StepMonitor
from embedgeo.report.runs import read_folder
from embedgeo.report.summary import flags
from embedgeo.training.transformers import GeometryCallback
from tests.models import gpt_neox, token_batch
from tests.ranks import on_two_ranks
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit, moments

JUMP = 24
"""The step at which the weights are changed."""


def records(step, *, jump_at=50, size=12.0, blocks=4, offset=10.0, **fields):
    """Values of a step: noise, and a jump at all blocks."""
    values = offset + np.random.default_rng(step).standard_normal(blocks)
    values += size * (step >= jump_at)
    found = [
        {
            "layer": f"block.{i:02d}",
            "layer_index": i,
            "width": 8,
            "metric": "anisotropy",
            "value": value,
            "stderr": math.nan,
            **fields,
        }
        for i, value in enumerate(values.tolist())
    ]
    return [*found, found[0] | {"layer": "mean", "layer_index": -1, "value": float(values.mean())}]


def watched(alarm, steps, **options):
    """All alarms of a run, and the records that it adds."""
    added = [record for step in steps for record in alarm(step, records(step, **options))]
    return alarm.alarms, added


@pytest.mark.parametrize("size", [12.0, -12.0])
def test_a_jump_is_said_once_with_where_and_since_when(size):
    (found,), added = watched(GeometryAlarm(), range(80), size=size)
    assert (found.step, found.since, found.metric) == (51, 50, "anisotropy")
    assert {*found.layers} == {"block.00", "block.01", "block.02", "block.03", "mean"}
    assert math.copysign(1, found.deviations) == math.copysign(1, size)
    assert abs(found.deviations) > 7
    assert abs(found.value - 10 - size) < 3
    assert abs(found.expected - 10) < 2
    verb = "rose" if size > 0 else "fell"
    assert str(found).startswith(f"step 51: anisotropy {verb} at ")
    assert str(found).endswith("since step 50.")
    assert {record["metric"] for record in added} == {"alarm_anisotropy"}
    assert {record["layer"]: record["value"] for record in added}[found.layers[0]] == (
        found.deviations
    )


def test_a_large_offset_hides_no_jump():
    alarms, _ = watched(GeometryAlarm(), range(80), offset=1e15, size=20.0)
    assert [each.since for each in alarms] == [50]


def test_neither_noise_nor_one_outlier_nor_a_trend_alarms():
    assert watched(GeometryAlarm(), range(200), jump_at=1000) == ([], [])
    alarm = GeometryAlarm()
    for step in range(120):
        alarm(step, records(step, jump_at=1000, offset=10 + 0.3 * step + 40 * (step == 90)))
    assert alarm.alarms == []


def test_a_number_that_is_lost_alarms_at_once_and_once():
    alarm, added = GeometryAlarm(layers=["block.02"]), []
    for step in range(9):
        lost = {"value": math.nan} if step in (3, 4, 6) else {}
        added += alarm(step, records(step, **lost))
    (found,) = alarm.alarms
    assert (found.step, found.layers) == (3, ("block.02",))
    assert "is nan at block.02" in str(found)
    assert [(each["layer"], math.isnan(each["value"])) for each in added] == [("block.02", True)]


def test_other_metrics_and_layers_are_not_watched():
    assert watched(GeometryAlarm(metrics=["M_over_Q"]), range(60)) == ([], [])
    assert watched(GeometryAlarm(layers=["embed"]), range(60)) == ([], [])
    inside = [record | {"layer": "block.00.mlp"} for record in records(0)[:1]]
    alarm = GeometryAlarm()
    for step in range(60):
        alarm(step, [record | {"value": 40.0 * (step > 50)} for record in inside])
    assert alarm.alarms == []


def test_a_resumed_run_goes_on_and_a_step_counts_once():
    whole, _ = watched(GeometryAlarm(), range(80))
    first, second = GeometryAlarm(), GeometryAlarm()
    watched(first, range(51))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    # resumed from a checkpoint before the last measurements
    assert watched(second, range(45, 80))[0] == whole


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metrics": "Q"}, TypeError, "metrics and layers must be lists of names"),
        ({"threshold": 0}, ValueError, "threshold must be a number of deviations above 0; got 0"),
        ({"warm_up": 3}, ValueError, "warm_up must be at least 8 values; got 3"),
    ],
)
def test_arguments_outside_their_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        GeometryAlarm(**options)


# ── listeners of monitors


class Heard:
    """A listener that keeps what it is called with, and fails at a step."""

    def __init__(self, fails_at=None, adds=False):
        self.fails_at = fails_at
        self.adds = adds
        self.steps = []

    def __call__(self, step, records):
        if step == self.fails_at:
            raise RuntimeError("not this one")
        self.steps.append(step)
        assert {record["step"] for record in records} == {step}
        assert {"mean", "block.00"} <= {record["layer"] for record in records}
        return [records[0] | {"metric": "heard", "value": 1.0}] if self.adds else None

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


def loop(monitor, model, last, first=0):
    """Steps of a loop, at one of which the weights are multiplied."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with monitor:
        for step in range(first, last):
            batch = token_batch(8, seed=step % 4)
            with monitor.step(step, batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == JUMP - 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(30)


def test_an_alarm_in_a_loop_is_in_the_history_and_the_report(tmp_path, capsys):
    torch.manual_seed(0)
    model = gpt_neox(num_hidden_layers=2)
    called = []
    alarm = GeometryAlarm(called.append, metrics=["Q"], warm_up=12)
    monitor = StepMonitor(model, 1, metrics=moments, listeners=[alarm], folder=tmp_path)
    loop(monitor, model, JUMP + 4)
    (found,) = alarm.alarms
    assert called == [found]
    assert found.since == JUMP
    added = [record for record in monitor.history if record["metric"] == "alarm_Q"]
    assert {record["step"] for record in added} == {JUMP + 1}
    flag = next(each for each in flags(read_folder(tmp_path)[0]) if each.title == "Alarms")
    assert flag.details[0].startswith(f"step {JUMP + 1}: Q rose by ")


def test_alarms_of_means_and_of_what_is_no_longer_finite_are_told_by_the_report(tmp_path):
    row = {"layer_index": 0, "width": 4, "stderr": math.nan, "layer": "block.00", "metric": "Q"}
    rows = [
        *({**row, "step": step, "value": 1.0 + step} for step in range(3)),
        {**row, "step": 1, "layer": "mean", "layer_index": -1, "metric": "alarm_Q", "value": -9.0},
        {**row, "step": 2, "metric": "alarm_Q", "value": math.nan},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "history.parquet")
    command = [sys.executable, "-m", "embedgeo.cli", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = Path(done.stdout.strip()).read_text(encoding="utf-8")
    for line in (
        "step 1: Q fell by 9.0 of its usual deviations at mean",
        "step 2: Q is no longer finite at block.00",
    ):
        assert f"alarm: {line}" in done.stderr
        assert line in page
    assert "Alarm at step 1, 2." in page
    assert "Missing numbers" not in page
    # piped, it says how far it is
    assert done.stderr.startswith("drawing 1 of ")


def test_every_monitor_calls_its_listeners(tmp_path):
    heard = Heard(adds=True)
    monitor = GeometryMonitor(2, metrics=moments, listeners=[heard], measure_last=False)
    fit(tmp_path, monitor, max_steps=6)
    assert heard.steps == sorted({record["step"] for record in monitor.history})
    assert {r["step"] for r in monitor.history if r["metric"] == "heard"} == {*heard.steps}
    callback = GeometryCallback(2, metrics=moments, listeners=[other := Heard()])
    hf_trainer(tmp_path / "hf", callback).train()
    assert other.steps == sorted({record["step"] for record in callback.history})


def test_one_that_fails_is_taken_out_with_one_warning_or_raises():
    heard, failing = Heard(), Heard(fails_at=2)
    model = gpt_neox(num_hidden_layers=2)
    monitor = StepMonitor(model, 1, metrics=moments, listeners=[failing, heard])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(monitor, model, 5)
    (warning,) = (str(each.message) for each in caught)
    assert "the listener Heard failed at step 2" in warning
    assert "RuntimeError: not this one" in warning
    assert failing.steps == [0, 1]
    assert heard.steps == [0, 1, 2, 3, 4, 5]
    options = {"metrics": moments, "on_error": "raise"}
    with pytest.raises(RuntimeError, match="not this one"):
        loop(StepMonitor(model, 1, listeners=[Heard(fails_at=2)], **options), model, 5)


def test_the_state_of_a_listener_is_saved_and_an_old_alarm_s_is_left_out(capsys):
    model = gpt_neox(num_hidden_layers=2)
    first = StepMonitor(model, 1, metrics=moments, listeners=[Heard()], measure_last=False)
    loop(first, model, 3)
    state = first.state_dict()
    second = StepMonitor(model, 1, metrics=moments, listeners=[heard := Heard()])
    second.load_state_dict(state | {"alarm": {"past": []}})
    assert heard.steps == [0, 1, 2]


def test_what_is_no_listener_is_refused():
    with pytest.raises(TypeError, match=r"listeners must be a list of functions .*; got int"):
        GeometryMonitor(listeners=[3])
    with pytest.raises(TypeError, match="listeners must be a list of functions"):
        GeometryMonitor(listeners=GeometryAlarm())


def test_a_configuration_makes_listeners():
    made = {"class_path": "embedgeo.GeometryAlarm", "init_args": {"threshold": 9.0}}
    (alarm,) = GeometryMonitor(listeners=[made]).listeners
    assert isinstance(alarm, GeometryAlarm)
    assert alarm.threshold == 9.0


def failing_on_one(rank):
    model = gpt_neox(num_hidden_layers=2)
    heard = Heard()
    monitor = StepMonitor(
        model, 1, metrics=moments, listeners=[Heard(fails_at=1 if rank else None), heard]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(monitor, model, 3)
    return [str(each.message) for each in caught], len(monitor.listeners), heard.steps


@pytest.mark.slow
def test_one_that_fails_on_a_rank_is_taken_out_on_all(tmp_path):
    (first, *left), (second, *others) = on_two_ranks(failing_on_one, tmp_path)
    assert left == others == [1, [0, 1, 2, 3]]
    assert second == []
    assert len(first) == 1
    assert "not this one" in first[0]
