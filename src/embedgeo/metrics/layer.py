"""The metrics of one layer and, for standard errors, copies of them that see groups of its
sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.distributed import (
    Group,
    OwnGroup,
    Ranks,
    all_gather,
    is_distributed,
)
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import FEWEST_ROWS, MASSIVE, RowIds, Rows
from embedgeo.functional.sampling import Sample
from embedgeo.metrics.base import (
    GeometryMetric,
    keep_states,
    see_no_rows,
    take_states_of_ranks,
)
from embedgeo.metrics.massive import MassiveRows
from embedgeo.random_states import kept_random_states

# makes the metrics of one layer, given the layer's width
MetricFactory = Callable[[int], list[Metric]]


class _Copies:
    """The metrics of a layer that see some of its rows, and their copies for each group of the
    jackknife; ``make`` makes a group's metrics.
    """

    def __init__(self, metrics: list[Any], make: Callable[[], list[Any]]) -> None:
        self.metrics = metrics
        self.by_group: dict[int, list[Any]] = {}  # of the metrics that have copies
        self._make = make

    def of_group(self, group: int) -> list[Any]:
        """The copies for a group, made when first asked for."""
        if group not in self.by_group:
            self.by_group[group] = [each for each in self._make() if _has_copies(each)]
        return self.by_group[group]

    def with_groups(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield each metric with the copies that have seen the groups, none where it has none."""
        of_each = zip(*(self.by_group[group] for group in sorted(self.by_group)), strict=True)
        for metric in self.metrics:
            yield metric, list(next(of_each, ())) if _has_copies(metric) else []

    @property
    def all(self) -> list[Any]:
        """All metrics, then their copies, in the same order on every rank."""
        copies = (copy for _, copies in self.with_groups() for copy in copies)
        return [*self.metrics, *copies]


def _has_copies(metric: Metric) -> bool:
    return isinstance(metric, GeometryMetric) and metric.has_copies


