"""Token tables (one mean and variance per token type) and the split of the variance within and between them.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253): Algorithm 1, and V = V_W + V_B. Its plug-in V_W is biased
low where tokens occur only a few times; the unbiased estimates are those of one-way analysis of variance.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from embedgeo.functional.grouped import grouped_row_moments
from embedgeo.functional.moments import (
    AnyMoments,
    Moments,
    VarianceMoments,
    merge,
    per_state,
    pool_groups,
    ratio,
    row_chunks,
    without_rounding,
)
from embedgeo.functional.precision import accumulator_dtype, row_norms

_MERGED_ELEMENTS = 1 << 17
"""Elements merged at a time: a merge takes several times their memory."""

_CENTRED_ELEMENTS = 1 << 18
"""Elements centred at a time, so that they and what is taken from them stay in the processor's cache."""

_SUMMED_ROWS = 1024
"""Rows centred at a time, so that what a float32 sum over them loses is small beside their spread."""


REGRESSION_COUNT_RANGE = (10, 100_000)
"""Least and greatest number of occurrences of the token types that are regressed over, as in the paper's figures."""


@dataclass(frozen=True)
class TokenTable(Generic[AnyMoments]):
    """Moments of the embeddings of each token type.

    Attributes:
        token_ids: the token types, ascending, shape (T,), int64.
        moments: those of each, shape (T, ...).
    """

    token_ids: Tensor
    moments: AnyMoments

    def merge(self, other: "TokenTable[AnyMoments]") -> "TokenTable[AnyMoments]":
        """The table of the rows of both; only the types that ``other`` has are worked on."""
        if not len(self.token_ids):
            return other
        types = torch.cat((self.token_ids, other.token_ids)).unique()
        place = torch.searchsorted(types, other.token_ids)
        whole = self.spread(types).moments
        for rows in row_chunks(other.moments.mean, _MERGED_ELEMENTS):
            held = type(whole)(*(state.index_select(0, place[rows]) for state in whole))
            merged = merge(held, per_state(itemgetter(rows), other.moments))
            for state, new in zip(whole, merged, strict=True):
                state.index_copy_(0, place[rows], new)
        return TokenTable(types, whole)

    def spread(self, types: Tensor) -> "TokenTable[AnyMoments]":
        """The same rows in a new table that has a place for all ``types``, ascending, a superset of its own."""
        place = torch.searchsorted(types, self.token_ids)

        def spread(state: Tensor) -> Tensor:
            return state.new_zeros(len(types), *state.shape[1:]).index_copy_(0, place, state)

        return TokenTable(types, per_state(spread, self.moments))

    def select(self, keep: Tensor) -> "TokenTable[AnyMoments]":
        """The token types for which ``keep``, shape (T,), is true."""
        return TokenTable(self.token_ids[keep], per_state(lambda state: state[keep], self.moments))


def detailed_token_table(x: Tensor, token_ids: Tensor) -> TokenTable[Moments]:
    """All `Moments` per token type: see `token_table`, which is faster, for the arguments."""
    types, group = token_ids.unique(return_inverse=True)
    return TokenTable(types, grouped_row_moments(x, group, len(types)))


