"""TensorBoard's tags and charts."""

import math
import re
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

import embedgeo.metrics
from embedgeo.glossary import OWN, headlines, known_terms, term
from embedgeo.results.events import (
    chart_title,
    custom_scalars_layout,
    read_events,
    tagged_scalars,
    write_events,
)
from embedgeo.results.records import Record

assert embedgeo.metrics, "it fills the glossary"
OWN_TERMS = {metric: each for metric, each in known_terms().items() if metric in OWN.terms}

# the metrics of a group follow from their terms: these stand in this order, with others between
# them
GROUPS = {
    "at a glance": [
        "V_W_over_V_unbiased",
        "M_over_Q",
        "anisotropy",
        "intrinsic_dimension_between",
        "mean_cosine",
    ],
    "size and variance": [
        *("Q", "M", "V", "M_over_V", "V_W_unbiased", "V_B_unbiased", "V_W", "V_B", "V_W_over_V"),
        *("V_over_Q", "V_W_over_Q", "V_B_over_Q"),
    ],
    "norms": ["norm_mean", "norm_cv", "norm_max"],
    "shape": [
        *(
            "anisotropy_standardized",
            "participation_ratio",
            "effective_rank",
            "rankme",
            "effective_rank_eigenvalues",
        ),
        *(
            "isoscore",
            "top1_share",
            "top5_share",
            "anisotropy_without_top5",
            "alpha_req",
            "alpha_req_r2",
        ),
        *(
            "anisotropy_error",
            "participation_ratio_error",
            "anisotropy_null",
            "top_dim_share",
        ),
        *("anisotropy_batch_mean", "anisotropy_batch_std"),
    ],
    "token types": [
        *("Q_t_cv", "V_on_M_slope", "V_on_M_r2", "Q_freq_slope", "M_freq_slope", "V_freq_slope"),
        *("Q_freq_r2", "M_freq_r2", "V_freq_r2"),
    ],
    "rows counted": [
        *(
            "intrinsic_dimension_std",
            "duplicate_fraction",
            "n_points",
            "n",
            "token_types",
            "token_types_regressed",
        ),
        "n_nonfinite",
    ],
    "more": [
        *(metric for metric, term in OWN_TERMS.items() if term.group == "more"),
        *("anisotropy_whitened", "mine"),
    ],
}


def test_the_custom_scalars_page_has_these_groups_and_charts_in_this_order() -> None:
    layout = custom_scalars_layout(["mine", "anisotropy_whitened", *reversed(OWN_TERMS)], "run")
    assert list(layout) == [f"run: {group}" for group in GROUPS]
    for group, metrics in GROUPS.items():
        charts = layout[f"run: {group}"].values()
        drawn = [tags.removeprefix(r"^run\.").removesuffix(r"\/") for _, (tags,) in charts]
        assert [metric for metric in drawn if metric in metrics] == metrics
        assert {term(metric).group for metric in drawn} == {group}
        assert list(charts) == [["Multiline", [rf"^run\.{metric}\/"]] for metric in drawn]


def test_the_headline_metrics_are_those_at_a_glance() -> None:
    assert list(headlines()) == GROUPS["at a glance"]


@pytest.mark.parametrize(
    ("metric", "title"),
    [("M_over_Q", "M / Q (M_over_Q)"), ("mean_cosine", "mean cosine"), ("my_own", "my_own")],
)
def test_a_chart_has_the_name_of_its_metric_and_the_key_where_they_differ(
    metric: str, title: str
) -> None:
    assert chart_title(metric) == title


@pytest.mark.parametrize("metric", [metric for metrics in GROUPS.values() for metric in metrics])
def test_the_title_of_a_chart_names_its_metric(metric: str) -> None:
    ((title, _),) = custom_scalars_layout([metric]).popitem()[1].items()
    assert title.startswith(term(metric).name)
    assert metric in title.replace(" ", "_")


