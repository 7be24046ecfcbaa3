"""Rows, token ids and comparisons that several tests use."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torchmetrics import Metric

from embedgeo.capture.units import find_words
from embedgeo.metrics import (
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    TokenMoments,
)
from embedgeo.metrics.base import metric_classes
from tests.metrics.own_metric import PositiveShare

wide_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(n, dim, *, seed=0, dtype=torch.float64):
    return torch.randn(n, dim, generator=generator(seed), dtype=torch.float64).to(dtype)


def spectral(n, variances):
    """Rows whose covariance has, in expectation, these eigenvalues along rotated axes."""
    scale = torch.as_tensor(variances, dtype=torch.float64).sqrt()
    axes, _ = torch.linalg.qr(gaussian(len(scale), len(scale), seed=1))
    return gaussian(n, len(scale)) * scale @ axes.T


def zipf_ids(n, *, vocabulary=60, seed=0):
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return torch.multinomial(weights, n, replacement=True, generator=generator(seed))


def token_rows(n, dim, *, mean=0.0, seed=0):
    """Rows with a mean of their own, and a spread of their own, for each token type; their ids."""
    ids = zipf_ids(n, seed=seed)
    centers = gaussian(60, dim, seed=seed + 1)
    spread = gaussian(60, 1, seed=seed + 2).abs() + 0.5
    return mean + centers[ids] + spread[ids] * gaussian(n, dim, seed=seed + 3), ids * 1000 + 7


def texts(n, dim, *, num_sequences=20, mean=0.0):
    """Rows of token types whose occurrences in one sequence are alike; token ids and sequence ids,
    in no order.
    """
    x, ids = token_rows(n, dim, mean=mean)
    sequences = torch.randint(0, num_sequences, (n,), generator=generator())
    effect = gaussian(num_sequences * 60, dim, seed=9)
    return x + effect[sequences * 60 + ids // 1000], ids, sequences * 10**12 - 5


def floats(values):
    return {key: float(value) for key, value in values.items()}


def assert_values(values, expected, *, rtol, atol=0.0):
    """Every expected key is there, a float64 scalar on any device, and within the tolerance; NaN
    equals NaN.
    """
    assert expected.keys() <= values.keys()
    for key, value in expected.items():
        got, want = (
            torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in (values[key], value)
        )
        torch.testing.assert_close(
            got,
            want,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def all_nan(values):
    return all(math.isnan(value) for value in values.values())


_LISTED: dict[str, Callable[..., Metric]] = {
    "EmbeddingMoments": EmbeddingMoments,
    "TokenMoments": partial(TokenMoments, regression_count_range=(2, 1000)),
    "TokenMoments in a count range": partial(
        TokenMoments, count_range=(2, 9), regression_count_range=(2, 1000)
    ),
    "Anisotropy": Anisotropy,
    "Anisotropy with all parts": partial(Anisotropy, spectrum=True, batch_size=7),
    "IntrinsicDimension": partial(IntrinsicDimension, batch_size=20, num_batches=2),
}
"""One metric of each kind and with each optional part, of the kinds that tests know more of than
what all share.
"""

LISTED = list(_LISTED)

OTHER_METRICS = [
    kind
    for kind in metric_classes()
    if kind.__module__.startswith("embedgeo.metrics.") and kind.__name__ not in LISTED
]
"""The package's further classes of metrics, which are made of the width alone."""

_ALL = _LISTED | {kind.__name__: kind for kind in (*OTHER_METRICS, PositiveShare)}
KINDS = list(_ALL)


def new_metric(kind, dim=4, *, seed=0):
    """A metric of one of `KINDS`; ``seed`` is that of those that draw rows."""
    draws = kind.startswith("IntrinsicDimension")
    return _ALL[kind](dim, **({"seed": seed} if draws else {}))


def updated(metric, x, token_ids=None, parts=(slice(None),)):
    """The metric after an update by each part of the rows."""
    for part in parts:
        metric.update(x[part], token_ids=None if token_ids is None else token_ids[part])
    return metric


def pool_words(hidden, word_ids, sequence_ids, **options):
    """The mean of each word's tokens, its type and its sequence; options are those of
    `find_words`.
    """
    words = find_words(hidden.device, word_ids, sequence_ids, **options)
    return words.rows(hidden), words.ids.token_ids, words.ids.sequence_ids