def token_table(x: Tensor, token_ids: Tensor) -> TokenTable[VarianceMoments]:
    """Moments per token type of the rows of ``x``: the paper's Algorithm 1, batched.

    Rows are taken in the order of their token ids, so that each part worked on stays in the processor's cache and
    splits only token types of many rows. Each type is centred on one of its rows (the last: the first of a
    text may be an outlier), then on the mean of what is left, and the mean corrected by that of what is left then:
    so float32 rows need no float64 copy, and identical rows give a variance of exactly 0.

    Args:
        x: shape (n, d), any floating dtype.
        token_ids: shape (n,), int64.

    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]))
    >>> table.token_ids.tolist(), table.moments.mean.flatten().tolist(), table.moments.m2.tolist()
    ([2, 5], [7.0, 2.0], [0.0, 2.0])
    """
    order = token_ids.argsort(stable=True)
    types, group, count = token_ids[order].unique_consecutive(return_inverse=True, return_counts=True)
    mean = torch.empty(len(types), x.shape[1], dtype=accumulator_dtype(x.device), device=x.device)
    moments = VarianceMoments(mean.new_empty(len(types)), mean, mean.new_empty(len(types)))
    num_rows = max(1, min(_CENTRED_ELEMENTS // max(1, x.shape[1]), _SUMMED_ROWS))
    for rows, held, is_continued in _parts(count.cumsum(0).tolist(), num_rows):
        head = per_state(itemgetter(held.start), moments)
        before = per_state(Tensor.clone, head) if is_continued else None
        out = per_state(itemgetter(held), moments)
        _moments_of_runs(x, order[rows], group[rows] - held.start, out=out)
        if before is not None:
            origin = before.mean  # so that equal means are merged exactly
            merged = merge(*(part._replace(mean=part.mean - origin) for part in (before, head)))
            for state, new in zip(head, merged._replace(mean=merged.mean + origin), strict=True):
                state.copy_(new)
    return TokenTable(types, moments)


def _parts(ends: Sequence[int], num_rows: int) -> Iterator[tuple[slice, slice, bool]]:
    """Part rows into at most ``num_rows`` at a time, so that only runs of more rows than that are split.

    Args:
        ends: where each run ends.
        num_rows: at least 1.

    Yields:
        The rows, the runs that they are of, and whether the first of these has rows in the part before.

    >>> [(rows.stop, runs.start, runs.stop, is_continued) for rows, runs, is_continued in _parts([2, 3, 9], 4)]
    [(3, 0, 2, False), (7, 2, 3, False), (9, 2, 3, True)]
    """
    start, run = 0, 0
    while run < len(ends):
        whole = bisect_right(ends, start + num_rows)  # runs before this one end within the part
        stop = ends[whole - 1] if whole > run else start + num_rows
        yield slice(start, stop), slice(run, max(whole, run + 1)), start > (ends[run - 1] if run else 0)
        start, run = stop, whole


def _moments_of_runs(x: Tensor, order: Tensor, index: Tensor, *, out: VarianceMoments) -> None:
    """Put into ``out`` the moments of each run of equal values in ``index`` (0, 0, 1, ...), of the rows ``order``."""
    wide = out.mean.dtype
    rows = x.index_select(0, order).to(torch.promote_types(x.dtype, torch.float32))
    count = torch.bincount(index)
    first = count.cumsum(0) - count
    place = torch.arange(len(rows), device=rows.device)
    origin = rows.index_select(0, first + count - 1)
    rows.sub_(origin.index_select(0, index))
    offset = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    rows.sub_(offset.index_select(0, index))
    rest = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    norm = row_norms(rows)
    if x.dtype != wide and not bool(norm.isfinite().all()):  # float32 does not hold the differences
        _moments_of_runs(x.index_select(0, order).to(wide), place, index, out=out)
        return
    out.n.copy_(count)
    out.mean.copy_(origin).add_(offset).add_(rest)
    out.m2.zero_().index_add_(0, index, norm.square())


def variance_split(types: VarianceMoments) -> dict[str, Tensor]:
    """Split the variance of all rows into within and between token types, given the moments of each.

    Returns:
        ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen: the paper's, equations 9-11.
    """
    means = pool_groups(types._replace(m2=torch.zeros_like(types.m2)))
    between_m2 = without_rounding(means.m2, means.n, torch.linalg.vector_norm(means.mean))
    within, between = ratio(types.m2.sum(), means.n), ratio(between_m2, means.n)
    return {"V_W": within, "V_B": between, "V_W_over_V": ratio(within, within + between)}


def unbiased_split(n: Tensor, variance: Tensor, m2_within: Tensor, freedom: Tensor) -> dict[str, Tensor]:
    """Estimate the split of the variance without the bias of few occurrences (one-way analysis of variance).

    Args:
        n: number of rows, scalar.
        variance: V of the rows, scalar.
        m2_within: squared deviations from the means of the token types, summed, scalar.
        freedom: their degrees of freedom, rows minus token types, scalar; 0 gives NaN.

    >>> split = unbiased_split(*torch.tensor([4.0, 2.0, 2.0, 2.0]))
    >>> {key: value.item() for key, value in split.items()}
    {'V_W_unbiased': 1.0, 'V_B_unbiased': 1.25, 'V_W_over_V_unbiased': 0.4444444477558136}
    """
    within = ratio(m2_within, freedom)
    between = variance - within * ratio(n - 1, n)
    return {
        "V_W_unbiased": within,
        "V_B_unbiased": between,
        "V_W_over_V_unbiased": ratio(within, within + between),
    }


def type_values(types: VarianceMoments) -> dict[str, Tensor]:
    """``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,), given the moments of each."""
    norm2, variance = types.mean.square().sum(1), ratio(types.m2, types.n)
    return {"n": types.n, "Q": norm2 + variance, "M": norm2, "V": variance}


def type_regressions(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """How Q, M and V of the token types hang together and depend on frequency (the paper's figures 3 and 5).

    Args:
        values: what `type_values` gives.

    Returns:
        ``V_on_M_slope`` and ``V_on_M_r2`` of the least-squares line of V on M; ``Q_freq_slope``, ``M_freq_slope``
        and ``V_freq_slope`` of log10(1 + value) on log10(n). NaN where fewer than two distinct abscissae are left.
    """
    slope, r2 = least_squares(values["M"], values["V"])
    log_n = values["n"].log10()
    slopes = {f"{key}_freq_slope": least_squares(log_n, values[key].log1p() / math.log(10))[0] for key in "QMV"}
    return {"V_on_M_slope": slope, "V_on_M_r2": r2, **slopes}


def coefficient_of_variation(x: Tensor) -> Tensor:
    """Standard deviation over mean of the values of ``x``; NaN where there are none."""
    return ratio(x.std(correction=0), x.mean()) if x.numel() else x.new_tensor(torch.nan)


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R² of the least-squares line of ``y`` on ``x``, shape (n,); NaN where ``x`` does not vary."""
    if x.numel() == 0:
        return x.new_tensor(torch.nan), x.new_tensor(torch.nan)
    n, dx, dy = x.new_tensor(x.numel()), x - x.mean(), y - y.mean()
    xx, yy = without_rounding(dx @ dx, n, x.mean()), without_rounding(dy @ dy, n, y.mean())
    xy = dx @ dy
    return ratio(xy, xx), ratio(xy.square(), xx * yy)
