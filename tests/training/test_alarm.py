"""GeometryAlarm and other listeners: by hand, in each monitor, over a resumed run and on ranks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from embedgeo import GeometryAlarm, StepMonitor
from embedgeo.report.runs import read_folder
from embedgeo.report.summary import flags
from tests.models import gpt_neox, token_batch
from tests.training.runs import moments

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
