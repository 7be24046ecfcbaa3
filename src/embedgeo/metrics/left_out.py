"""Numbers without the rows, or the coordinate, that may make them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from embedgeo.functional.spectrum import Scatter, top_eigenvalue, varying_scatter
from embedgeo.functional.tokens import (
    TokenTable,
    unbiased_split,
    variance_split,
    within_variance,
)
from embedgeo.metrics.base import GeometryMetric

OPEN = 0.05
"""Share of V, above what is usual, from which numbers without a kind are recorded."""

_LEAST_ROWS = 100
_MOVED = 0.1  # as in `embedgeo.results.findings`
_UNBIASED, _PLUG_IN = "V_W_over_V_unbiased", "V_W_over_V"
# without a coordinate V_W / V is that of the types' means; with "both" it is compared
_SHARES = {"both": (_UNBIASED, _PLUG_IN), "top_dim": (_PLUG_IN,), "all": (_PLUG_IN,)}
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
            *merge_parts([(self.n, self.mean, self.m2), negative_moments(x)]),
            self.scatter and self.scatter.merge(negative_scatter(x)),
            self.types and self.types.merge(negative_table(rows)),
        )

    def without_coordinate(self) -> "_States":
        """These states without the coordinate of the largest share of V."""
        kept = torch.ones_like(self.m2).index_fill_(0, self.m2.argmax(), 0)
        scatter = self.scatter and self.scatter._replace(
            mean=self.scatter.mean * kept, scatter=self.scatter.scatter * kept * kept[:, None]
        )
        types = self.types and self.types._replace(mean=self.types.mean * kept)
        return _States(self.n, self.mean * kept, self.m2 * kept, scatter, types)

    def values(
        self, whole: "_States", num_sequences: Tensor, shares: Sequence[str]
    ) -> dict[str, Tensor]:
        """The numbers of these states; NaN of what they do not tell."""
        total = self.m2.clamp(min=0).sum()
        found = variance_values(self.n, self.mean, total)
        values = {key: found[key] for key in ("V", "M_over_Q")}
        unknown = torch.full_like(total, torch.nan)
        if whole.types is not None:
            values |= dict.fromkeys(shares, unknown)
            if self.types is not None:
                types = self.types.typed()
                if _PLUG_IN in shares:
                    within = values["V"] - variance_split(types)["V_B"]
                    values[_PLUG_IN] = ratio(within.clamp(min=0), values["V"])
                if _UNBIASED in shares:
                    within = within_variance(types.without_rounding(), num_sequences)
                    values[_UNBIASED] = unbiased_split(self.n, values["V"], within)[_UNBIASED]
        if whole.scatter is not None:
            values["anisotropy"] = unknown
            if self.scatter is not None and bool(total > _LEAST_LEFT * whole.m2.sum()):
                s = varying_scatter(self.scatter)
                values["anisotropy"] = ratio(top_eigenvalue(s), s.trace())
        return values


def gate_numbers(metric: GeometryMetric) -> tuple[Tensor, Tensor]:
    """What `may_make_numbers` takes of a metric that holds its rows of largest norm: the mean of
    the coordinate of the largest share of V, and the number of first positions, scalars.
    """
    moments = metric.load(Moments)
    return moments.mean.take(moments.m2.argmax()), metric.load(OutlierRows).first_n


def may_make_numbers(
    values: Mapping[str, float], dim: int, top_mean: float, num_first: float
) -> bool:
    """Tell whether large rows, first positions or one coordinate hold so much of V (a coordinate,
    of V or M) that numbers without them are worth their time.

    A coordinate does where it has 5 %, and 4 times what each has on average, of V, or of an M that
    moves M / Q by a tenth with it. They never are among fewer than 100 rows, of which any few make
    the numbers.

    Args:
        values: numbers of a layer by key.
        dim: d, its width.
        top_mean: see `gate_numbers`.
        num_first: likewise.
    """
    values = defaultdict(float, values)  # another's subclass may have fewer
    n = values["n"]
    if n < _LEAST_ROWS:
        return False
    least = max(OPEN, 4 / dim)
    M, of_mean = values["M"], top_mean * top_mean
    left = M - of_mean + values["V"] * (1 - values["top_dim_share"])  # Q without the coordinate
    # a large row has at least 16 times the usual square
    return (
        max(values["top_rows_share"], 16 * values["large_norm_rows"]) > OPEN
        or abs(values["first_positions_share"] - num_first / n) > OPEN
        or values["top_dim_share"] > least
        or (of_mean > least * M and abs((M - of_mean) * values["Q"] - M * left) > _MOVED * M * left)
    )


def values_without(metrics: Sequence[GeometryMetric]) -> dict[str, dict[str, Tensor]]:
    """Numbers of a layer without large rows, first positions, the largest coordinate, and all.

    They are computed from the states, by merging the negative of what is left out. So they are
    those of the other rows exactly, as far as the rows left out are held: of first positions that
    are not all among the 128 rows of largest norm, only V and M_over_Q are known, from their
    moments. What a coordinate has of pairs of occurrences is unknown, what it has of the types'
    means is not.

    Args:
        metrics: of a layer.

    Returns:
        By what is left out, ``"large_rows"``, ``"first_positions"``, ``"both"``, ``"top_dim"`` and
        ``"all"``: ``n``, the number of rows left out, ``V``, ``M_over_Q`` and, where a metric knows
        them, ``V_W_over_V_unbiased`` or, without a coordinate, ``V_W_over_V`` (of ``"both"`` each),
        and ``anisotropy``; ``coordinate``, the one of the largest share of V of what is left, which
        ``"top_dim"`` and ``"all"`` leave out. Empty where no metric holds rows.
    """
    held = next((each for each in metrics if each.holds(OutlierRows)), None)
    if held is None:
        return {}
    outliers, moments = held.load(OutlierRows), held.load(Moments)
    scatters = [each.load(Scatter) for each in metrics if each.holds(Scatter)]
    whole = _States(
        moments.n,
        moments.mean,
        moments.m2,
        scatters[0].expanded() if scatters else None,
        _table(held, moments.n),
    )
    is_large = large_rows(outliers, whole.n)
    is_first = outliers.is_first
    has_all = bool(is_first.sum() == outliers.first_n)
    found = {"large_rows": whole.without_rows(outliers.select(is_large))}
    first = -outliers.first_n, outliers.first_mean, -outliers.first_m2
    for what, base, left_out in (
        ("first_positions", whole, is_first),
        ("both", found["large_rows"], is_large | is_first),
    ):
        if has_all:  # all of them at once, for some may be of one type and sequence
            found[what] = whole.without_rows(outliers.select(left_out))
        else:
            found[what] = _States(*merge_parts([(base.n, base.mean, base.m2), first]), None, None)
    found["top_dim"] = whole.without_coordinate()
    found["all"] = found["both"].without_coordinate()
    values = {
        what: {
            "n": whole.n - states.n,
            **states.values(whole, outliers.num_sequences, _SHARES.get(what, (_UNBIASED,))),
            "coordinate": (found["both"] if what == "all" else whole).m2.argmax().double(),
        }
        for what, states in found.items()
    }
    squares = (outliers.rows[is_large] - whole.mean).square().sum()
    values["large_rows"]["share"] = ratio(squares, whole.m2.sum())
    return values


def _table(metric: GeometryMetric, n: Tensor) -> TokenTable | None:
    """The token table of a metric that has the type of each row; None of another one."""
    if not metric.holds(TokenTable):
        return None
    table = metric.load(TokenTable)
    is_whole = bool((table.n.sum() == n) & (n > 0)) and not table.num_untyped
    return table if is_whole else None


def recorded_values(found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The `values_without`, under the keys that they are recorded by."""
    values = {
        f"{key}_without_{what}": value
        for what, of_what in found.items()
        for key, value in of_what.items()
        if key not in ("n", "coordinate", "share")
    }
    for what in ("large_rows", "first_positions"):
        values[what] = found[what]["n"]
    values["large_rows_share"] = found["large_rows"]["share"]
    values["V_top_coordinate"] = found["top_dim"]["coordinate"]
    values["V_without_rows_top_coordinate"] = found["all"]["coordinate"]
    return values
