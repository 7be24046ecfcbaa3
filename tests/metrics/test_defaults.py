"""Sets of metrics by width, the choice of a monitor, and the memory that metrics take."""

import gc
import json
import logging
import re
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import embedgeo
from benchmarks.memory import Layers
from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    Geometry,
    GeometryMonitor,
    IntrinsicDimension,
    StepMonitor,
    TokenMoments,
    describe,
)
from embedgeo.metrics import default_metrics, streaming_metrics
from embedgeo.metrics.base import state_bytes
from embedgeo.metrics.defaults import metric_factory
from embedgeo.metrics.memory import SeenRows, planned_memory
from embedgeo.sweep.measure import metrics_function as sweep_factory
from embedgeo.sweep.settings import SweepSettings
from tests.data import KINDS, new_metric
from tests.files import ROOT
from tests.models import gpt_neox, token_batch
from tests.ranks import on_two_ranks
from tests.training.loops import run_whole


def test_the_default_metrics_have_a_sample_where_a_scatter_is_too_large():
    for dim, sample_size in ((5792, None), (5793, 1024)):
        for make in (
            default_metrics,
            streaming_metrics,
            metric_factory(None),
            sweep_factory(SweepSettings("m")),
        ):
            assert make(dim)[1].sample_size == sample_size


def test_what_only_a_scatter_tells_keeps_it():
    for metrics in (
        default_metrics(8192, spectrum=True),
        streaming_metrics(8192, anisotropy_batch=9),
    ):
        assert metrics[1].sample_size is None


@pytest.mark.parametrize("n", [7, 4500])
@pytest.mark.parametrize("kind", KINDS)
def test_the_states_have_the_bytes_that_are_told_beforehand(kind, n):
    metric = new_metric(kind, 8)
    metric.update(
        torch.randn(n, 8), token_ids=torch.arange(n) % 5, sequence_ids=torch.arange(n) * 0
    )
    states = metric.metric_state.values()
    assert sum(state_bytes(metric, n, 5)) == sum(state.nbytes for state in states)


def peak_bytes(run, path):
    """The most bytes that are allocated at a time in a run, as torch's profiler counts them."""
    gc.collect()  # of other tests, and not in this run
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    events = [each for each in events if each["name"] == "[memory]"]
    events.sort(key=lambda each: each["ts"])
    allocated = [each["args"]["Total Allocated"] for each in events]
    return max(allocated) - allocated[0]


@pytest.mark.parametrize(
    ("num_batches", "jackknife", "bounds"),
    [
        (1, 0, {}),
        (3, 0, {}),
        (1, 4, {}),
        (2, 0, {"type_tables": False}),
        (2, 0, {"scatter": False, "type_tables": False}),
    ],
)
def test_a_measurement_takes_no_more_than_was_planned(num_batches, jackknife, bounds, tmp_path):
    width, num_layers, num_types = 256, 6, 700
    model = Layers(num_layers, width)
    make = partial(default_metrics, **bounds)
    geometry = Geometry(model, layers="layers.*", metrics=make, jackknife=jackknife)
    batch = torch.arange(8 * 128).view(8, 128) % num_types

    def measure():
        with geometry.probe, torch.no_grad():
            for _ in range(num_batches):
                model(batch)
        assert any(record["metric"] == "massive_share_of_V" for record in geometry.records())

    taken = peak_bytes(measure, tmp_path / "trace.json")
    seen = SeenRows(num_batches * batch.numel(), num_batches, num_types)
    planned = planned_memory(
        [(make(width), num_layers)], seen, batch.device, 2**30, jackknife=jackknife
    )
    stated = planned.peak + planned.on_host
    assert stated / 2 < taken < stated + 5e6