@pytest.mark.parametrize(
    ("blocks", "mean"),
    [(("hidden.00", "hidden.01", "hidden.02"), 2.5), (("hidden.02", "block.00", "block.01"), 2.5)],
)
def test_numbered_hidden_states_have_a_mean_where_there_are_no_blocks(
    blocks: tuple[str, ...], mean: float
) -> None:
    records = [
        Record(layer=layer, layer_index=i, width=4, metric="V", value=i + 1.0, stderr=0.0)
        for i, layer in enumerate(blocks)
    ]
    scalars = tagged_scalars(records)
    assert scalars == {f"geometry.V/{layer}": i + 1.0 for i, layer in enumerate(blocks)} | {
        "geometry.V/mean": mean
    }


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    records = [
        Record(
            layer=layer,
            layer_index=i,
            width=4,
            metric=metric,
            value=float(i + len(metric)),
            stderr=0.5,
        )
        for metric in ("M", "V")
        for i, layer in enumerate(("embed", "block.00", "block.01"))
    ]
    write_events(tmp_path / "events.out.tfevents.7", 7, records)
    ((prefix, found),) = read_events(tmp_path)
    assert prefix == "geometry"
    assert found == [{**record, "step": 7, "width": 0, "stderr": math.nan} for record in records]


def test_other_scalars_are_not_read_and_each_prefix_has_records_of_its_own(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for tag in ("loss", "a.b/c/mean", "one.V/embed", "one.V/mean", "two.V/x/y"):
            writer.add_scalar(tag, 1.0, 0)
    found = dict(read_events(tmp_path))
    assert {prefix: [r["layer"] for r in records] for prefix, records in found.items()} == {
        "a": ["c/mean"],
        "one": ["embed"],
        "two": ["x/y"],
    }
    assert tagged_scalars(found["one"], "one") == {"one.V/embed": 1.0}


ODD = [
    "embed",
    "block.00",
    "mean(last4)",
    "encoder.mean(last2)",
    "x/y (1)",
    "x/y [1]",
    "mean",
    "(",
    "gpt.h.0.mlp",
    "größe",
]


def records_of(layers: list[str], metric: str = "V") -> list[Record]:
    return [
        Record(layer=layer, layer_index=i, width=4, metric=metric, value=i)
        for i, layer in enumerate(layers)
    ]


def test_tags_have_no_parentheses_and_no_two_layers_have_the_same() -> None:
    scalars = tagged_scalars(records_of(ODD))
    parts = [
        "embed",
        "block.00",
        "mean_last4",
        "encoder.mean_last2",
        "x_y_1",
        "x_y_1_",
        "mean_",
        "_",
        "gpt.h.0.mlp",
    ]
    assert list(scalars) == [f"geometry.V/{part}" for part in (*parts, "größe", "mean")]
    assert list(scalars.values()) == [*range(len(ODD)), 1.0]


def test_a_chart_has_exactly_the_tags_of_its_metric() -> None:
    metrics, prefix = ["V", "V_W", "my V/x (mean)", "M"], "val (b)/geometry"
    tags = {tag for metric in metrics for tag in tagged_scalars(records_of(ODD, metric), prefix)}
    charts = [
        chart
        for charts in custom_scalars_layout(metrics, prefix).values()
        for chart in charts.values()
    ]
    found = [{tag for tag in tags if re.match(pattern, tag)} for _, (pattern,) in charts]
    assert [len(of_chart) for of_chart in found] == [len(ODD) + 1] * len(metrics)
    assert set().union(*found) == tags
    assert not any(character in tag for tag in tags for character in "()[] ")


def test_means_of_the_last_blocks_have_their_name_again_when_read(tmp_path: Path) -> None:
    layers = [
        "embed",
        "block.00",
        "encoder.block.00",
        "decoder.block.00",
        "mean(last4)",
        "decoder.mean(last2)",
    ]
    write_events(tmp_path / "events.out.tfevents.7", 7, records_of(layers))
    ((_, found),) = read_events(tmp_path)
    assert [record["layer"] for record in found] == layers
