"""Q, M and V per token type, and the variance within and between token types."""

from typing import Any, Self

import torch
from torch import Tensor

from embedgeo.functional.massive import RowGroup, first_positions, first_share
from embedgeo.functional.moments import (
    Moments,
    moment_values,
    ratio,
    row_moments,
    variance_values,
)
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import (
    REGRESSION_COUNT_RANGE,
    Count,
    TokenTable,
    context_split,
    has_token_values,
    local_variance,
    table_working_bytes,
    type_regressions,
    type_table,
    type_values,
    unbiased_split,
    variance_split,
    within_variance,
)
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.gaussian import Array, GaussianRows
from embedgeo.metrics.moments import SQUARED, EmbeddingMoments

_OVER_TYPES = in_group(
    "token types",
    510,
    Q_t_cv=Term(
        "C.V. of Q over tokens",
        "std / mean of Q_t over token types",
        "How unequal the token types' Q are.",
        ranges=True,
    ),
    V_on_M_slope=Term(
        "slope of V on M",
        "least squares over token types",
        "Near −1: what a token's mean gains, its variance loses, at constant Q.",
    ),
    V_on_M_r2=Term(
        "R² of V on M",
        "R², least squares over token types",
        "How well a token's mean norm predicts its variance.",
    ),
    Q_freq_slope=Term(
        "slope of Q on frequency",
        "log10(1 + Q) on log10 n, over token types",
        "Does size depend on frequency?",
    ),
    M_freq_slope=Term(
        "slope of M on frequency",
        "log10(1 + M) on log10 n, over token types",
        "Negative: frequent tokens have means near the origin.",
    ),
    V_freq_slope=Term(
        "slope of V on frequency",
        "log10(1 + V) on log10 n, over token types",
        "Positive: frequent tokens vary more with context.",
    ),
    **{
        f"{key}_freq_r2": Term(
            f"R² of {key} on frequency",
            f"R² of log10(1 + {key}) on log10 n, over token types",
            f"How well a token's frequency predicts its {key}.",
        )
        for key in "QMV"
    },
)

_TERMS = {
    **EmbeddingMoments.terms,
    **in_group(
        "size and variance",
        220,
        V_W=Term(
            "V_W, plug-in",
            f"plug-in estimate, {SQUARED}",
            "The published variance within tokens, of exactly the rows seen: too low where tokens "
            "occur a few times.",
            ranges=True,
        ),
        V_B=Term(
            "V_B, plug-in",
            f"plug-in estimate, {SQUARED}",
            "The published variance between tokens, of exactly the rows seen: too high where "
            "tokens occur a few times.",
            ranges=True,
        ),
        V_W_over_V=Term(
            "V_W / V, plug-in",
            "share of the variance, plug-in estimate",
            "The published share, of exactly the rows seen: comparable only to values from equally "
            "large samples.",
            is_scalar=True,
        ),
        V_over_Q=Term("V / Q", "share of the mean squared norm", "1 − M / Q.", is_drawn=False),
        V_W_over_Q=Term(
            "V_W / Q, plug-in",
            "share of the mean squared norm, plug-in estimate",
            "How much of the embeddings' size is what context does, of exactly the rows seen.",
        ),
        V_B_over_Q=Term(
            "V_B / Q, plug-in",
            "share of the mean squared norm, plug-in estimate",
            "How much of the embeddings' size is what the token itself does, of exactly the rows "
            "seen.",
        ),
    ),
    **in_group(
        "size and variance",
        225,
        V_W_text_over_V_W=Term(
            "V_W between texts / V_W",
            "share of V_W, from pairs in one and in different sequences",
            "How much of what context does is the text as a whole: 0 where two occurrences of a "
            "token differ as much in one text as in two, 1 where they are alike in one text.",
            gaussian=0.0,
        ),
        V_W_local=Term(
            "V_W within texts",
            f"estimate from pairs in one sequence, {SQUARED}",
            "Variance within the occurrences of a token in one text.",
            ranges=True,
            is_drawn=False,
        ),
        V_W_text=Term(
            "V_W between texts",
            f"estimate, {SQUARED}",
            "What different texts add to the variance within the occurrences of a token.",
            ranges=True,
            is_drawn=False,
            gaussian=0.0,
        ),
    ),
    **_OVER_TYPES,
    **in_group(
        "rows counted",
        630,
        token_types=Term(
            "token types",
            "distinct tokens seen",
            "Vocabulary ids among the rows.",
            ranges=True,
            is_drawn=False,
        ),
        token_types_regressed=Term(
            "token types in the regressions",
            "tokens seen 10 to 100,000 times",
            "What the spread of Q over tokens and the slopes and R² rest on.",
            ranges=True,
            is_drawn=False,
        ),
    ),
}


