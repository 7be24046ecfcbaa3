"""Sets of metrics by width, and the memory that metrics take."""

import logging
import math
import re
from functools import partial
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
    load_sample,
    observe,
)
from embedgeo.formatting import size
from embedgeo.geometry import Geometry
from embedgeo.metrics import MAX_STATE_BYTES, default_metrics, full_metrics, streaming_metrics
from embedgeo.metrics.defaults import metric_factory, metric_name, width_notes
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep.measure import metrics_function as sweep_factory
from embedgeo.sweep.settings import SweepSettings
from tests.data import metrics as every_metric
from tests.models import VOCABULARY, gpt_neox, token_batch
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import TEXT, local_run
from tests.training.runs import TinyLM, fit

KINDS = {64: "TAI", 1600: "TAI", 2048: "EAI", 4096: "EAI", 8192: "ESI", 16_384: "ES"}

NAMES = {
    "T": "TokenMoments",
    "E": "EmbeddingMoments",
    "A": "Anisotropy",
    "S": "Anisotropy (sketch)",
    "I": "IntrinsicDimension",
}


def kinds(metrics):
    return [metric_name(metric) for metric in metrics]


@pytest.mark.parametrize("dim", KINDS)
def test_what_is_measured_at_a_width(dim):
    assert kinds(auto_metrics(dim)) == [NAMES[letter] for letter in KINDS[dim]]


def test_a_small_vocabulary_leaves_room_for_its_table_also_at_a_large_width():
    found = kinds(auto_metrics(8192, num_token_types=32))
    assert found == ["TokenMoments", "Anisotropy (sketch)", "IntrinsicDimension"]


def test_the_default_metrics_have_a_sketch_where_a_scatter_is_too_large():
    for dim, name in ((5792, "Anisotropy"), (5793, "Anisotropy (sketch)")):
        assert (Anisotropy(dim).state_bytes(0) > MAX_STATE_BYTES) == ("sketch" in name)
        for make in (
            default_metrics,
            streaming_metrics,
            metric_factory(None),
            sweep_factory(SweepSettings("m")),
        ):
            assert kinds(make(dim))[1] == name
    assert kinds(default_metrics(5793, max_state_bytes=2**29))[1] == "Anisotropy"
    assert kinds(metric_factory(None, max_state_bytes=2**20)(1024))[1] == "Anisotropy (sketch)"
    # a sketch would be no smaller
    assert kinds(default_metrics(512, max_state_bytes=1))[1] == "Anisotropy"


def test_what_only_a_scatter_tells_keeps_it():
    for metrics in (
        full_metrics(8192),
        default_metrics(8192, spectrum=True),
        streaming_metrics(8192, anisotropy_batch=9),
    ):
        assert kinds(metrics)[1] == "Anisotropy"


@pytest.mark.parametrize("limit", [1, 1000, 3000, 20_000, 30_000, 400_000, 10_000_000])
@pytest.mark.parametrize("jackknife", [0, 3])
@pytest.mark.slow
def test_what_a_layer_holds_stays_within_the_limit(limit, jackknife):
    torch.manual_seed(0)
    with observe(
        gpt_neox(), metrics="auto", max_state_bytes=limit, jackknife=jackknife
    ) as geometry:
        for seed in range(3):
            geometry.model(**token_batch(8, 40, seed=seed))
    for each in geometry.measured_layers():
        held = sum(
            state.nbytes
            for metric in each.metrics.with_copies
            for state in metric.metric_state.values()
        )
        least = sum(m.state_bytes(0) for m in (1 + jackknife) * [embedgeo.EmbeddingMoments(16)])
        assert held <= max(limit, least)
    assert geometry.compute()["block.00"]["n"] == 960


def test_what_is_left_out_is_told_with_its_copies_for_standard_errors():
    (note,) = width_notes(partial(auto_metrics, jackknife=16), 8192)
    assert f"Anisotropy ({size(17 * Anisotropy(8192).state_bytes(0))})" in note


def test_what_is_left_out_at_a_width_is_told_with_its_bytes():
    assert list(width_notes(metric_factory("auto"), 4096)) == [
        'metrics="auto" leaves out TokenMoments (538 MB) at layers of width 4096, with '
        "EmbeddingMoments in place of "
        "TokenMoments. To have it raise max_state_bytes."
    ]


@pytest.mark.parametrize("n", [7, 5000])
@pytest.mark.parametrize("kind", every_metric(1))
def test_the_states_have_the_bytes_that_are_told_beforehand(kind, n):
    metric = every_metric(8)[kind]
    metric.update(
        torch.randn(n, 8), token_ids=torch.arange(n) % 5, sequence_ids=torch.arange(n) * 0
    )
    assert metric.state_bytes(n, 5) == sum(state.nbytes for state in metric.metric_state.values())
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


