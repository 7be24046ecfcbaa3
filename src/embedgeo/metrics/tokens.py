"""Q, M and V per token type, and the variance within and between token types."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.moments import (
    Moments,
    VarianceMoments,
    merge,
    moment_values,
    pool_groups,
    row_moments,
    variance_moments,
)
from embedgeo.functional.plane import type_plane
from embedgeo.functional.precision import to_state
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import (
    TokenTable,
    coefficient_of_variation,
    detailed_token_table,
    token_table,
    type_regressions,
    type_values,
    unbiased_split,
    variance_split,
)
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.moments import wants_token_values

_TYPE = "type_"
"""Prefix of the states that have one row per token type."""


class TokenMoments(GeometryMetric):
    """Moments of the embeddings as a whole and of each token type (the paper's Algorithm 1, batched).

    ``compute()`` gives all that `EmbeddingMoments` gives, with the unbiased split over everything seen, and
    ``token_types`` seen; ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen; ``Q_t_cv``, the coefficient
    of variation of Q over token types; ``V_on_M_slope`` and ``V_on_M_r2`` of the regression of V on M over token
    types; ``Q_freq_slope``, ``M_freq_slope`` and ``V_freq_slope`` of log10(1 + value) on log10 n. What needs token
    ids is absent where rows came without any.

    Memory is O(T d) for T token types: one mean each (with ``count_range``: all moments of each).

    Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253).

    Args:
        dim: d, the width of the embeddings.
        count_range: (lo, hi) restricts all values over rows to token types that occur lo ≤ n ≤ hi times.
        regression_count_range: the same for the regressions over token types.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: a range that is not 1 ≤ lo ≤ hi.

    >>> metric = TokenMoments(1)
    >>> metric.update(torch.tensor([[1.0], [3.0], [7.0], [9.0]]), token_ids=torch.tensor([5, 5, 2, 2]))
    >>> values = metric.compute()
    >>> values["V"].item(), values["V_W"].item(), values["V_B"].item(), values["token_types"].item()
    (10.0, 1.0, 9.0, 2.0)
    """

    n: Tensor
    type_token_ids: Tensor

    def __init__(
        self,
        dim: int,
        count_range: tuple[int, int] | None = None,
        regression_count_range: tuple[int, int] = (10, 100_000),
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, **kwargs)
        self.count_range = None if count_range is None else _checked_range("count_range", count_range)
        self.regression_count_range = _checked_range("regression_count_range", regression_count_range)
        self._kind = VarianceMoments if self.count_range is None else Moments
        self.declare(Moments.zeros(dim))
        self.add_state("type_token_ids", torch.zeros(0, dtype=torch.int64), dist_reduce_fx=None)
        none = Moments.zeros(dim, (0,))
        self.declare(variance_moments(none) if self.count_range is None else none, _TYPE)

    def observe(self, rows: Rows) -> None:
        x, ids = rows.embeddings, rows.token_ids
        if ids is None and self.count_range is not None:
            raise ValueError("count_range needs token_ids in every update; got none.")
        if len(x) and (ids is None) != (len(self.type_token_ids) == 0) and bool(self.n > 0):
            raise ValueError("token_ids must come with every update or with none; got a mixture. Call reset() between.")
        self.store(merge(self.load(Moments), to_state(row_moments(x))))
        if ids is not None:
            tabulate = token_table if self.count_range is None else detailed_token_table
            table = tabulate(x, ids)
            self._set_types(self._types().merge(TokenTable(table.token_ids.to(self.device), to_state(table.moments))))

    def merge(self, before: Mapping[str, Tensor]) -> None:
        self.store(merge(self.load(Moments, states=before), self.load(Moments)))
        self._set_types(self._types(before).merge(self._types()))

    def all_reduce(self, ranks: Ranks) -> None:
        self.store(self.load(Moments).pool(ranks.total, ranks.largest))
        types = ranks.concatenate(self.type_token_ids)[0].unique()
        whole = self._types().spread(types).moments
        self._set_types(TokenTable(types, whole.pool(ranks.total, ranks.largest)))

    def table(self) -> dict[str, Tensor]:
        """``token_id``, ``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,), by ascending token id.

        They are of the rows this process has seen; within ``sync_context()``, of those of all ranks.
        """
        types = self._types_in(self.count_range)
        return {"token_id": types.token_ids, **type_values(variance_moments(types.moments))}

    def plane(self, most: int = 150) -> dict[str, Tensor]:
        """``token_id``, ``n``, ``pc1`` and ``pc2`` of the ``most`` frequent token types, by descending n.

        Where their means lie in the plane of the two principal axes of all types' means: see
        `embedgeo.functional.type_plane`. First comes the origin, the zero vector, with token_id -1 and n 0. Nothing
        where no types were seen; the rows are those of `table`.
        """
        types = self._types_in(self.count_range)
        means, origin = type_plane(variance_moments(types.moments))
        chosen = types.moments.n.argsort(descending=True, stable=True)[:most]
        first = 1 if len(chosen) else 0
        points = torch.cat((origin.expand(first, 2), means[chosen]))
        return {
            "token_id": torch.cat((chosen.new_full((first,), -1), types.token_ids[chosen])),
            "n": torch.cat((origin.new_zeros(first), types.moments.n[chosen])),
            "pc1": points[:, 0],
            "pc2": points[:, 1],
        }

    def compute(self) -> dict[str, Tensor]:
        """The values named above."""
        types = self._types_in(self.count_range)
        counted = types.moments.n.sum()
        overall = self.load(Moments) if self.count_range is None else pool_groups(types.moments)
        values = moment_values(overall)
        values["n_nonfinite"] = self.num_nonfinite.to(overall.n.dtype)
        if wants_token_values(overall.n, counted):
            complete = counted == overall.n  # not so where only some of the ranks were given token ids
            token_values = self._token_values(values["V"], variance_moments(types.moments))
            values.update({key: torch.where(complete, value, torch.nan) for key, value in token_values.items()})
        return values

    def _token_values(self, variance: Tensor, types: VarianceMoments) -> dict[str, Tensor]:
        n, m2 = types.n.sum(), types.m2.sum()
        every = types if self.count_range is None else variance_moments(self._types().moments)
        by_type = type_values(every)
        regressed = _occur(by_type["n"], self.regression_count_range)
        return {
            "token_types": n.new_tensor(len(types.n)),
            **variance_split(types),
            **unbiased_split(n, variance, m2, n - len(types.n)),
            "Q_t_cv": coefficient_of_variation(by_type["Q"][_occur(by_type["n"], self.count_range)]),
            **type_regressions({key: value[regressed] for key, value in by_type.items()}),
        }

    def _types(self, states: Mapping[str, Tensor] | None = None) -> TokenTable[Any]:
        token_ids = self.type_token_ids if states is None else states["type_token_ids"]
        return TokenTable(token_ids, self.load(self._kind, _TYPE, states))

    def _set_types(self, types: TokenTable[Any]) -> None:
        self.type_token_ids = types.token_ids
        self.store(types.moments, _TYPE)

    def _types_in(self, count_range: tuple[int, int] | None) -> TokenTable[Any]:
        if count_range is None:
            return self._types()
        return self._types().select(_occur(self._types().moments.n, count_range))


def _occur(n: Tensor, count_range: tuple[int, int] | None) -> Tensor:
    """Which token types occur that often, given their counts."""
    lo, hi = count_range or (1, torch.inf)
    return (n >= lo) & (n <= hi)


def _checked_range(name: str, bounds: tuple[int, int]) -> tuple[int, int]:
    lo, hi = bounds
    if not 1 <= lo <= hi:
        raise ValueError(f"{name} must be (lo, hi) with 1 <= lo <= hi occurrences; got {bounds!r}.")
    return lo, hi
