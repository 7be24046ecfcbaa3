"""What the metrics share: how rows come in, how states are kept, cast, merged and synchronised."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import Rows, select_rows

Part = TypeVar("Part", bound=NamedTuple)


class GeometryMetric(Metric):
    """Base of the metrics over rows of embeddings.

    A subclass declares its states with `declare`, extends them by the rows of a batch in `observe`, and says in
    `merge` and `all_reduce` how two sets of them, and those of all ranks, become one. States keep their dtype
    through every cast and follow the embeddings to their device.

    How rows are split over updates and ranks makes no difference beyond a relative 1e-9 (float32 and shorter rows, some
    of whose differences and products are taken in float32 before they are summed: some 1e-7).

    torchmetrics synchronises by gathering every rank's whole state; this overrides its ``_sync_dist`` (private,
    hence the upper bound on its version) to all-reduce instead.

    Args:
        dim: d, the last dimension of the embeddings.
        kwargs: of `torchmetrics.Metric`. ``compute_with_cache`` is off unless asked for: a value cached on one
            rank and not on another makes ``compute`` hang.

    Raises:
        ValueError: ``dim`` is not a positive integer.
    """

    full_state_update = True  # `forward` must not draw or batch rows as if its batch were the first
    is_differentiable = False
    higher_is_better = None

    num_nonfinite: Tensor

    def __init__(self, dim: int, **kwargs: Any) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a positive integer, the width of the embeddings; got {dim!r}.")
        super().__init__(**{"compute_with_cache": False, **kwargs})
        self.dim = dim
        self.add_state("num_nonfinite", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, embeddings: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Count the rows of a batch.

        Args:
            embeddings: shape (..., d), any floating dtype and device.
            token_ids: shape (...), integer.
            mask: shape (...), bool or 0/1; True = count this row. Rows with a NaN or Inf are left out
                and counted in ``n_nonfinite``.

        Raises:
            TypeError: embeddings are not floating point, or token ids not integers.
            ValueError: a shape that does not match, or a mask with other values than 0 and 1.
        """
        rows = select_rows(embeddings, token_ids, mask, dim=self.dim)
        if state_device(rows.embeddings.device) != self.device:
            self.to(rows.embeddings.device)
        self.observe(rows)
        self.num_nonfinite = self.num_nonfinite + rows.num_nonfinite

    @abstractmethod
    def observe(self, rows: Rows) -> None:
        """Extend the states by rows that are finite and count."""

    @abstractmethod
    def merge(self, before: Mapping[str, Tensor]) -> None:
        """Merge into the states held those of the rows seen before, by name."""

    @abstractmethod
    def all_reduce(self, ranks: Ranks) -> None:
        """Replace the states by those of the rows of all ranks."""

    def declare(self, part: NamedTuple, prefix: str = "") -> None:
        """Add a state for each field of ``part``, which holds their values for no rows."""
        for field, value in part._asdict().items():
            self.add_state(prefix + field, value.clone(), dist_reduce_fx=None)

    def load(self, kind: type[Part], prefix: str = "", states: Mapping[str, Tensor] | None = None) -> Part:
        """The states that were declared as a ``kind``; taken from ``states`` instead of here, if given."""
        held = self.__dict__ if states is None else states
        return kind._make(held[prefix + field] for field in kind._fields)

    def store(self, part: NamedTuple, prefix: str = "") -> None:
        """Replace the states that were declared as such a part."""
        for field, value in part._asdict().items():
            setattr(self, prefix + field, value)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Merge the state of a metric of the same class and arguments that has seen other rows.

        Raises:
            ValueError: another class or ``dim``, or arguments that make it keep other states.
        """
        if isinstance(incoming_state, Metric):
            width = getattr(incoming_state, "dim", None)
            if type(incoming_state) is not type(self) or width != self.dim:
                got = f"{type(incoming_state).__name__} with dim={width}"
                raise ValueError(f"can only merge a {type(self).__name__} with dim={self.dim}; got a {got}.")
        states: dict[str, Any] = incoming_state.metric_state if isinstance(incoming_state, Metric) else incoming_state
        if states.keys() != self._defaults.keys():
            different = sorted(states.keys() ^ self._defaults.keys())
            raise ValueError(f"can only merge a metric with the same arguments; these states differ: {different}.")
        states = {name: state.to(self.device) for name, state in states.items()}
        self.merge(states)
        self.num_nonfinite = self.num_nonfinite + states["num_nonfinite"]
        self._computed = None
        self._update_count += 1

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        ranks = Ranks(process_group or self.process_group)
        self.all_reduce(ranks)
        self.num_nonfinite = ranks.total(self.num_nonfinite)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(state_device(fn(torch.empty(0, device=tensor.device)).device))

        return super()._apply(move, exclude_state)