@pytest.mark.slow
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


LIMIT = 3_000_000  # bytes: between what a sketch and a scatter take at a width of 640
IN_A_SKETCH = (
    "Anisotropy holds a sketch (2.62 MB) at layers of width 640, not the scatter (3.28 MB): "
    "anisotropy_error says how "
    "far off it may be, anisotropy_standardized is absent. To have the scatter raise "
    "max_state_bytes."
)


def test_a_sketch_by_default_is_said_in_one_line_when_training_starts(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monitor = GeometryMonitor(max_state_bytes=LIMIT, on_error="raise")
    fit(tmp_path, monitor, module=TinyLM(hidden_size=640), max_steps=1)
    said = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert [line for line in said if "sketch (" in line] == [f"GeometryMonitor: {IN_A_SKETCH}"]
    assert any(
        "TokenMoments, Anisotropy (sketch), IntrinsicDimension, every 100 steps" in line
        for line in said
    )
    found = {record["metric"] for record in monitor.history}
    assert {"anisotropy", "anisotropy_error", "participation_ratio", "anisotropy_null"} <= found
    assert "anisotropy_standardized" not in found


@pytest.mark.slow
def test_a_sweep_says_it_once_and_writes_the_errors(tmp_path, capsys):
    local_run(tmp_path / "run", steps=(0, 8), kind="gpt_neox_sketched")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT), encoding="utf-8")
    options = {
        "text": str(text),
        "num_tokens": 64,
        "seq_len": 16,
        "out": str(tmp_path / "out"),
        "save_samples": True,
    }
    assert sweep(str(tmp_path / "run"), max_state_bytes=LIMIT, **options) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert printed.count(IN_A_SKETCH) == 1
    records = SweepFolder(tmp_path / "out").read("step8").set_index(["layer", "metric"])["value"]
    assert records["block.01", "anisotropy_error"] > 0
    sample = load_sample(tmp_path / "out", "step8").layers["block.01"]
    assert float(sample.mean.square().sum()) == pytest.approx(records["block.01", "M"], rel=1e-6)
    assert sample.eigenvalues is None


def test_another_limit_of_the_default_metrics_is_recorded_with_what_is_saved():
    given: list[dict[str, int]] = [{}, {"max_state_bytes": 2**28}, {"max_state_bytes": 2000}]
    metrics = [Geometry(gpt_neox(), **options).settings["metrics"] for options in given]
    assert metrics[0] == metrics[1]
    assert metrics[2] == {"max_state_bytes": 2000, "metrics": metrics[0]}


def test_of_two_metrics_of_a_class_the_one_that_fits_is_kept():
    whole = [
        metric.state_bytes(2**20)
        for metric in auto_metrics(8192, extra=("scales",), max_state_bytes=math.inf)
    ]
    one = auto_metrics(8192, extra=("scales",), max_state_bytes=8192 * 24 + 1.5 * whole[-1])
    assert [
        metric.estimator for metric in one if isinstance(metric, embedgeo.IntrinsicDimension)
    ] == ["twonn"]


METRICS = {
    "EmbeddingMoments(d)": EmbeddingMoments,
    "TokenMoments(d)": TokenMoments,
    "TokenMoments(d, count_range=…)": lambda d: TokenMoments(d, count_range=(1, 99)),
    "Anisotropy(d)": Anisotropy,
    "Anisotropy(d, sketch=512)": lambda d: Anisotropy(d, sketch=512),
    "IntrinsicDimension(d)": IntrinsicDimension,
    "streaming_metrics(d)": embedgeo.streaming_metrics,
    "default_metrics(d)": embedgeo.default_metrics,
}

SIZES = [(100, 8, 5), (100, 16, 5), (100, 8, 50), (9000, 8, 5)]


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


def test_the_table_has_all_metrics(documented):
    assert documented.keys() == METRICS.keys()


@pytest.mark.parametrize(("n", "d", "types"), SIZES)
@pytest.mark.parametrize("name", METRICS)
def test_the_states_take_the_documented_bytes(documented, name, n, d, types):
    made = METRICS[name](d)
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    for part in range(0, n, 50):  # over many updates: nothing may pile up
        for metric in made if isinstance(made, list) else [made]:
            metric.update(
                rows[part : part + 50], token_ids=torch.arange(part, min(part + 50, n)) % types
            )
    assert held(made) == evaluated(documented[name][0], n, d, types)


@pytest.mark.parametrize("name", METRICS)
def test_the_example_follows_from_the_formula(documented, name):
    formula, example = documented[name]
    assert evaluated(formula, 65_536, 4096, 20_000) == pytest.approx(example, rel=5e-3)
