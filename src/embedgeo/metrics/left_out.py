"""Numbers without the rows, or the coordinate, that may make them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.moments import Moments, merge_parts, ratio, variance_values
from embedgeo.functional.outliers import (
    OutlierRows,
    large_rows,
    negative_moments,
    negative_scatter,
    negative_table,
)
from embedgeo.functional.rows import NO_TYPE
from embedgeo.functional.spectrum import Scatter, top_eigenvalue, varying_scatter
from embedgeo.functional.tokens import (
    SequenceCount,
    TokenTable,
    unbiased_split,
    variance_split,
    within_variance,
)
from embedgeo.glossary import LEFT_OUT
from embedgeo.metrics.base import GeometryMetric

KINDS = ("large_rows", "first_positions", "top_dim")
"""What may be left out: large rows that are no first position, first positions, and the coordinate
of the largest share of V.
"""
WITHOUT = {
    "large_rows": "without large rows",
    "first_positions": "without first positions",
    "both": "without large rows and first positions",
    "top_dim": "without the largest coordinate",
    "all": "without these rows, and then the largest coordinate",
}
"""What is left out together, as in the keys ``{key}_without_{what}``, in words."""
OPEN = 0.05
"""Share of V, above what is usual, from which numbers without a kind are recorded."""

_LEAST_ROWS = 100
# share of V that is left from which products that were summed in float32 tell its directions
_LEAST_LEFT = 1e-4


class _States(NamedTuple):
    n: Tensor
    mean: Tensor
    m2: Tensor
    scatter: Scatter | None
    types: TokenTable | None

    def without_rows(self, rows: OutlierRows) -> "_States":
        """These states without some of the rows held."""
        x = rows.rows
        return _States(
            *merge_parts([self[:3], negative_moments(x)]),
            self.scatter and self.scatter.merge(negative_scatter(x)),
            self.types and self.types.merge(negative_table(rows)),
        )

    def without_coordinate(self) -> "_States":
        """These states without the coordinate of the largest share of V."""
        kept = torch.ones_like(self.m2).index_fill_(0, self.m2.argmax(), 0)
        scatter = self.scatter and self.scatter._replace(
            mean=self.scatter.mean * kept, scatter=self.scatter.scatter * kept * kept[:, None]
        )
        return _States(self.n, self.mean * kept, self.m2 * kept, scatter, None)

    def values(self, whole: "_States", num_sequences: Tensor) -> dict[str, Tensor]:
        """The numbers of these states; NaN of what they do not tell."""
        total = self.m2.clamp(min=0).sum()
        found = variance_values(self.n, self.mean, total)
        values = {key: found[key] for key in ("V", "M_over_Q")}
        unknown = torch.full_like(total, torch.nan)
        if whole.types is not None:
            split = {"V_W_over_V": unknown, "V_W_over_V_unbiased": unknown}
            if self.types is not None:
                types = self.types.typed().without_rounding()
                within = within_variance(types, num_sequences)
                split |= variance_split(types) | unbiased_split(self.n, values["V"], within)
            values |= {key: split[key] for key in ("V_W_over_V", "V_W_over_V_unbiased")}
        if whole.scatter is not None:
            values["anisotropy"] = unknown
            if self.scatter is not None and bool(total > _LEAST_LEFT * whole.m2.sum()):
                s = varying_scatter(self.scatter)
                values["anisotropy"] = ratio(top_eigenvalue(s), s.trace())
        return values


def open_kinds(values: Mapping[str, float], metric: GeometryMetric) -> list[bool]:
    """Whether each of `KINDS` holds so much of V (a coordinate, of V or M) that numbers without it
    are worth their time: none among fewer than 100 rows, of which any few make the numbers.

    Args:
        values: numbers of a layer by key.
        metric: one that holds its rows of largest norm.
    """
    n = values["n"]
    if n < _LEAST_ROWS:
        return [False] * len(KINDS)
    moments = metric.load(Moments)
    of_mean = ratio(moments.mean[moments.m2.argmax()].square(), moments.mean.square().sum())
    num_first = float(metric.load(OutlierRows).first_n)
    # a large row has at least 16 times the usual square
    return [
        max(values["top_rows_share"], 16 * values["large_norm_rows"]) > OPEN,
        abs(values["first_positions_share"] - num_first / n) > OPEN,
        stands_out(max(values["top_dim_share"], float(of_mean)), metric.dim),
    ]


def stands_out(share: float, width: int) -> bool:
    """Tell whether a coordinate's share of V or M is above 5 %, and above 4 times what each has on
    average.
    """
    return share > max(OPEN, 4 / max(1, width))


def values_without(
    metrics: Iterable[GeometryMetric], kinds: Sequence[str] = KINDS
) -> dict[str, dict[str, Tensor]]:
    """Numbers of a layer without each kind, and without all of them, by what is left out.

    They are computed from the states, by merging the negative of what is left out. So they are
    those of the other rows exactly, as far as the rows left out are held: of first positions that
    are not all among the 128 rows of largest norm, only V and M_over_Q are known, from their
    moments. What a coordinate has of the variance within token types is unknown.

    Args:
        metrics: of a layer.
        kinds: of `KINDS`, in any order.

    Returns:
        By what is left out, the keys of `WITHOUT`, and ``""`` for nothing: ``n``, the number of
        rows left out, ``V``, ``M_over_Q`` and, where a metric knows them, ``V_W_over_V``,
        ``V_W_over_V_unbiased`` and ``anisotropy``; ``coordinate``, the one of the largest share of
        V of what is left, which ``"top_dim"`` and ``"all"`` leave out. Empty where no metric holds
        rows.
    """
    own = [*metrics]
    held = next((each for each in own if each.holds(OutlierRows)), None)
    if held is None:
        return {}
    outliers, moments = held.load(OutlierRows), held.load(Moments)
    scatters = [each.load(Scatter) for each in own if each.holds(Scatter)]
    whole = _States(
        moments.n,
        moments.mean,
        moments.m2,
        scatters[0].expanded() if scatters else None,
        _table(held, moments.n),
    )
    num_sequences = moments.n
    if held.holds(SequenceCount):
        num_sequences = held.load(SequenceCount).num_sequences
    is_large = large_rows(outliers, whole.n)
    is_first = outliers.is_first
    has_all = bool(is_first.sum() == outliers.first_n)
    found = {"": whole}
    if "large_rows" in kinds:
        found["large_rows"] = whole.without_rows(outliers.select(is_large))
    if "first_positions" in kinds:
        for what, base in [("first_positions", whole), ("both", found.get("large_rows"))]:
            if base is not None and has_all:
                found[what] = base.without_rows(outliers.select(is_first))
            elif base is not None:
                first = -outliers.first_n, outliers.first_mean, -outliers.first_m2
                found[what] = _States(*merge_parts([base[:3], first]), None, None)
    rows = next((what for what in ("both", "large_rows", "first_positions") if what in found), "")
    if "top_dim" in kinds:
        found["top_dim"] = whole.without_coordinate()
    if rows:
        found["all"] = found[rows].without_coordinate()
    values = {
        what: {
            "n": whole.n - states.n,
            **states.values(whole, num_sequences),
            "coordinate": (found[rows] if what == "all" else whole).m2.argmax().double(),
        }
        for what, states in found.items()
    }
    if "large_rows" in found:
        squares = (outliers.rows[is_large] - whole.mean).square().sum()
        values["large_rows"]["share"] = ratio(squares, whole.m2.sum())
    return values


def _table(metric: GeometryMetric, n: Tensor) -> TokenTable | None:
    """The token table of a metric that has the type of each row; None of another one."""
    if not metric.holds(TokenTable):
        return None
    table = metric.load(TokenTable)
    is_whole = bool((table.n.sum() == n) & (n > 0)) and not bool((table.token_ids == NO_TYPE).any())
    return table if is_whole else None


def recorded_values(found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The `values_without`, under the keys that they are recorded by."""
    values = {
        f"{key}_without_{what}": value
        for what, of_what in found.items()
        if what
        for key, value in of_what.items()
        if key not in ("n", "coordinate", "share")
        and not (what in ("top_dim", "all") and key.startswith("V_W"))
    }
    if "large_rows" in found:
        values["large_rows"] = found["large_rows"]["n"]
        values["large_rows_share"] = found["large_rows"]["share"]
    if "top_dim" in found:
        values["V_top_coordinate"] = found["top_dim"]["coordinate"]
    if "all" in found:
        values["V_without_rows_top_coordinate"] = found["all"]["coordinate"]
    return values


def is_left_out(key: str) -> bool:
    """Tell whether a key is recorded only where few rows, or one coordinate, make the numbers: for
    flags and tables.
    """
    return key in LEFT_OUT
