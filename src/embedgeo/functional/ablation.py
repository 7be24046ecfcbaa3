"""Hidden states without their offset, main directions, largest coordinates, context or token, and
noise like them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype, matmul_precision
from embedgeo.functional.processing import require_removed
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.functional.tokens import TokenTable, token_table

NUM_REMOVED = (1, 3, 10)
"""Numbers of directions, or coordinates, that are taken away, unless told otherwise."""


def replacements(num_removed: Sequence[int] = NUM_REMOVED) -> tuple[str, ...]:
    """Names of the replacements of a hidden state, by others than itself.

    Raises:
        ValueError: ``num_removed``, of directions and of coordinates, are not distinct numbers of
            at least 1.
    """
    require_removed(num_removed, "removed_directions")
    return (
        "without_offset",
        *(f"without_{k}_directions" for k in num_removed),
        *(f"without_{k}_coordinates" for k in num_removed),
        "without_context",
        "without_token",
        "as_noise",
    )


class RowStatistics(NamedTuple):
    """Statistics that rows are replaced by: their scatter, and the mean of each token type."""

    scatter: Scatter
    types: TokenTable

    @classmethod
    def of(cls, rows: Tensor, token_ids: Tensor) -> "RowStatistics":
        """The statistics of rows, shape (n, d), of these token types, shape (n,), without those
        with a NaN or Inf.
        """
        finite = rows.isfinite().all(1)
        rows, token_ids = rows[finite].to(accumulator_dtype(rows.device)), token_ids[finite]
        if len(rows):
            return cls(row_scatter(rows), token_table(rows, token_ids))
        ids, *fields = TokenTable.empty(rows.shape[1])
        return cls(row_scatter(rows), TokenTable(ids, *(field.to(rows) for field in fields)))

    def merge(self, other: "RowStatistics") -> "RowStatistics":
        """The statistics of the rows of both."""
        return RowStatistics(self.scatter.merge(other.scatter), self.types.merge(other.types))


class Substitutes(NamedTuple):
    """Mean, axes and token means by which rows are replaced.

    Attributes:
        mean: μ, shape (d,).
        directions: eigenvectors of the covariance Σ as columns, that of the largest eigenvalue
            first, shape (d, d); zeros where the rows, which may be fewer than d, have no variance.
        deviations: square roots of its eigenvalues, in this order, shape (d,).
        coordinates: the coordinates, that of the largest variance first, shape (d,).
        token_ids: the token types that have a mean, ascending, shape (T,).
        token_means: their mean rows, shape (T, d).
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    coordinates: Tensor
    token_ids: Tensor
    token_means: Tensor

    @classmethod
    def of(cls, statistics: RowStatistics) -> "Substitutes":
        """The substitutes for rows, from the statistics of others."""
        n, mean, scatter = statistics.scatter
        values, vectors = torch.linalg.eigh(scatter / n.clamp(min=1))
        coordinates = scatter.diagonal().argsort(descending=True, stable=True)
        types = statistics.types.typed()
        values, vectors = values.flip(0), vectors.flip(1)
        vectors = vectors * (values > len(values) * torch.finfo(values.dtype).eps * values[0])
        return cls(
            mean, vectors, values.clamp(min=0).sqrt(), coordinates, types.token_ids, types.mean
        )

    def has_mean(self, token_ids: Tensor) -> Tensor:
        """Marks of the token ids, shape (n,), that have a mean."""
        return torch.isin(token_ids, self.token_ids)

    def replaced(self, name: str, rows: Tensor, token_ids: Tensor, normal: Tensor) -> Tensor:
        """Rows in place of those given, of the same dtype; rows of token types without a mean keep
        what needs one.

        Args:
            name: one of `replacements`; any other one leaves the rows as they are.
            rows: shape (n, d).
            token_ids: shape (n,).
            normal: standard normal numbers, shape (n, d), of which noise is made.
        """
        x = rows.to(self.mean.dtype)
        with matmul_precision(rows.device):
            if name == "without_offset":
                x = x - self.mean
            elif name in ("without_context", "without_token"):
                seen = self.has_mean(token_ids)
                means = self.token_means[torch.searchsorted(self.token_ids, token_ids[seen])]
                x = x.index_put((seen,), means if name == "without_context" else x[seen] - means)
            elif name.endswith("_directions"):
                axes = self.directions[:, : int(name.split("_")[1])]
                x = x - (x - self.mean) @ axes @ axes.T
            elif name.endswith("_coordinates"):
                largest = self.coordinates[: int(name.split("_")[1])]
                x = x.index_copy(1, largest, self.mean[largest].expand(len(x), -1))
            elif name == "as_noise":
                x = normal.to(x) @ self.directions  # whose signs must not matter
                x = self.mean + (x * self.deviations) @ self.directions.T
        return x.to(rows.dtype)


def paired_change(
    before: Tensor, after: Tensor, counts: Tensor, half: Tensor
) -> tuple[Tensor, Tensor]:
    """Change of a mean over tokens, the average of that in each half of the sequences, and its
    standard error.

    The error is that of a ratio of sums over sequences, which are taken to be independent; NaN
    where a half has fewer than two sequences with tokens.

    Args:
        before: sum over the tokens of each sequence, shape (S,), float64.
        after: the same, changed.
        counts: number of tokens of each sequence, shape (S,).
        half: marks of the sequences of the second half, shape (S,), bool.

    >>> paired_change(
    ...     torch.zeros(4),
    ...     torch.tensor([2.0, 4.0, 4.0, 6.0]),
    ...     torch.full((4,), 2.0),
    ...     torch.arange(4) > 1,
    ... )
    (tensor(2.), tensor(0.3536))
    """
    changes, squares = [], []
    for own in (~half & (counts > 0), half & (counts > 0)):
        n = counts[own]
        change = (after[own] - before[own]).sum() / n.sum()
        rest = after[own] - before[own] - change * n
        changes.append(change)
        squares.append(
            rest.square().sum() * len(n) / (len(n) - 1) / n.sum().square()
            if len(n) > 1
            else n.sum() / 0
        )
    error = torch.stack(squares).sum().sqrt() / 2
    return torch.stack(changes).mean(), torch.where(error.isinf(), torch.nan, error)
