"""A geometry as the value of a notebook's cell."""

import math
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from embedgeo import TokenMoments, observe
from embedgeo.formatting import number, with_error
from embedgeo.glossary import headlines, term
from tests.models import gpt_neox, token_batch


class Table(HTMLParser):
    """The cells of a table by row, and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words, self._tags = "", list[str]()
        self.feed(html)
        self.close()
        assert not self._tags, f"not closed: {self._tags}"

    def handle_starttag(self, tag, attrs):
        self._tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._tags.pop() == tag

    def handle_data(self, data):
        self.words += data
        if self._tags and self._tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class Odd(Metric):
    """A metric with a name that is markup, undefined at a layer of width 3."""

    full_state_update = False

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def update(self, embeddings, token_ids=None):
        pass

    def compute(self):
        if self.dim == 5:
            raise RuntimeError("<b>no</b>")
        return {"<script>&": torch.tensor(math.nan if self.dim == 3 else 0.123456789)}


def seen(model, *inputs, **options):
    with torch.no_grad(), observe(model, **options) as geometry:
        for given in inputs:
            model(given)
    return geometry


def test_layers_go_down_and_the_main_metrics_across():
    model, batch = gpt_neox(), token_batch()
    geometry = seen(model, batch["input_ids"])
    values = geometry.compute()
    table = Table(geometry._repr_html_())
    keys = [key for key in headlines() if key in values["embed"]]
    assert len(keys) > 3
    assert table.rows[0] == ["layer", *(term(key).name for key in keys)]
    assert [row[0] for row in table.rows[1:]] == [*values]
    for layer, *cells in table.rows[1:]:
        assert cells == [
            number(values[layer][key]) if math.isfinite(values[layer][key]) else "–" for key in keys
        ]
    assert "to_frame()" in table.words
    assert repr(values) == repr(geometry.compute())


def test_standard_errors_stand_beside_the_values():
    options = {"metrics": lambda dim: [TokenMoments(dim)], "jackknife": 4}
    geometry = seen(gpt_neox(), token_batch(16)["input_ids"], **options)
    record = next(
        r for r in geometry.records() if r["layer"] == "block.00" and r["metric"] == "M_over_Q"
    )
    assert "±" in with_error(record["value"], record["stderr"])
    assert with_error(record["value"], record["stderr"]) in Table(geometry._repr_html_()).rows[2]


def test_names_are_escaped_undefined_is_a_dash_and_layers_that_were_not_reached_are_named():
    model = nn.Sequential()
    for name, layer in (("<i>", nn.Linear(2, 3)), ("b", nn.Linear(3, 2)), ("c", nn.Linear(2, 2))):
        model.add_module(name, layer)
    model.forward = lambda x: model.b(model.get_submodule("<i>")(x))
    with pytest.warns(UserWarning, match="No forward pass reached c"):
        geometry = seen(model, torch.ones(4, 2), layers="*", metrics=lambda dim: [Odd(dim)])
    html = geometry._repr_html_()
    table = Table(html)
    assert "<script>" not in html
    assert "<i>" not in html
    assert table.rows == [["layer", "<script>&"], ["<i>", "–"], ["b", "0.1235"]]
    assert table.words.count("No forward pass reached c.") == 1


def test_what_cannot_be_computed_is_said_and_not_raised():
    html = seen(
        nn.Sequential(nn.Linear(2, 5)), torch.ones(4, 2), layers="0", metrics=lambda d: [Odd(d)]
    )._repr_html_()
    assert "&lt;b&gt;no&lt;/b&gt;" in html
    assert "it cannot be computed" in html
