"""A few occurrences of chosen token types."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.processing import row_plane
from embedgeo.functional.rows import RowIds, Rows
from embedgeo.functional.sampling import Sample
from embedgeo.metrics.base import GeometryMetric, Tables


class TokenOccurrences(GeometryMetric):
    """Occurrences of chosen token types, a uniform sample of each, in the plane of their own
    principal axes.

    ``compute()`` returns no values; see `plane`. Memory is that of ``most`` rows for each of the
    types.

    Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), figure 1.

    Args:
        dim: d, the width of the embeddings.
        token_types: the types, by their ids.
        most: how many occurrences of each are kept, drawn without replacement from all updates and
            ranks.
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones,
            unless the one that is merged into the other has seen no more rows than it draws.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``most`` is not positive.

    >>> metric = TokenOccurrences(2, [5])
    >>> metric.update(
    ...     torch.tensor([[1.0, 5.0], [5.0, 5.0], [9.0, 9.0]]), token_ids=torch.tensor([5, 5, 2])
    ... )
    >>> metric.plane()["pc1"].tolist()
    [1.0, 5.0]
    """

    has_copies = False

    def __init__(
        self, dim: int, token_types: Sequence[int], most: int = 50, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(dim, tuple(token_types), most, seed, **kwargs)
        if most < 1:
            raise ValueError(f"most must be at least 1 occurrence of each token type; got {most}.")
        self.token_types = tuple(token_types)
        self.most = most
        self.seed = seed
        self.declare(Sample.empty(dim, most, by_label=True, seed=seed))

    def update_states(self, rows: Rows) -> None:
        places, labels = rows.ids.once(
            ("occurrences", self.token_types), lambda: self._chosen(rows.ids)
        )
        self.draw(rows, labels, places)

    def _chosen(self, ids: RowIds) -> tuple[Tensor, Tensor]:
        """Places of the rows of the token types, and these, on the CPU."""
        types = torch.tensor(self.token_types, dtype=torch.int64, device="cpu")
        of_rows = types[:0] if ids.token_ids is None else ids.token_ids
        places = torch.isin(of_rows, types).nonzero().flatten()
        return places, of_rows[places]

    def state_bytes(self, num_rows: int, num_types: int = 0) -> int:
        drawn = min(num_rows, self.most * len(self.token_types))
        return super().state_bytes(0) + drawn * (4 * self.dim + 24)

    def plane(self) -> dict[str, Tensor]:
        """``token_id``, ``pc1`` and ``pc2`` of each occurrence, shape (m,), by ascending token id
        and row.

        ``pc1`` and ``pc2`` are its coordinates in the plane in which these rows vary most, where
        (0, 0) is the zero vector: see `embedgeo.functional.row_plane`. They are drawn from the rows
        that this process has seen or, within ``sync_context()``, from those of all ranks.
        """
        sample = self.load(Sample)
        sample = sample.select(sample.positions.argsort())
        sample = sample.select(sample.labels.argsort(stable=True))
        points = row_plane(sample.rows)
        return {"token_id": sample.labels, "pc1": points[:, 0], "pc2": points[:, 1]}

    def token_tables(self) -> Tables:
        return {"occurrences": self.plane}

    def compute(self) -> dict[str, Tensor]:
        return {}