class TokenMoments(GeometryMetric):
    """Moments of the embeddings as a whole and of each token type (the paper's Algorithm 1,
    batched).

    ``compute()`` returns everything that `EmbeddingMoments` does, with the unbiased split over
    everything seen, and ``token_types`` seen; ``V_W_local``, ``V_W_text`` and
    ``V_W_text_over_V_W``, which split V_W_unbiased into what occurrences in one sequence and what
    different sequences do; ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen, and
    ``V_over_Q``, ``V_W_over_Q`` and ``V_B_over_Q``; and over the ``token_types_regressed`` that
    occur as often as ``regression_count_range`` says: ``Q_t_cv``, ``V_on_M_slope`` and
    ``V_on_M_r2``, and ``Q_freq_slope``, ``Q_freq_r2`` and those of M and
    V: see `embedgeo.functional.within_variance`, `embedgeo.functional.local_variance` and
    `embedgeo.functional.type_regressions`. Values that need token ids are absent where rows came
    without any, and are of the other rows where some have the id -100, which is no type.

    Memory is O(T d) for T token types: one mean each. With ``count_range`` all values come from the
    table of token types; ``mean_cosine``, ``norm_mean``, ``norm_cv``, ``norm_max``,
    ``top_dim_share``, ``first_positions_share`` and numbers without a coordinate do not follow from
    it and are absent.

    Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), Algorithm 1 and figures 4 to 6, 17 and
    18.

    Args:
        dim: d, the width of the embeddings.
        count_range: (lo, hi) restricts all values but those over token types to types that occur lo
            ≤ n ≤ hi times.
        regression_count_range: the range of the values over token types.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: a range does not have 1 ≤ lo ≤ hi.

    >>> metric = TokenMoments(1)
    >>> metric.update(
    ...     torch.tensor([[1.0], [3.0], [7.0], [9.0]]), token_ids=torch.tensor([5, 5, 2, 2])
    ... )
    >>> values = metric.compute()
    >>> values["V"].item(), values["V_W"].item(), values["V_B"].item(), values["token_types"].item()
    (10.0, 1.0, 9.0, 2.0)
    """

    _whole: TokenTable | None = None  # of all rows, where this is of those without a group

    terms = _TERMS
    keys_of_types = EmbeddingMoments.keys_of_types
    keys_without_massive = (
        *EmbeddingMoments.keys_without_massive,
        "V_on_M_slope",
        "V_on_M_r2",
    )

    def __init__(
        self,
        dim: int,
        count_range: tuple[int, int] | None = None,
        regression_count_range: tuple[int, int] = REGRESSION_COUNT_RANGE,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, count_range, regression_count_range, **kwargs)
        for name, bounds in (
            ("count_range", count_range),
            ("regression_count_range", regression_count_range),
        ):
            if bounds is not None and not 1 <= bounds[0] <= bounds[1]:
                raise ValueError(
                    f"{name} must be (lo, hi) with 1 <= lo <= hi occurrences; got {bounds!r}."
                )
        self.count_range = count_range
        self.regression_count_range = regression_count_range
        if self.count_range is None:
            self.declare(Moments.empty(dim))
            self.declare(RowGroup.empty(dim), "first_")
        self.declare(TokenTable.empty(dim), "type_")
        self.declare(Count.empty(), "sequence_")

    def working_bytes(self, num_types: int, device: torch.device) -> int:
        return table_working_bytes(self.dim, num_types, device)

    def update_states(self, rows: Rows) -> None:
        if self.count_range is not None and rows.ids.token_ids is None:
            raise ValueError("count_range needs token_ids in every update; got none.")
        x = rows.embeddings
        ids = rows.ids.token_ids
        table = type_table(rows)
        if self.count_range is None:
            had_ids = len(self.load(TokenTable).token_ids) > 0
            if len(x) and (
                had_ids if ids is None else not had_ids and self.num_rows > self.num_nonfinite
            ):
                raise ValueError(
                    "token_ids must come with every update or with none; got a mixture. Call "
                    "reset() between."
                )
            self.extend(row_moments(x))
            self.extend(first_positions(rows))
        if table is not None:
            self.extend(table)
            self.extend(Count.of(rows.num_sequences, rows))

    def table(self) -> dict[str, Tensor]:
        """``token_id``, ``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,), by ascending
        token id.

        They cover the rows that this process has seen or, within ``sync_context()``, those of all
        ranks.
        """
        types = _in_range(self._types(), self.count_range)
        return {"token_id": types.token_ids, **type_values(types)}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        n = rows.n
        types = rows.value("token_types")
        return {
            "V_W": rows.Q * (n - types) / n,
            "V_B": rows.Q * (types - 1) / n,
            "V_W_over_V": (n - types) / (n - 1),
            "V_over_Q": (n - 1) / n,
            "V_W_over_Q": (n - types) / n,
            "V_B_over_Q": (types - 1) / n,
            "V_W_local": rows.Q,
        }

    def compute(self) -> dict[str, Tensor]:
        table = self.load(TokenTable)
        every = self._types()
        types = _in_range(every, self.count_range)
        n_with_ids = types.n.sum()
        if self.count_range is None:
            moments = self.load(Moments)
            values = moment_values(moments)
            values["first_positions_share"] = first_share(self.load(RowGroup), moments)
            num_untyped = table.n[: table.num_untyped].sum()
            n_with_ids = n_with_ids + num_untyped
            of_types = variance_values(*types.pooled()) if bool(num_untyped > 0) else values
        else:
            values = variance_values(*types.pooled())
            of_types = values
        n = values["n"]
        values["n_nonfinite"] = self.num_nonfinite.to(n)
        if not has_token_values(n.amax(), n_with_ids):
            return values
        num_sequences = self.load(Count).number
        split = variance_split(types)
        within = within_variance(types, num_sequences)
        whole = every if self._whole is None else self._whole
        sequences = whole.sequences[torch.searchsorted(whole.token_ids, types.token_ids)]
        of_whole = _is_in_range(whole, self.regression_count_range)
        is_regressed = of_whole[torch.searchsorted(whole.token_ids, every.token_ids)]
        regressed = {key: each[..., is_regressed] for key, each in type_values(every).items()}
        num_in_range = _is_in_range(every, self.regression_count_range).sum()
        token_values = {
            "token_types": n.new_full((), len(types.n)),
            **split,
            "V_over_Q": ratio(values["V"], values["Q"]),
            "V_W_over_Q": ratio(split["V_W"], of_types["Q"]),
            "V_B_over_Q": ratio(split["V_B"], of_types["Q"]),
            **unbiased_split(of_types["n"], of_types["V"], within),
            **context_split(within, local_variance(types, sequences), num_sequences),
            **type_regressions(regressed),
            "token_types_regressed": num_in_range.to(n),
        }
        if bool((n_with_ids == n).all()):
            return values | token_values
        # only some of the ranks were given token ids
        return values | {key: torch.full_like(n, torch.nan) for key in token_values}

    def hold(self, whole: Self) -> None:
        """Take from all rows which types are regressed, and in how many sequences each is.

        Types that leave the range of counts with a group would double the errors over types; types
        that stand for others in fewer sequences would make those of V_W_local a fifth too large.
        """
        self._whole = whole._types()

    def _types(self) -> TokenTable:
        """All token types, with squared deviations that are not rounding."""
        return self.load(TokenTable).typed().without_rounding()

    def reset(self) -> None:
        super().reset()
        self._whole = None


def _is_in_range(types: TokenTable, count_range: tuple[int, int]) -> Tensor:
    """Marks of the token types that occur so often."""
    return (types.n >= count_range[0]) & (types.n <= count_range[1])


def _in_range(types: TokenTable, count_range: tuple[int, int] | None) -> TokenTable:
    return types if count_range is None else types.select(_is_in_range(types, count_range))
