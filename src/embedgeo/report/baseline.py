"""The null: what isotropic Gaussian embeddings of the same number, width, size and token counts would show.

Rows are drawn from N(0, Q/d · I), without regard to their tokens. Expected values (medians of largest ones) are in
closed form where there is one; the rest is simulated once for each number of rows and width, from a fixed seed.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import linalg, special, stats

from embedgeo.functional import anisotropy_null, twonn_dimension, type_regressions
from embedgeo.functional.spectrum import full_spectrum_values

Array = NDArray[np.float64]

REGRESSED = (10, 100_000)
"""Occurrences of the token types that are regressed over, as `embedgeo.TokenMoments` does by default."""

_MOST_COLUMNS = 1 << 16
_SPECTRUM = {"effective_rank", "isoscore", "top5_share", "anisotropy_without_top5"}
_DRAWS = 16


def widths(values: pd.DataFrame) -> pd.Series:
    """The width d at each row, found from the number of rows and the expected anisotropy that was recorded for it.

    NaN where these are not among the metrics.

    >>> null = anisotropy_null(torch.tensor(1000.0, dtype=torch.float64), 768).item()
    >>> widths(pd.DataFrame({"n": [1000.0, 1.0], "anisotropy_null": [null, np.nan]})).tolist()
    [768.0, nan]
    """
    if not {"n", "anisotropy_null"} <= set(values):
        return pd.Series(np.nan, index=values.index)
    pairs = values[["n", "anisotropy_null"]].itertuples(index=False, name=None)
    return pd.Series([_width(n, null) for n, null in pairs], index=values.index)


@cache
def _width(n: float, null: float) -> float:
    if not (n >= 2 and 0 < null <= 1):
        return math.nan

    def expected(dim: int) -> float:
        return float(anisotropy_null(torch.tensor(n, dtype=torch.float64), dim))

    low, high = 1, _MOST_COLUMNS
    while high - low > 1:  # it falls with the width
        middle = (low + high) // 2
        low, high = (middle, high) if expected(middle) > null else (low, middle)
    return float(min((low, high), key=lambda dim: abs(expected(dim) - null)))


def null_values(values: pd.DataFrame, counts: Array | None = None) -> pd.DataFrame:
    """What the null shows for each metric, at the same steps and layers; NaN where that is unknown.

    Args:
        values: metrics (columns) at each step and layer (rows).
        counts: occurrences of each token type, for what is regressed over token types.
    """
    dim = widths(values)
    nothing = pd.Series(np.nan, index=values.index)
    n, Q, types = (values.get(key, nothing) for key in ("n", "Q", "token_types"))
    free = n - 1
    root = np.sqrt(2 / dim) * np.exp(special.gammaln((dim + 1) / 2) - special.gammaln(dim / 2))  # E‖x‖ / √Q
    gaussian = values.get("anisotropy_null", nothing)
    zero = nothing.where(n.isna(), 0.0)
    known: dict[str, pd.Series] = {
        "M": Q / n,
        "V": Q * free / n,
        "M_over_V": 1 / free,
        "M_over_Q": 1 / n,
        "mean_cosine": zero,
        "norm_mean": np.sqrt(Q) * root,
        "norm_cv": np.sqrt(1 / root**2 - 1),
        "norm_max": np.sqrt(Q / dim * stats.chi2.ppf(0.5 ** (1 / n), dim)),
        "top_dim_share": pd.Series(stats.chi2.ppf(0.5 ** (1 / dim), free), index=n.index) / (free * dim),
        "V_W_unbiased": Q.where(free > 0),
        "V_B_unbiased": zero,
        "V_W_over_V_unbiased": zero + 1,
        "V_W": Q * (n - types) / n,
        "V_B": Q * (types - 1) / n,
        "V_W_over_V": (n - types) / free,
        "anisotropy": gaussian,
        "anisotropy_standardized": gaussian,
        "anisotropy_z_scored": gaussian,
        "participation_ratio": (dim * free + 2) / (free + dim + 1),
        "duplicate_fraction": zero,
        "intrinsic_dimension": _each(_twonn, values.get("n_points", n), dim),
    }
    known |= {key: _each(partial(_spectral, key), n, dim) for key in _SPECTRUM & set(values)}
    known |= {str(key): zero for key in values if str(key).startswith("mean_cosine_")}
    if counts is not None and len(counts):
        known |= _over_types(counts, Q, dim)
    return pd.DataFrame(dict.fromkeys(values, nothing) | known, index=values.index)


def _each(simulated: Callable[[int, int], float], n: pd.Series, dim: pd.Series) -> pd.Series:
    pairs = zip(n, dim, strict=True)
    return pd.Series([simulated(int(a), int(b)) if a >= 3 and b >= 2 else np.nan for a, b in pairs], index=n.index)


def _spectral(key: str, n: int, dim: int) -> float:
    return _spectrum(n, dim)[key]


@cache
def _spectrum(n: int, dim: int) -> dict[str, float]:
    """Numbers of the spectrum of a Gaussian sample, drawn from the law of its eigenvalues (Dumitriu & Edelman 2002)."""
    small, large = min(n - 1, dim), max(n - 1, dim)
    random = np.random.default_rng(0)
    diagonal = np.sqrt(random.chisquare(large - np.arange(small)))
    beside = np.sqrt(random.chisquare(small - 1 - np.arange(small - 1)))
    squares = diagonal**2 + np.append(0, beside**2)
    eigenvalues = np.zeros(dim)
    eigenvalues[:small] = linalg.eigvalsh_tridiagonal(squares, diagonal[:-1] * beside)[::-1].clip(0)
    return {key: float(value) for key, value in full_spectrum_values(torch.from_numpy(eigenvalues)).items()}


def _twonn(n: int, dim: int) -> float:
    """TwoNN of Gaussian rows; their number is rounded to a power of two, and is that of one batch at most."""
    return _twonn_of_power(min(round(math.log2(n)), 12), dim)


@cache
def _twonn_of_power(power: int, dim: int) -> float:
    rows = torch.randn(2**power, dim, generator=torch.Generator().manual_seed(0))
    return float(f"{float(twonn_dimension(rows).dimension):.4g}")


def _over_types(counts: Array, Q: pd.Series, dim: pd.Series) -> dict[str, pd.Series]:
    """What is regressed over token types: drawn a few times for each width at Q = 1, then scaled; the mean."""
    scale = np.log(Q.where(Q > 0))
    found: dict[str, pd.Series] = {}
    for width in dim.dropna().unique():
        rows = dim == width
        grid = np.linspace(scale[rows].min(), scale[rows].max(), 2 if scale[rows].nunique() < 2 else 64)
        draws = [_draw(counts, int(width), seed) for seed in range(_DRAWS)]
        values = pd.DataFrame(
            [pd.DataFrame([_of_types(counts, M * size, V * size) for M, V in draws]).mean() for size in np.exp(grid)]
        )
        for key in values:
            found[str(key)] = found.get(str(key), pd.Series(np.nan, index=Q.index)).where(~rows, 0)
            found[str(key)][rows] = np.interp(scale[rows], grid, values[key])
    return found


def _draw(counts: Array, dim: int, seed: int) -> tuple[Array, Array]:
    """M and V of the token types at Q = 1."""
    random = np.random.default_rng(seed)
    M = random.chisquare(dim, len(counts)) / counts / dim
    return M, 2 * random.standard_gamma(dim * (counts - 1) / 2) / counts / dim


def _of_types(counts: Array, M: Array, V: Array) -> dict[str, float]:
    within = (counts >= REGRESSED[0]) & (counts <= REGRESSED[1])
    types = {"n": counts, "Q": M + V, "M": M, "V": V}
    regressions = type_regressions({key: torch.from_numpy(value[within]) for key, value in types.items()})
    return {"Q_t_cv": float(np.std(M + V) / np.mean(M + V)), **{key: float(v) for key, v in regressions.items()}}