def test_ranks_exchange_as_many_layers_at_a_time_as_the_budget_leaves_room_for():
    layers, seen, cpu = [(default_metrics(256), 12)], SeenRows(2048, 1, 2048), torch.device("cpu")
    alone = planned_memory(layers, seen, cpu, 2**30)
    ample, scarce = (planned_memory(layers, seen, cpu, size, 4) for size in (2**30, alone.peak))
    assert alone.peak < scarce.peak < ample.peak <= 2**30
    assert scarce.together < ample.together


def in_words(window, **options):
    """Options of a monitor whose token types are as many as words, and whose window so long."""
    words = torch.arange(12) // 2
    return {
        "every_n_steps": 2 * window,
        "window": window,
        "rows": "words",
        "word_ids": lambda batch: words.expand(len(batch["input_ids"]), 12),
        "on_error": "raise",
        **options,
    }


MANY = 1_000_000  # batches, whose words have too many types
FEW = 100


def measured(caplog, **options):
    """The metrics that a monitor has recorded of a step, and the lines that it has logged."""
    caplog.set_level(logging.INFO)
    model, batch = gpt_neox(), token_batch(4, 12)
    monitor = StepMonitor(model, **{"on_error": "raise", **options})
    run_whole(monitor, 2, lambda: model(**batch), batch)
    told = [line for record in caplog.records for line in record.getMessage().splitlines()]
    return {record["metric"] for record in monitor.history}, told


@pytest.mark.parametrize("metrics", [None, "auto"])
def test_where_token_tables_do_not_fit_a_monitor_does_without_and_says_so(caplog, metrics):
    found, told = measured(caplog, **in_words(MANY, metrics=metrics))
    assert any("EmbeddingMoments, Anisotropy, IntrinsicDimension, every" in line for line in told)
    assert any("max_bytes= is 1.07 GB" in line for line in told)
    assert {"Q", "V_W_unbiased", "anisotropy", "intrinsic_dimension"} <= found
    assert not found & {"V_W", "token_types"}


@pytest.mark.parametrize(
    "options",
    [
        {"window": FEW},  # few rows
        {"window": MANY, "rows": "tokens", "word_ids": None},  # few types
        {"window": MANY, "metrics": default_metrics},  # asked for
    ],
    ids=["few rows", "few types", "asked for"],
)
def test_token_tables_that_fit_or_are_asked_for_are_held(caplog, options):
    found, told = measured(caplog, **in_words(**options))
    assert any("TokenMoments, Anisotropy, IntrinsicDimension, every" in line for line in told)
    assert not any("in place of TokenMoments" in line for line in told)
    assert "V_W" in found


def keys_of_a_run(rank):
    """The tables of rank 0 would fit."""
    model, batch = gpt_neox(), token_batch(16 if rank else 4, 12)
    monitor = StepMonitor(model, **in_words(8000, metrics="auto"))
    run_whole(monitor, 2, lambda: model(**batch), batch)
    return sorted({record["metric"] for record in monitor.history})


@pytest.mark.slow
def test_ranks_choose_alike(tmp_path):
    first, second = on_two_ranks(keys_of_a_run, tmp_path)
    assert first == second
    assert "V_W_unbiased" in first
    assert "V_W" not in first


def test_what_a_description_says_is_what_a_monitor_does():
    model = gpt_neox()
    few = describe(GeometryMonitor(), model, batch_size=2, seq_len=16)
    assert "TokenMoments" in few.metrics
    with torch.device("meta"):
        large = gpt_neox(hidden_size=1024, vocab_size=100_000, num_hidden_layers=2)
    on_one = describe(GeometryMonitor(), large, batch_size=8, seq_len=1024, ranks=1)
    on_many = describe(GeometryMonitor(), large, batch_size=8, seq_len=1024, ranks=64)
    assert "TokenMoments" in on_one.metrics
    assert "EmbeddingMoments" in on_many.metrics
    assert "in place of TokenMoments" in on_many.warnings[0]
    (lacking,) = on_one.warnings
    assert lacking.startswith("A measurement has too few rows for anisotropy (16,384).")
    assert max(on_one.device_bytes, on_many.device_bytes) <= 2**30
    forced = GeometryMonitor(metrics=default_metrics)
    found = describe(forced, large, batch_size=8, seq_len=1024, ranks=64)
    assert "TokenMoments" in found.metrics
    assert found.device_bytes > 2**30
    assert "That is more: choose fewer layers=" in found.warnings[-1]


