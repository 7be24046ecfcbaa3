"""Sets of metrics by width, and the memory that metrics take."""

import logging
import math
import re
from pathlib import Path

import pytest
import torch

import embedgeo
from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    GeometryMonitor,
    IntrinsicDimension,
    StepMonitor,
    TokenMoments,
    auto_metrics,
    observe,
)
from embedgeo.sweep.measure import metrics_function as sweep_factory
from embedgeo.sweep.settings import SweepSettings
from tests.data import metrics as every_metric
from tests.data import token_rows
from tests.models import VOCABULARY, gpt_neox, token_batch
from tests.training.runs import fit


@pytest.mark.parametrize(
    ("dim", "moments"), [(64, TokenMoments), (1600, TokenMoments), (4096, EmbeddingMoments)]
)
def test_what_is_measured_at_a_width(dim, moments):
    kinds = [type(metric) for metric in auto_metrics(dim)]
    assert kinds == [moments, Anisotropy, IntrinsicDimension]


@pytest.mark.parametrize("limit", [1, 1000, 3000, 20_000, 400_000, 10_000_000])
def test_what_is_held_stays_within_the_limit(limit):
    metrics = auto_metrics(16, max_state_bytes=limit)
    for metric in metrics:
        for seed in range(3):
            metric.update(*token_rows(1000, 16, seed=seed))
    assert held(metrics) <= max(limit, EmbeddingMoments(16).state_bytes(0))


@pytest.mark.parametrize("n", [7, 5000])
def test_the_states_have_the_bytes_that_are_told_beforehand(n):
    ids = torch.arange(n)
    for kind, metric in every_metric(8).items():
        metric.update(torch.randn(n, 8), token_ids=ids % 5, sequence_ids=ids * 0)
        assert metric.state_bytes(n, 5) == held([metric]), kind
        assert metric.of_width(9).settings.equal(metric.settings)
        assert metric.of_width(9).dim == 9


def test_what_is_left_out_is_said_in_one_line_when_training_starts(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monitor = GeometryMonitor(metrics="auto", max_state_bytes=1000, on_error="raise")
    fit(tmp_path, monitor, max_steps=1)
    said = [line for record in caplog.records for line in record.getMessage().splitlines()]
    (line,) = [line for line in said if "leaves out" in line]
    assert line == (
        'GeometryMonitor: metrics="auto" leaves out TokenMoments (17.4 kB), Anisotropy (2.21 kB), '
        "IntrinsicDimension (426 kB) at layers of width 16, with EmbeddingMoments in place of "
        "TokenMoments. To have "
        "them raise max_state_bytes."
    )
    assert any("EmbeddingMoments, every 100 steps" in line for line in said)
    found = {record["metric"] for record in monitor.history}
    assert {"Q", "V_W_unbiased"} <= found
    assert not found & {"anisotropy", "V_W", "intrinsic_dimension"}


def test_with_room_for_all_auto_gives_the_default_numbers():
    model, batch = gpt_neox(), token_batch()
    histories = []
    for metrics in (None, "auto"):
        monitor = StepMonitor(model, metrics=metrics, seed=3, on_error="raise")
        with monitor.step(0, batch):
            model(**batch)
        monitor.close()
        histories.append(
            [
                (r["layer"], r["metric"], r["value"])
                for r in monitor.history
                if not math.isnan(r["value"])
            ]
        )
    assert histories[0] == histories[1]


def test_a_sweep_takes_auto_and_its_manifest_has_the_limit():
    settings = SweepSettings("m", metrics="auto", max_state_bytes=3000, spectrum=True)
    (_, anisotropy) = sweep_factory(settings)(16)
    assert isinstance(anisotropy, Anisotropy)
    assert anisotropy.spectrum
    asked = settings.as_manifest("")
    assert (asked["metrics"], asked["max_state_bytes"]) == ("auto", 3000)
    with pytest.raises(ValueError, match="full_metrics does not take max_state_bytes"):
        sweep_factory(SweepSettings("m", metrics="embedgeo.full_metrics", max_state_bytes=3000))


def test_results_of_other_limits_are_not_mixed_in_one_folder(tmp_path):
    model = gpt_neox()
    for step, limit in enumerate((10_000, 10_000, 20_000)):
        with observe(model, metrics="auto", max_state_bytes=limit) as geometry:
            model(**token_batch())
        if limit == 10_000:
            geometry.save(tmp_path, model="m", step=step)
    with pytest.raises(ValueError, match=r"settings|other"):
        geometry.save(tmp_path, model="m", step=2)
    assert geometry.settings["metrics"]["num_token_types"] == VOCABULARY


def test_metrics_that_are_neither_auto_nor_a_function_are_refused():
    with pytest.raises(
        TypeError, match="metrics must be \"auto\" or a function of a layer's width; got 'all'"
    ):
        GeometryMonitor(metrics="all")
    with pytest.raises(
        ValueError, match="max_state_bytes must be a positive number of bytes a layer; got 0"
    ):
        GeometryMonitor(metrics="auto", max_state_bytes=0)


METRICS = {
    "EmbeddingMoments(d)": EmbeddingMoments,
    "TokenMoments(d)": TokenMoments,
    "TokenMoments(d, count_range=…)": lambda d: TokenMoments(d, count_range=(1, 99)),
    "Anisotropy(d)": Anisotropy,
    "IntrinsicDimension(d)": IntrinsicDimension,
    "streaming_metrics(d)": embedgeo.streaming_metrics,
    "default_metrics(d)": embedgeo.default_metrics,
}


@pytest.fixture(scope="module")
def documented():
    """Formula and example of each metric in the table of the documentation."""
    text = (
        Path(__file__)
        .parents[2]
        .joinpath("docs", "how-to", "large-models.md")
        .read_text(encoding="utf-8")
    )
    rows = re.findall(
        r"^\| `(\w+\(d[^`]*\))` \| `([^`]+)` \| ([\d.]+) (\wB) \|$", text, flags=re.MULTILINE
    )
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    return {name: (formula, float(number) * units[unit]) for name, formula, number, unit in rows}


def held(metrics):
    metrics = metrics if isinstance(metrics, list) else [metrics]
    return sum(state.nbytes for metric in metrics for state in metric.metric_state.values())


def evaluated(formula, n, d, types):
    return eval(formula, {"n": n, "d": d, "T": types, "min": min})


@pytest.mark.parametrize("name", METRICS)
def test_the_states_take_the_documented_bytes(documented, name):
    formula, example = documented[name]
    assert evaluated(formula, 65_536, 4096, 20_000) == pytest.approx(example, rel=5e-3)
    for n, d, types in ((100, 16, 5), (9000, 8, 50)):
        made = METRICS[name](d)
        rows, ids = torch.randn(n, d), torch.arange(n) % types
        for part in range(0, n, 50):  # over many updates: nothing may pile up
            for metric in made if isinstance(made, list) else [made]:
                metric.update(rows[part : part + 50], token_ids=ids[part : part + 50])
        assert held(made) == evaluated(formula, n, d, types)
