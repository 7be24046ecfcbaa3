"""TensorBoard's tags and charts."""

import pytest

from embedgeo.glossary import GROUPS, headlines, in_order, known_terms, term
from embedgeo.results.events import custom_scalars_layout, tagged_scalars, write_events
from embedgeo.results.records import Record, block_means
from tests.files import events_of


def test_the_custom_scalars_page_has_a_chart_of_each_metric_in_the_order_of_the_glossary():
    metrics = in_order(["mine", "V_without_massive", *reversed(known_terms())])
    layout = custom_scalars_layout(metrics[::-1], "run")
    groups = [group for group in GROUPS if group in {term(metric).group for metric in metrics}]
    assert list(layout) == [f"run: {group}" for group in groups]
    drawn = []
    for group in groups:
        for title, (kind, (tags,)) in layout[f"run: {group}"].items():
            assert kind == "Multiline"
            metric = tags.removeprefix(r"^run\.").removesuffix(r"\/").replace("\\", "")
            assert term(metric).group == group
            assert title.startswith(term(metric).name)
            assert metric in title.replace(" ", "_")
            drawn.append(metric)
    assert drawn == [metric for each in groups for metric in metrics if term(metric).group == each]
    assert drawn[: len(headlines())] == [*headlines()]


def records_of(layers, metric="V"):
    return [
        Record(layer=layer, layer_index=i, width=4, metric=metric, value=i + 1.0, stderr=0.5)
        for i, layer in enumerate(layers)
    ]


@pytest.mark.parametrize(
    "layers", [("hidden.00", "hidden.01", "hidden.02"), ("hidden.02", "block.00", "block.01")]
)
def test_numbered_hidden_states_have_a_mean_where_there_are_no_blocks(
    layers,
):
    values = {f"geometry.V/{layer}": i + 1.0 for i, layer in enumerate(layers)}
    records = records_of(layers)
    mean = {"geometry.V/mean": 2.5}
    assert tagged_scalars([*records, *block_means(records)]) == values | mean
    lost = records_of(layers, "n_nonfinite")
    lost[-1]["value"] = 0.0  # a mean is over all of them, whichever are logged
    logged = tagged_scalars([*lost, *block_means(lost)], scalars="headlines")
    assert logged.keys() == {tag.replace("V", "n_nonfinite") for tag in values | mean} - {
        f"geometry.n_nonfinite/{layers[-1]}"
    }


def test_what_is_written_is_what_tensorboard_reads(tmp_path):
    layers = ["embed", "block.00", "decoder.block.00", "mean(last4)", "decoder.mean(last2)"]
    records = [*records_of(layers, "M"), *records_of(layers, "V")]
    write_events(tmp_path / "events.out.tfevents.7", 7, records)
    events = events_of(tmp_path)
    tags = events.Tags()["scalars"]
    written = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}
    values = tagged_scalars([*records, *block_means(records)])
    assert written == {tag: [(7, value)] for tag, value in values.items()}


ODD = {  # layers and how they stand in tags
    "embed": "embed",
    "mean(last4)": "mean_last4",
    "x/y (1)": "x_y_1",
    "x/y [1]": "x_y_1_",
    "mean": "mean_",
    "(": "_",
    "gpt.h.0.mlp": "gpt.h.0.mlp",
    "größe": "größe",
}


def test_tags_have_no_parentheses_and_no_two_layers_have_the_same():
    mean = Record(layer="mean", layer_index=-1, width=4, metric="V", value=2.0, stderr=0.5)
    scalars = tagged_scalars([*records_of([*ODD]), mean])
    assert list(scalars) == [f"geometry.V/{part}" for part in (*ODD.values(), "mean")]
    assert list(scalars.values()) == [*range(1, len(ODD) + 1), 2.0]


def test_no_two_metrics_have_the_same_tags_or_chart():
    records = [each for key in ("a b", "a_b") for each in records_of(["embed"], key)]
    assert [*tagged_scalars(records)] == ["geometry.a_b_/embed", "geometry.a_b/embed"]
    (charts,) = custom_scalars_layout(["a b", "a_b"]).values()
    assert [tags for _, (tags,) in charts.values()] == [r"^geometry\.a_b_\/", r"^geometry\.a_b\/"]
