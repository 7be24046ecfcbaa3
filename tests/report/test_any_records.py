"""Whatever records of the schema a folder holds, there is a page."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st

from embedgeo.glossary import known_terms
from embedgeo.report import write_report
from embedgeo.results.folder import SweepFolder
from tests.report.synthetic import layer_names, make_sweep
from tests.unpainted import unpainted

LAST = 2**63 - 1
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
STEPS = st.sampled_from([0, 1, 2, 8, 1000, 143_000, LAST - 1, LAST]) | st.integers(0, LAST)
LAYERS = (
    st.sampled_from([*layer_names(3), "encoder.block.00", "decoder.embed", "mean(last4)", "model"])
    | TEXTS
)
METRICS = st.sampled_from([*known_terms(), "V_without_massive"]) | TEXTS
WIDTHS = st.sampled_from([1, 2, 64, 4096, LAST])
VALUES = (
    st.sampled_from(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e300, 1e-300, -1e300, 5e-324, 1.7e308]
    )
    | st.floats()
)
FEW = st.floats(0.1, 10)


@st.composite
def records(draw: st.DrawFn) -> pd.DataFrame:
    """Values at some steps and layers, some of them missing; perhaps none at all."""
    steps = draw(st.lists(STEPS, min_size=1, max_size=4, unique=True))
    layers = draw(st.lists(LAYERS, min_size=1, max_size=4, unique=True))
    metrics = draw(st.lists(METRICS, max_size=2, unique=True))
    metrics += draw(
        st.sampled_from([(), ("n", "Q", "token_types"), ("M", "V", "V_W", "V_B"), ("loss",)])
    )
    values = draw(st.sampled_from([VALUES, FEW, st.just(np.nan), st.just(1.0)]))
    widths = draw(st.lists(WIDTHS, min_size=len(layers), max_size=len(layers)))
    rows = [
        (step, layer, i, widths[i], metric, draw(values), abs(draw(values)))
        for step in steps
        for i, layer in enumerate(layers)
        for metric in metrics
        if draw(st.integers(0, 9))
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def require_page(folder: Path) -> None:
    with unpainted(is_drawn=True):
        page = write_report([folder])
    assert page.read_text().count("<h1>") == 1


COLUMNS = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
# to look for a smaller failure takes up to five minutes
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


def fixed(*rows: tuple[int, str, str, float]) -> pd.DataFrame:
    """Records of step, layer, metric and value."""
    whole = [
        (step, layer, -1 if key == "loss" else i, 4, key, x, 0.1)
        for i, (step, layer, key, x) in enumerate(rows)
    ]
    return pd.DataFrame(whole, columns=COLUMNS)


TWO_GAPS = fixed(  # between sides of the model, in the order of its layers
    *(
        (0, layer, "Q", 1.0 + len(layer))
        for layer in ("block.00", "encoder.block.00", "embed", "decoder.embed")
    )
)
SMALLEST = fixed((0, "model", "loss", 5e-324), (1, "model", "loss", 5e-324))
# layers with the names of what is no layer
OTHERS = fixed(*((0, layer, "V", 1.0) for layer in ("mean", "model")), (0, "model", "loss", 2.0))
# of which no spectrum can be drawn
MOST = fixed((0, "block.00", "n", 1e300), (0, "block.00", "effective_rank", 2.0))


@pytest.mark.slow
@settings(max_examples=5, phases=UNSHRUNK, deadline=None, suppress_health_check=list(HealthCheck))
@given(records())
@example(TWO_GAPS)
@example(SMALLEST)
@example(MOST)
@example(OTHERS)
def test_a_history(found: pd.DataFrame) -> None:
    with TemporaryDirectory() as folder:
        types = {
            "step": "int64",
            "layer_index": "int64",
            "width": "int64",
            "value": "float64",
            "stderr": "float64",
        }
        found.astype(types).assign(deviations=None).to_parquet(Path(folder) / "history.parquet")
        require_page(Path(folder))


def test_checkpoints_without_a_number(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "a", (0, 8), 1, metrics=("n", "Q", "M", "V"))
    sweep = SweepFolder(folder)
    for keep in (None, 0):
        for name in ("step0", "step8"):
            sweep.write(name, sweep.read(name).assign(value=np.nan)[:keep])
        require_page(folder)
        assert "there is nothing to draw" in (folder / "report" / "index.html").read_text()