def test_a_probe_has_the_same_numbers_at_the_first_step_as_later():
    options = {"probe": [token_batch()], "measure_last": False, "on_error": "raise"}
    run_whole(monitor := StepMonitor(gpt_neox(), 1, max_bytes=200_000, **options), 2)
    first, second = ({r["metric"] for r in monitor.history if r["step"] == s} for s in range(2))
    assert first == second
    assert "V_W" not in first  # for which there are no tables


def test_a_budget_that_is_no_number_of_bytes_is_refused():
    with pytest.raises(ValueError, match=r"max_bytes must be a positive integer; got 0\."):
        GeometryMonitor(max_bytes=0)


def test_metrics_that_are_neither_auto_nor_a_function_are_refused():
    with pytest.raises(
        TypeError, match=r"metrics must be a function of .*, or of a monitor \"auto\"; got 'all'"
    ):
        GeometryMonitor(metrics="all")


def test_a_sample_in_place_of_a_scatter_is_said_in_one_line_when_training_starts(caplog):
    sampled = default_metrics(5800)[1]
    assert sampled.compromise == (
        "Anisotropy is that of a sample of 1,024 rows (23.8 MB) at layers of width 5800, not of "
        "the scatter of all (269 MB): compare it with anisotropy_null, and with samples of as many "
        "rows."
    )
    _, told = measured(caplog, metrics=lambda dim: [Anisotropy(dim, sample_size=9)])
    expected = f"StepMonitor: {Anisotropy(16, sample_size=9).compromise}"
    assert [line for line in told if "a sample of" in line] == [expected]


METRICS = {
    "EmbeddingMoments(d)": EmbeddingMoments,
    "TokenMoments(d)": TokenMoments,
    "TokenMoments(d, count_range=…)": lambda d: TokenMoments(d, count_range=(1, 99)),
    "Anisotropy(d)": Anisotropy,
    "Anisotropy(d, sample_size=1024)": lambda d: Anisotropy(d, sample_size=1024),
    "IntrinsicDimension(d)": IntrinsicDimension,
    "streaming_metrics(d)": embedgeo.streaming_metrics,
    "default_metrics(d)": embedgeo.default_metrics,
}


@pytest.fixture(scope="module")
def documented():
    """Formulas of the device and the host, and an example of both, of each metric in the table of
    the documentation.
    """
    text = (ROOT / "docs/how-to/large-models.md").read_text()
    row = r"^\| `(\w+\(d[^`]*\))` \| `([^`]+)` \| `([^`]+)` \| ([\d.]+) (\wB) \|$"
    rows = re.findall(row, text, flags=re.MULTILINE)
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    return {name: (formulas, float(number) * units[unit]) for name, *formulas, number, unit in rows}


def evaluated(formulas, n, d, types):
    known = {"n": n, "d": d, "T": types, "min": min}
    return tuple(eval(formula, known) for formula in formulas)


@pytest.mark.parametrize("name", METRICS)
def test_the_documented_bytes_are_those_of_the_states(documented, name):
    formulas, example = documented[name]
    for n, d, types in ((100, 8, 5), (100, 16, 5), (100, 8, 50), (9000, 8, 5)):
        made = METRICS[name](d)
        made = made if isinstance(made, list) else [made]
        held = zip(*(state_bytes(each, n, types) for each in made), strict=True)
        assert tuple(map(sum, held)) == evaluated(formulas, n, d, types)
    assert sum(evaluated(formulas, 65_536, 4096, 20_000)) == pytest.approx(example, rel=5e-3)
