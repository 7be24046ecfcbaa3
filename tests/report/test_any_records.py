"""Whatever records of the schema a folder holds, there is a page."""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedgeo.report import write_report
from embedgeo.results.folder import SCHEMA, TABLES, SweepFolder
from embedgeo.results.glossary import TERMS
from tests.report.synthetic import layer_names, make_sweep

LAST = 2**63 - 1
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
STEPS = st.sampled_from([0, 1, 2, 8, 1000, 143_000, LAST - 1, LAST]) | st.integers(0, LAST)
LAYERS = st.sampled_from([*layer_names(3), "encoder.block.00", "decoder.embed", "mean(last4)", "model"]) | TEXTS
METRICS = st.sampled_from([*TERMS, "anisotropy_top3_removed", "mean_cosine_whitened"]) | TEXTS
WIDTHS = st.sampled_from([0, 1, 2, 64, 4096, LAST])
VALUES = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e300, 1e-300, -1e300, 5e-324, 1.7e308]) | st.floats()
FEW = st.floats(0.1, 10)


@st.composite
def records(draw: st.DrawFn) -> pd.DataFrame:
    """Values at some steps and layers, some of them missing; perhaps none at all."""
    steps = draw(st.lists(STEPS, min_size=1, max_size=4, unique=True))
    layers = draw(st.lists(LAYERS, min_size=1, max_size=4, unique=True))
    metrics = draw(st.lists(METRICS, max_size=4, unique=True))
    metrics += draw(st.sampled_from([(), ("n", "Q", "token_types"), ("M", "V", "V_W", "V_B"), ("loss",)]))
    values = draw(st.sampled_from([VALUES, FEW, st.just(np.nan), st.just(1.0)]))
    widths = draw(st.lists(WIDTHS, min_size=len(layers), max_size=len(layers)))
    rows = [
        (step, layer, i, widths[i], metric, draw(values))
        for step in steps
        for i, layer in enumerate(layers)
        for metric in metrics
        if draw(st.integers(0, 9))
    ]
    return pd.DataFrame(rows, columns=["step", "layer", "layer_index", "width", "metric", "value"])


def require_page(folder: Path) -> None:
    with mock.patch("embedgeo.report.drawing.DPI", 20):
        page = write_report([folder])
    assert page.read_text().count("<h1>") == 1


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(records())
def test_a_history(found: pd.DataFrame) -> None:
    with TemporaryDirectory() as folder:
        types = {"step": "int64", "layer_index": "int64", "width": "int64", "value": "float64"}
        found.astype(types).to_parquet(Path(folder) / "history.parquet")
        require_page(Path(folder))
