"""What docs/training.md says a metric holds is what it holds."""

import re
from pathlib import Path

import pytest
import torch

import embedgeo
from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments

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
    text = Path(__file__).parents[2].joinpath("docs", "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\(d[^`]*\))` \| `([^`]+)` \| ([\d.]+) (\wB) \|$", text, flags=re.MULTILINE)
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
            metric.update(rows[part : part + 50], token_ids=torch.arange(part, min(part + 50, n)) % types)
    assert held(made) == evaluated(documented[name][0], n, d, types)


@pytest.mark.parametrize("name", METRICS)
def test_the_example_follows_from_the_formula(documented, name):
    formula, example = documented[name]
    assert evaluated(formula, 65_536, 4096, 20_000) == pytest.approx(example, rel=5e-3)