class LayerMetrics:
    """The metrics of one layer, whose values are computed over the rows of all ranks.

    The ranks of ``process_group``, None for all, have different rows. For standard errors the
    sequences are dealt into G groups, ``jackknife``: sequence i of the S in batch b is in group b S
    + i modulo G, where the batches of R ranks are counted as one process would see them, those of
    rank r as r, r + R, r + 2 R …. A group has copies of the metrics from when it has a sequence; of
    more groups than sequences the empty ones have none.

    Rows whose norm is over ``times`` the median of their batch are massive. From the first of them
    on there is a second copy of the metrics, made from the states as they are, which sees the
    ordinary rows alone; nothing is ever subtracted. With ``skip_massive`` there is that one alone.

    ``metrics`` are some that `reset` has returned, which are made like new in a tenth of the time
    that ``make`` takes.
    """

    def __init__(
        self,
        make: MetricFactory,
        dim: int,
        *,
        device: torch.device,
        process_group: Group = None,
        jackknife: int = 0,
        times: float = MASSIVE,
        skip_massive: bool = False,
        metrics: list[Metric] | None = None,
    ) -> None:
        self.dim = dim
        self.dtype: torch.dtype | None = None  # of the hidden states
        self.num_rows = 0  # of this rank, that are not masked
        self.num_groups = jackknife
        self.skip_massive = skip_massive
        self.num_sequences = 0  # dealt into groups, those without rows that count among them
        self.has_few_rows = False  # a batch had too few of them to tell which are massive
        self.is_synced = False  # the states are those of the rows of all ranks
        self.process_group = process_group
        self.massive: MassiveRows | None = None
        self._times = times
        self._num_batches = 0
        self._make = make
        held = made_metrics(make, dim) if metrics is None else metrics
        self.whole = _Copies(self._prepared(held, device), self._made)
        self.ordinary = _Copies([], list)  # until there is a massive row
        # metrics that sample rows, with their states of all ranks
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def update(self, hidden: Tensor, ids: RowIds) -> None:
        """Update the metrics with a batch, whose sequences count from 0, and the copies with those
        of their groups.
        """
        for metric in self.with_copies:
            if metric.device != state_device(hidden.device):
                # copies that see no rows, too: they are merged with the others
                metric.to(hidden.device)
        num_rows = hidden.shape[:-1].numel()
        if self.num_groups:
            rank, num_ranks = Ranks.of(self.process_group)
            batch = self._num_batches * num_ranks + rank
            num_sequences = num_rows if ids.sequence_ids is None else ids.next_sequence_id
            ids = ids.dealt(batch * num_sequences, num_rows, self.num_groups)
            self._num_batches += 1
            self.num_sequences += num_sequences
        rows = Rows.of(hidden, ids, self._times)
        self.num_rows += rows.num_kept
        self.has_few_rows |= 0 < len(rows.embeddings) < FEWEST_ROWS
        if num_rows:
            self.dtype = torch.promote_types(self.dtype or hidden.dtype, hidden.dtype)
        if rows.massive is not None:
            self.split_off()
            assert self.massive is not None
            self.massive.take(rows, rows.massive)
        self._update(None, hidden, ids, rows)
        for group, part in ids.by_group():
            self._update(group, hidden, part, Rows.of(hidden, part, self._times, rows.largest))

    def _update(self, group: int | None, hidden: Tensor, ids: RowIds, rows: Rows) -> None:
        """Update the metrics, or the copies of a group, with its rows of a batch."""
        ordinary = rows if rows.massive is None else rows.select(~rows.massive)
        counted = ordinary if self.skip_massive else rows
        for copies, some in ((self.whole, counted), (self.ordinary, ordinary)):
            for metric in copies.metrics if group is None else copies.of_group(group):
                with named(metric):
                    update_metric(metric, hidden, ids if some is rows else some.ids, some)

    def split_off(self) -> None:
        """Hold the ordinary rows apart from now on, where that is not done yet: until now all rows
        were ordinary.
        """
        if self.massive is not None:
            return
        (self.massive,) = self._prepared([MassiveRows(self.dim)], self.device)
        see_no_rows(self.massive)
        if self.skip_massive:
            return
        self.ordinary = _Copies(
            _ordinary_copies(self.whole.metrics), lambda: _ordinary_copies(self._made())
        )
        for group, copies in self.whole.by_group.items():
            self.ordinary.by_group[group] = _ordinary_copies(copies)

    def complete(self, groups: Sequence[int], num_sequences: int) -> None:
        """Give copies to the groups that have a sequence on any rank; to all groups where there
        are no more of them than sequences on all ranks.
        """
        has_all = self.num_groups <= num_sequences
        for group in range(self.num_groups) if has_all else sorted(groups):
            self.whole.of_group(group)
            self.ordinary.of_group(group)

    def wanted(self, is_wanted: Callable[[GeometryMetric], object]) -> list[Any]:
        """The metrics of this package's kind that are wanted."""
        return [
            metric
            for metric in (*self.whole.metrics, self.massive)
            if isinstance(metric, GeometryMetric) and is_wanted(metric)
        ]

    def synced(self, is_wanted: Callable[[GeometryMetric], object]) -> Iterator[Any]:
        """Yield the metrics of this package's kind that are wanted, each with the rows of all
        ranks.
        """
        for metric in self.wanted(is_wanted):
            with nullcontext() if self.is_synced else _in_sync([metric], self.process_group):
                yield metric

    def keep_samples(self) -> None:
        """Keep the states of the metrics that sample rows, which are those of all ranks now, until
        `reset`.
        """
        sampling = self.wanted(lambda metric: metric.has_samples and Sample in metric.declared)
        self._kept = [(metric, {**metric.metric_state}) for metric in sampling]

    def kept_samples(self) -> Iterator[Any]:
        """Yield the metrics of `keep_samples` with these states; no other rank is waited for."""
        for metric, states in self._kept:
            with ExitStack() as stack:
                keep_states(metric, stack)
                vars(metric).update(states)
                yield metric

    @property
    def with_copies(self) -> list[Any]:
        """All metrics, then their copies, in the same order on every rank."""
        every = [*self.whole.all, *self.ordinary.all]
        return every if self.massive is None else [*every, self.massive]

    @property
    def num_bytes(self) -> int:
        """Memory of the states that are tensors."""
        states = [state for metric in self.with_copies for state in metric.metric_state.values()]
        return sum(state.nbytes for state in states if isinstance(state, Tensor))

    @property
    def device(self) -> torch.device:
        return next((metric.device for metric in self.whole.metrics), torch.device("cpu"))

    def reset(self) -> list[Metric]:
        """Free the memory of the states, for metrics are in reference cycles: the garbage collector
        would be late.

        Returns:
            The metrics without rows, for another `LayerMetrics` of the same width; none where one
            is the user's, which may hold more than its states.
        """
        # states made under it could not be added to outside of it
        with torch.inference_mode(False):
            for metric in self.with_copies:
                with named(metric):
                    metric.reset()
                metric.process_group = None  # one that a metric holds stays open
        self.is_synced = False
        self._kept = []
        metrics = self.whole.metrics
        return metrics if all(map(_is_own, metrics)) else []

    def _made(self) -> list[Any]:
        return self._prepared(made_metrics(self._make, self.dim), self.device)

    def _prepared(self, metrics: list[Any], device: torch.device) -> list[Any]:
        for metric in metrics:
            if metric.device != device:
                metric.to(device)
            metric.process_group = self.process_group
            if isinstance(self.process_group, OwnGroup) and not isinstance(metric, GeometryMetric):
                metric.process_group = self.process_group.original
        return metrics


