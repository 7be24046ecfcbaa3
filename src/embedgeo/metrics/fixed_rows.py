"""The rows of a layer that are compared with those of other measurements and of other layers."""

from typing import Any

from torch import Tensor

from embedgeo.functional.distributed import current_rank, is_distributed
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample
from embedgeo.metrics.base import GeometryMetric


class FixedRows(GeometryMetric):
    """A uniform sample of the rows with their token ids: the same ones whenever as many rows are seen.

    ``compute()`` returns nothing. Ranks share their rows once, in `taken`, and not when a metric is synchronised.

    Args:
        dim: d, the width of the rows.
        size: how many are drawn at most.
        kwargs: of `torchmetrics.Metric`.
    """

    has_copies = False

    def __init__(self, dim: int, size: int, **kwargs: Any) -> None:
        super().__init__(dim, size, **kwargs)
        self.declare(Sample.empty(dim, size))

    def update_states(self, rows: Rows) -> None:
        given = rows.embeddings, rows.token_ids, rows.finite
        self.store(self.load(Sample).extend(*given, seed=0, stream=current_rank(self.process_group)))

    def taken(self) -> Sample:
        """The rows drawn from those of all ranks, labelled with their token ids; every rank must call this."""
        sample = self.load(Sample)
        return sample.all_reduce(self.process_group) if is_distributed() else sample

    def compute(self) -> dict[str, Tensor]:
        return {}

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        pass
