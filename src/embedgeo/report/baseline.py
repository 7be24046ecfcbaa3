"""The Gaussian baseline: values of isotropic Gaussian embeddings of the same number, width, size and token counts.

Rows are drawn from N(0, Q/d · I), without regard to their tokens. Expected values (medians of largest ones) are in
closed form where there is one; the rest is simulated once for each number of rows and width, from a fixed seed.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import linalg, special, stats

from embedgeo.functional import REGRESSION_COUNT_RANGE, twonn_dimension, type_regressions
from embedgeo.functional.dimension import SCALES, most_likely_dimension
from embedgeo.functional.spectrum import entropy_rank, full_spectrum_values

Array = NDArray[np.float64]

_SPECTRUM = {
    *("effective_rank", "rankme", "effective_rank_eigenvalues", "isoscore", "top5_share", "anisotropy_without_top5"),
    *("alpha_req", "alpha_req_r2"),
}
_OVER_TYPES = {"Q_t_cv", "V_on_M_slope", "V_on_M_r2", *(f"{x}_freq_{y}" for x in "QMV" for y in ("slope", "r2"))}
_SIMILARITIES = ("self_similarity", "different_token_similarity", "within_sequence_similarity")
SIZES = ("n", "Q", "token_types", "anisotropy_null", "n_points")
"""Metrics that the baselines of others follow from."""

_AT_SCALES = {f"intrinsic_dimension_at_{scale}": scale for scale in SCALES}
_DRAWS = 16
_SEEING = 1024
"""Rows whose neighbours are drawn: as many as give a dimension to about 3 %."""

_MOST, _WIDEST = 1e15, 1e6
"""Rows and width beyond which nothing is simulated."""


@np.errstate(all="ignore")  # sizes are what somebody has measured, and may be anything
def baseline_values(values: pd.DataFrame, widths: pd.Series, counts: Array | None = None) -> pd.DataFrame:
    """The expected value of each metric for Gaussian embeddings, at the same steps and layers; NaN where unknown.

    Args:
        values: metrics (columns) at each step and layer (rows).
        widths: d at each row of ``values``; NaN where unknown.
        counts: occurrences of each token type, for the regressions over token types.
    """
    nothing = pd.Series(np.nan, index=values.index)
    n, Q, types = (values.get(key, nothing) for key in ("n", "Q", "token_types"))
    dim = widths.where(n >= 2)
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
        "V_over_Q": free / n,
        "V_W_over_Q": (n - types) / n,
        "V_B_over_Q": (types - 1) / n,
        "anisotropy": gaussian,
        "top1_share": gaussian,
        "anisotropy_standardized": gaussian,
        "anisotropy_z_scored": gaussian,
        "participation_ratio": (dim * free + 2) / (free + dim + 1),
        "duplicate_fraction": zero,
        "kurtosis": -6 / (n + 1),
        "max_abs": np.sqrt(Q / dim) * stats.norm.ppf((1 + 0.5 ** (1 / (n * dim))) / 2),
        "unembedding_alignment": zero,
        "unembedding_alignment_std": np.sqrt(1 / dim),
        "linearity": zero,
    }
    points = values.get("n_points", n)
    if "intrinsic_dimension" in values:
        known["intrinsic_dimension"] = _each(lambda n, dim: _twonn(_power(n), dim), points, dim)
    for key in _AT_SCALES.keys() & set(values):
        known[key] = _each(lambda n, dim: _gride(_power(n), dim)[_AT_SCALES[key]], points, dim)  # noqa: B023 - at once
    known |= {k: _each(lambda *size: _spectrum(*size)[k], n, dim) for k in _SPECTRUM & set(values)}  # noqa: B023 - at once
    zeros = ("mean_cosine_", "massive_fraction", "cka_to_", *_SIMILARITIES)
    known |= {str(key): zero for key in values if str(key).startswith(zeros)}
    if counts is not None and len(counts) and not _OVER_TYPES.isdisjoint(values):
        known |= _over_types(counts, Q, dim)
    return pd.DataFrame(dict.fromkeys(values, nothing) | known, index=values.index)


def _each(simulated: Callable[[int, int], float], n: pd.Series, dim: pd.Series) -> pd.Series:
    pairs = list(zip(n, dim, strict=True))
    known = {(a, b): simulated(int(a), int(b)) for a, b in set(pairs) if 3 <= a <= _MOST and 2 <= b <= _WIDEST}
    return pd.Series([known.get(pair, np.nan) for pair in pairs], index=n.index)


@cache
def _spectrum(n: int, dim: int) -> dict[str, float]:
    """Metrics of the spectrum of Gaussian rows."""
    centred, uncentred = (torch.from_numpy(gaussian_eigenvalues(free, dim)) for free in (n - 1, n))
    values = {**full_spectrum_values(centred), "rankme": entropy_rank(uncentred.sqrt())}
    return {key: float(value) for key, value in values.items()}


@cache
def gaussian_eigenvalues(free: int, dim: int) -> Array:
    """Eigenvalues of Σ x xᵀ, descending, of Gaussian rows with ``free`` degrees of freedom, n - 1 of centred ones.

    They are drawn from their law (Dumitriu & Edelman 2002).
    """
    small, large = min(free, dim), max(free, dim)
    random = np.random.default_rng(0)
    diagonal = np.sqrt(random.chisquare(large - np.arange(small)))
    beside = np.sqrt(random.chisquare(small - 1 - np.arange(small - 1)))
    squares = diagonal**2 + np.append(0, beside**2)
    eigenvalues = np.zeros(dim)
    eigenvalues[:small] = linalg.eigvalsh_tridiagonal(squares, diagonal[:-1] * beside)[::-1].clip(0)
    return eigenvalues


def _power(n: int) -> int:
    """The power of 2 nearest to a number of rows, of which a batch has at most 4096."""
    return min(round(math.log2(n)), 12)


@cache
def _gride(power: int, dim: int) -> dict[int, float]:
    """GRIDE of 2**power Gaussian rows at each scale, as some of them see it.

    Given a row, the squared distances of the others to it are independent, of a noncentral χ² law.
    """
    random, others = np.random.default_rng(0), 2**power - 1
    ranks = [scale for scale in SCALES if 2 * scale <= others]
    places = [rank - 1 for rank in sorted({each for scale in ranks for each in (scale, 2 * scale)})]
    nearest = []
    for norm in np.sqrt(random.chisquare(dim, _SEEING)).astype(np.float32):
        beside = 2 * random.standard_gamma((dim - 1) / 2, others, dtype=np.float32)
        squared = (random.standard_normal(others, dtype=np.float32) - norm) ** 2 + beside
        nearest.append(np.partition(squared, places)[: places[-1] + 1])
    log_distance = torch.from_numpy(np.log(nearest, dtype=np.float64)) / 2
    of_ratios = {scale: log_distance[:, 2 * scale - 1] - log_distance[:, scale - 1] for scale in ranks}
    found = {scale: float(most_likely_dimension(log_mu, scale)[0]) for scale, log_mu in of_ratios.items()}
    return {scale: float(f"{found.get(scale, math.nan):.4g}") for scale in SCALES}


@cache
def _twonn(power: int, dim: int) -> float:
    """TwoNN of 2**power Gaussian rows."""
    rows = torch.randn(2**power, dim, generator=torch.Generator().manual_seed(0))
    return float(f"{float(twonn_dimension(rows).dimension):.4g}")


def _over_types(counts: Array, Q: pd.Series, dim: pd.Series) -> dict[str, pd.Series]:
    """Means of the statistics over token types: drawn a few times for each width at Q = 1, then scaled."""
    scale = np.log(Q.where(Q > 0))
    is_regressed = _is_regressed(counts)
    expected: dict[str, pd.Series] = {}
    for width in dim.dropna().unique():
        rows = dim == width
        grid = np.linspace(scale[rows].min(), scale[rows].max(), 2 if scale[rows].nunique() < 2 else 64)
        draws = [
            {key: torch.from_numpy(x[is_regressed]) for key, x in _draw(counts, int(width), seed).items()}
            for seed in range(_DRAWS)
        ]
        n = torch.from_numpy(counts[is_regressed])
        at_sizes = [
            pd.DataFrame([_regressions(n, {key: x * size for key, x in types.items()}) for types in draws]).mean()
            for size in np.exp(grid)
        ]
        for key, values in pd.DataFrame(at_sizes).items():
            column = expected.setdefault(str(key), pd.Series(np.nan, index=Q.index))
            column[rows] = np.interp(scale[rows], grid, values)
    return expected


def _draw(counts: Array, dim: int, seed: int) -> dict[str, Array]:
    """Q, M and V of the token types at Q = 1."""
    random = np.random.default_rng(seed)
    M = random.chisquare(dim, len(counts)) / counts / dim
    V = 2 * random.standard_gamma(dim * (counts - 1) / 2) / counts / dim
    return {"Q": M + V, "M": M, "V": V}


def _is_regressed(counts: Array) -> NDArray[np.bool_]:
    least, most = REGRESSION_COUNT_RANGE
    return (counts >= least) & (counts <= most)


def type_statistics(types: pd.DataFrame) -> dict[str, float]:
    """The values over token types, as `embedgeo.TokenMoments` computes them by default.

    Args:
        types: columns ``n``, ``Q``, ``M`` and ``V``, a row for each token type.
    """
    regressed = types[_is_regressed(types["n"].to_numpy(dtype=float))]
    tensors = {key: torch.tensor(regressed[key].to_numpy(dtype=float)) for key in ("n", "Q", "M", "V")}
    return _regressions(tensors.pop("n"), tensors)


def _regressions(n: torch.Tensor, types: dict[str, torch.Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in type_regressions({"n": n, **types}).items()}