def _ordinary_copies(metrics: Sequence[Any]) -> list[Any]:
    """Copies, with the same states, of the metrics that have numbers of the ordinary rows alone."""
    copies = [
        copy(metric)
        for metric in metrics
        if isinstance(metric, GeometryMetric) and metric.keys_without_massive
    ]
    for each in copies:
        each.is_ordinary = True
    return copies


def in_sync(layers: Sequence[LayerMetrics]) -> ExitStack:
    """Give the metrics of layers what their values need of the rows of all ranks, until what is
    returned is closed.

    Every rank must call this.
    """
    if not layers:
        return ExitStack()
    metrics = [metric for layer in layers for metric in layer.with_copies]
    stack = _in_sync(metrics, layers[0].process_group)
    for layer in layers:
        layer.is_synced = True
        stack.callback(setattr, layer, "is_synced", False)
    return stack


def _in_sync(metrics: Sequence[Any], group: Group) -> ExitStack:
    """Give metrics the states of the rows of all ranks; unlike `sync_context`, what it returns ends
    it after errors.
    """
    with ExitStack() as stack:
        if is_distributed():
            own = [metric for metric in metrics if isinstance(metric, GeometryMetric)]
            take_states_of_ranks(own, group, stack)
            for metric in metrics:
                if not isinstance(metric, GeometryMetric):
                    keep_states(metric, stack)
                    with metric.sync_context(all_gather, group):
                        gathered = metric.metric_state
                    vars(metric).update(gathered)
        return stack.pop_all()


def made_metrics(make: MetricFactory, dim: int) -> list[Metric]:
    """The metrics that ``make`` makes for a width; TypeError if they are no list of metrics."""
    with kept_random_states():
        made: object = make(dim)
    if not isinstance(made, list | tuple) or not all(isinstance(each, Metric) for each in made):
        raise TypeError(
            f"metrics must make a list of torchmetrics metrics for any width; for {dim} it makes "
            f"{made!r}."
        )
    return [*made]


def compute_alone(metric: Metric) -> object:
    """The result of ``compute`` of a metric on the states that it has, for which no other rank is
    waited.
    """
    is_available = metric.distributed_available_fn
    metric.distributed_available_fn = lambda: False
    try:
        return metric.compute()
    finally:
        metric.distributed_available_fn = is_available


def require_num_groups(jackknife: int) -> None:
    """Check ``jackknife``: 0, or 2 or more."""
    if type(jackknife) is not int or jackknife < 0 or jackknife == 1:
        raise ValueError(
            f"jackknife must be a number of groups, 2 or more (16, say), or 0 for none; got "
            f"{jackknife!r}."
        )


@contextmanager
def named(metric: Metric) -> Iterator[None]:
    """Context for calls of a metric: what they raise gets a note that names it, and what a user's
    draws changes no random state.
    """
    try:
        with nullcontext() if _is_own(metric) else kept_random_states():
            yield
    except Exception as error:
        error.add_note(f"in {type(metric).__name__}")
        raise


def _is_own(metric: Metric) -> bool:
    return type(metric).__module__.startswith("embedgeo.")


def update_metric(metric: Metric, hidden: Tensor, ids: RowIds, rows: Rows) -> None:
    """Update a metric with a batch, as its ``update`` takes it; a user's may write into copies."""
    if type(metric).update is GeometryMetric.update:
        metric.update(rows if _is_own(metric) else deepcopy(rows))
        return
    # a metric of the user's takes tensors, and may take fewer of them
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if (kept := ids.on(hidden.device, "kept")) is not None:
        hidden = hidden.index_select(0, kept)
    taken = signature(metric.update).parameters
    known = {
        "token_ids": ids.on(hidden.device, "token_ids"),
        "sequence_ids": ids.on(hidden.device, "sequence_ids"),
    }
    arguments = {
        name: each.flatten()
        for name, each in known.items()
        if each is not None
        and (name in taken or Parameter.VAR_KEYWORD in [one.kind for one in taken.values()])
    }
    metric.update(hidden.clone(), **deepcopy(arguments))
