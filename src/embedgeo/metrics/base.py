"""Base of the metrics: it takes rows in, and declares, casts, merges and synchronises states."""

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from embedgeo.functional.distributed import Group, State, reduce_states
from embedgeo.functional.jackknife import deviations, merge_all_but_one
from embedgeo.functional.moments import PooledState
from embedgeo.functional.precision import sent, state_device
from embedgeo.functional.rows import Rows, has_rows_without_type, rows_without_type, select_rows
from embedgeo.glossary import Term, register

if TYPE_CHECKING:
    from embedgeo.metrics.gaussian import Array, GaussianRows

Values = Mapping[str, Tensor]  # by key, as `compute` or `forward` of a metric returns them
ValuesAndErrors = tuple[dict[str, Tensor], dict[str, Tensor]]  # both by key
Table = dict[str, Tensor]  # columns of one length, by name
Tables = Mapping[str, Callable[[], Table]]  # by kind, made when called


@dataclass(eq=False)
class RowCounts(PooledState):
    """Number of rows that masks have kept, and of those of them that had a NaN or Inf."""

    num_rows: Tensor
    num_nonfinite: Tensor


S = TypeVar("S", bound=State)
M = TypeVar("M", bound="GeometryMetric")


def require_values(values: object) -> dict[str, Tensor]:
    """The values that ``compute`` of a metric has returned, integers as float64; TypeError if they
    are no numbers.
    """
    rule = (
        "compute() of a metric must return a dict of real tensors of shape () by name, such as "
        "{'x': torch.tensor(1.0)}"
    )
    if not isinstance(values, Mapping):
        raise TypeError(f"{rule}; got {type(values).__name__}.")
    for key, value in values.items():
        is_number = isinstance(value, Tensor) and not value.ndim and not value.is_complex()
        if not isinstance(key, str) or not is_number:
            raise TypeError(f"{rule}; got {value!r} for {key!r}.")
    return {
        key: value if value.is_floating_point() else value.double() for key, value in values.items()
    }


def _require_own_settings(digest: list[int], metric: "GeometryMetric", *_: object) -> None:
    """Reset a metric that has loaded the states of other arguments, and raise ValueError."""
    if metric.settings.tolist() != digest:
        metric.reset()
        raise ValueError(
            f"a {type(metric).__name__} loads the state of one with the same arguments alone; "
            "these are others. Make it as the one that was saved."
        )


class GeometryMetric(Metric):
    """Base of the metrics over rows of embeddings.

    A subclass declares its states with `declare`, updates them with the rows of a batch in
    `update_states`, and turns them into values in ``compute``. States merge themselves, over
    batches, metrics and ranks: see `embedgeo.functional.distributed.State`. They keep their dtype
    through every cast and follow the embeddings to their device.

    How rows are split over updates and ranks changes the values by a relative 1e-9 at most (about
    1e-7 for rows in float32 or less, where some products are computed in float32 before they are
    summed).

    To have Lightning log a value, make it an attribute of the module and log that: ``self.share =
    self.moments["V_W_over_V_unbiased"]`` in ``__init__``, then ``self.moments.update(…)`` and
    ``self.log("share", self.share, on_step=False, on_epoch=True)`` in a step.

    Args:
        dim: d, the last dimension of the embeddings.
        settings: the arguments of the subclass. A state holds their digest, so that a
            `torchmetrics.MetricCollection`, which lets metrics share their states once these are
            equal, keeps those apart that differ in them.
        kwargs: of `torchmetrics.Metric`. ``compute_with_cache`` is off by default: if a value were
            cached on one rank and not on another, ``compute`` would hang.

    Raises:
        ValueError: ``dim`` is not a positive integer, or a ``dist_sync_fn`` is given.
    """

    full_state_update = True  # so that `forward` updates with a batch after the rows before it
    is_differentiable = False
    higher_is_better = None

    terms: ClassVar[Mapping[str, Term]] = {}
    """Name, unit, meaning and place of each key that ``compute`` may return; defining the class
    makes them known.
    """

    keys_of_types: ClassVar[tuple[str, ...]] = ()
    """Headline keys that are absent where rows have no token ids."""

    keys_without_massive: ClassVar[tuple[str, ...]] = ()
    """Keys that are also recorded of the rows of a layer that are not massive."""

    has_copies: bool = True
    """True where standard errors need copies of the metric that see groups of its rows: see
    `compute_with_errors`.
    """

    has_samples: bool = False
    """True where `samples` has anything to save."""

    is_ordinary: bool = False
    """True of a copy that sees the rows of a layer which are not massive: of its values only those
    of `keys_without_massive` are read.
    """

    compromise: str = ""
    """A sentence on what is held in place of something larger, and its effect; empty where nothing
    is.
    """

    _warned_of_rows_without_type = False
    _lacks_rows = False  # no row of the batch that is taken in counts
    settings: Tensor
    num_rows: Tensor  # number of rows that masks have kept; on the CPU
    num_nonfinite: Tensor  # number of those of them that had a NaN or Inf; on the CPU

    def __init__(self, dim: int, *settings: object, **kwargs: Any) -> None:
        if type(dim) is not int or dim < 1:
            raise ValueError(
                f"dim must be a positive integer, the width of the embeddings; got {dim!r}."
            )
        if (gather := kwargs.get("dist_sync_fn")) is not None:
            raise ValueError(
                "dist_sync_fn must be left out, for states are reduced and not gathered; got "
                f"{gather!r}. Choose the ranks by process_group=."
            )
        super().__init__(**{"compute_with_cache": False, **kwargs})
        self.dim = dim
        self._place = torch.get_default_device()  # of the states
        # of the groups, by key, once `compute_with_errors` has run
        self.deviations: dict[str, Tensor] = {}
        self._is_synced_now = False  # in `sync_context`
        self.declared: dict[type[Any], Any] = {}  # the states of no rows
        self._names: dict[type[Any], dict[str, str]] = {}  # of states, by field
        # the states that are still those of no rows, while rows are taken in
        self._untouched = set[type[Any]]()
        self.declare(RowCounts(torch.tensor(0), torch.tensor(0)))
        # an address is another one in another process
        text = re.sub(r" at 0x\w+", "", repr((type(self).__qualname__, settings, kwargs)))
        digest = list(blake2b(text.encode(), digest_size=8).digest())
        self.add_state("settings", torch.tensor(digest, dtype=torch.uint8), dist_reduce_fx=None)
        # states have been loaded by then
        self.register_load_state_dict_pre_hook(partial(_require_own_settings, digest))  # type: ignore[no-untyped-call]  # it has no annotations

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_family = cls.family_term if "family_term" in cls.__dict__ else None
        register(cls.terms, own_family, is_own=cls.__module__.startswith("embedgeo."))

    @staticmethod
    def family_term(key: str) -> Term | None:
        """The term of a key that is not among ``terms`` but made from one; None of others."""

    @staticmethod
    def baseline(rows: "GaussianRows") -> "Mapping[str, Array]":
        """Expected values by key of Gaussian rows of the same number, width and size, where they
        depend on these.

        They are the dashed lines of the report. Constant ones are the ``gaussian`` of a term.
        """
        return {}

    def update(
        self,
        embeddings: Tensor | Rows,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
    ) -> None:
        """Update the states with the rows of a batch.

        Args:
            embeddings: shape (..., d), any device and floating dtype but float8, which is stored
                without its scale; or `Rows`, prepared with all the rest.
            token_ids: shape (...), integer, not negative; rows with -100, which labels have where
                nothing is to be predicted, are left out of all values by token type, with one
                warning.
            mask: shape (...), bool or 0/1; True = count this row. Rows with a NaN or Inf are left
                out and counted in ``n_nonfinite``.
            sequence_ids: shape (...), integer: which rows are of one text. Default: each index of
                the leading axis of a (batch, positions, d) input is a sequence, each row of an (n,
                d) input one of its own. A sequence must not span two updates, nor two ranks.

        Raises:
            TypeError: embeddings are not floating point, or in float8, or token or sequence ids are
                not integers.
            ValueError: a shape that does not match, a mask with other values than 0 and 1, or
                another negative id.
        """
        rows = select_rows(embeddings, token_ids, mask, sequence_ids, dim=self.dim)
        ids = None if token_ids is None else rows.ids.token_ids
        if ids is not None and has_rows_without_type(ids):
            if not self._warned_of_rows_without_type:
                warnings.warn(rows_without_type(type(self).__name__), stacklevel=2)
            self._warned_of_rows_without_type = True
        device = rows.embeddings.device
        if state_device(device) != self.device:
            self.to(device)
        if not int(self.num_rows):
            self._untouched.update(self.declared)
        self._lacks_rows = not len(rows.embeddings)
        try:
            self.update_states(rows)
        finally:
            self._untouched.clear()
            self._lacks_rows = False
        if self.deviations:
            self.deviations = {}
        self.num_rows = self.num_rows + (rows.num_kept - rows.num_left_out)
        if rows.num_nonfinite:
            self.num_nonfinite = self.num_nonfinite + rows.num_nonfinite

    @abstractmethod
    def update_states(self, rows: Rows) -> None:
        """Update the states with the rows of a batch that count, all of them finite.

        ``rows.embeddings``, ``rows.token_ids`` and ``rows.sequence_ids`` are on the device of the
        embeddings; ``rows.ids`` has the ids on the CPU: see `Rows`.
        """

    def layer_tables(self) -> Tables:
        """Tables of a layer by kind, made when called."""
        return {}

    def samples(self) -> Table:
        """Rows and their moments to save: any of ``rows`` with ``positions`` and ids, ``mean`` and
        ``eigenvalues``.
        """
        return {}

    def working_bytes(self, num_types: int, device: torch.device) -> int:
        """The most bytes that an update with rows of so many token types, or ``compute``, takes on
        a device beside the states and the rows.
        """
        return 0

    def declare(self, empty: State, prefix: str = "") -> None:
        """Add a torchmetrics state, named with ``prefix``, for each tensor of ``empty``, the state
        of no rows.
        """
        self.declared[type(empty)] = empty
        self._names[type(empty)] = {}
        for field, value in empty.tensors().items():
            self._names[type(empty)][field] = prefix + field
            self.add_state(prefix + field, value.clone(), dist_reduce_fx=_refuse_gathered)

    def load(self, kind: type[S], tensors: Mapping[str, Tensor] | None = None) -> S:
        """The state declared as a ``kind``, with its tensors taken from ``tensors`` if given."""
        held = vars(self) if tensors is None else tensors
        cpu = torch.device("cpu")
        own = self.device
        fields: dict[str, Tensor] = {}
        for field, name in self._names[kind].items():
            is_placed = held[name].is_floating_point() and not kind.on_host
            device = own if is_placed else cpu
            fields[field] = held[name] if held[name].device == device else sent(held[name], device)
        return replace(self.declared[kind], **fields)

    def store(self, state: State) -> None:
        """Replace the state that was declared as one of this type."""
        self._untouched.discard(type(state))
        for field, name in self._names[type(state)].items():
            value = getattr(state, field)
            is_placed = value.is_floating_point() and not state.on_host
            setattr(self, name, value if is_placed else value.cpu())

    def extend(self, state: Any) -> None:
        """Merge the state of the rows of a batch into that of the rows before; of a batch that has
        none it does nothing, whatever the state says.
        """
        if self._lacks_rows:  # the mean of no rows is NaN
            return
        kind = type(state)
        held = self.load(kind)
        # whatever the dtype and the device of a batch's sums, also where that has no float64
        batch = replace(
            held, **{name: each.to(getattr(held, name)) for name, each in state.tensors().items()}
        )
        self.store(batch if kind in self._untouched else held.merge(batch))

    def hold(self, whole: Self) -> None:
        """Hold on to a choice that the values without a group share with those of all rows, which
        ``whole`` has.
        """

    def compute_with_errors(self, groups: Sequence[Self]) -> ValuesAndErrors:
        """The values of ``compute``, and their standard errors by the delete-a-group jackknife.

        Args:
            groups: metrics of the same arguments that have each seen a part of the rows of this
                one, whole sequences.

        Returns:
            The values and their standard errors by key (see `embedgeo.functional.jackknife`). They
            are right for smooth functions of means; those of counts, shares of a largest coordinate
            and maxima are rough.
        """
        values = values_of(self)
        left_out = [values_of(each) for each in _without_each(self, groups)]
        self.deviations = {}
        if len(groups) < 2 or not values:
            return values, {key: torch.full_like(value, torch.nan) for key, value in values.items()}
        unknown = {key: value.double() * torch.nan for key, value in values.items()}
        estimates = torch.stack(
            [
                torch.stack([each.get(key, nan).double() for key, nan in unknown.items()])
                for each in left_out
            ]
        )
        sizes = torch.stack([group.num_rows - group.num_nonfinite for group in groups])
        of_groups = deviations(torch.stack([*values.values()]), estimates, sizes.to(self.device))
        self.deviations = dict(zip(values, of_groups.unbind(1), strict=True))
        errors = of_groups.square().sum(0).sqrt()
        return values, dict(zip(values, errors.unbind(), strict=True))

    def __getitem__(self, key: str) -> CompositionalMetric:  # type: ignore[override]
        value = partial(itemgetter(key))
        value.__name__ = key  # type: ignore[attr-defined]  # which its repr asks for
        return CompositionalMetric(value, self, None)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Merge the state of a metric of the same class and arguments that has seen other rows.

        Raises:
            ValueError: another class or ``dim``, or arguments that lead to other states.
        """
        states: Any = incoming_state
        if isinstance(incoming_state, Metric):
            states = incoming_state.metric_state
            width = getattr(incoming_state, "dim", None)
            if type(incoming_state) is not type(self) or width != self.dim:
                got = f"{type(incoming_state).__name__} with dim={width}"
                raise ValueError(
                    f"can only merge a {type(self).__name__} with dim={self.dim}; got a {got}."
                )
            own = _sizes(self)
            others = _sizes(incoming_state)
            if own != others:
                raise ValueError(
                    f"can only merge a metric with the same arguments; got {others} for {own}."
                )
        if not isinstance(states, Mapping):
            raise TypeError(f"can only merge a metric or its state; got {incoming_state!r}.")
        if states.keys() != self.metric_state.keys():
            different = sorted(states.keys() ^ self.metric_state.keys())
            raise ValueError(
                f"can only merge a metric with the same arguments; these states differ: "
                f"{different}."
            )
        of_both = [self.load(kind).merge(self.load(kind, states)) for kind in self.declared]
        see_no_rows(self)
        for state in of_both:
            self.store(state)

    # The way of `torchmetrics.Metric` to the rows of all ranks, which `compute` and `forward` take:
    # its own gathers whole states.
    @contextmanager
    def sync_context(
        self,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        should_unsync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> Generator[None]:
        """Context in which the states are those of the rows of all ranks; every rank must enter
        it.
        """
        with ExitStack() as stack:
            if should_sync and (distributed_available or self.distributed_available_fn)():
                if self._is_synced_now:
                    raise TorchMetricsUserError("The Metric has already been synced.")
                take_states_of_ranks([self], process_group or self.process_group, stack)
                stack.callback(setattr, self, "_is_synced_now", False)
                self._is_synced_now = True
            yield

    @property
    def device(self) -> torch.device:
        """Place of the states, but for those that stay on the CPU, and of what is computed."""
        return self._place

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Self:
        """Move the states as `torch.nn.Module.to` and the like do, which call this; no cast changes
        their dtype.
        """

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(state_device(fn(torch.empty(0, device=tensor.device)).device))

        torch.nn.Module._apply(self, move)  # torchmetrics' own casts  # noqa: SLF001
        self._place = move(torch.empty(0, device=self._place)).device
        # the states of no rows are moved by `load`, where they are not replaced before
        if not int(self.num_rows):
            return self
        on_host = {*exclude_state}.union(
            *(names.values() for kind, names in self._names.items() if kind.on_host)
        )
        states: dict[str, Any] = self.metric_state
        for name, state in states.items():
            if name not in on_host and state.is_floating_point():
                setattr(self, name, move(state))
        return self


def _refuse_gathered(states: Tensor) -> Tensor:
    """Refuse to reduce one state of all ranks without the others, as `torchmetrics` would past
    ``sync_context``.
    """
    raise RuntimeError(
        "the states of a metric must be reduced together, by its sync_context(); sync() of "
        f"torchmetrics {version('torchmetrics')} has gathered one of {len(states)} ranks by itself."
    )


def _sizes(metric: Any) -> list[int]:
    """How many rows its states hold or take together, where that is an argument."""
    return [state.size for state in metric.declared.values() if hasattr(state, "size")]


def values_of(metric: GeometryMetric) -> dict[str, Tensor]:
    """The values of ``compute`` on the states that the metric has, for which no other rank is
    waited.
    """
    return require_values(type(metric).compute(metric))


def state_bytes(metric: GeometryMetric, num_rows: int, num_types: int = 0) -> tuple[int, int]:
    """Bytes of the states of a metric, on its device and on the host, once they have seen so many
    rows, in float32 or less, of so many token types (0: without token ids).
    """
    on_device = metric.settings.nbytes
    on_host = 0
    for state in metric.declared.values():
        num_bytes = state.num_bytes(num_rows, num_types)
        on_host += num_bytes * state.on_host
        on_device += num_bytes * (not state.on_host)
    return on_device, on_host


def see_no_rows(metric: GeometryMetric) -> None:
    """Update with no rows: it counts as an update, and clears a cached value."""
    no_rows = torch.zeros(0, metric.dim, device=metric.device)
    metric.update(no_rows, no_rows[:, 0].long())


def _without_each(whole: M, groups: Sequence[M]) -> Iterator[M]:
    """Yield metrics of the rows of all groups but each in turn; none of fewer than two."""
    if len(groups) < 2:
        return
    without = copy(groups[0])
    without.hold(whole)
    states_without = [
        merge_all_but_one([group.load(kind) for group in groups]) for kind in whole.declared
    ]
    for states in zip(*states_without, strict=True):
        without = copy(without)
        for state in states:
            without.store(state)
        yield without


def take_states_of_ranks(metrics: Sequence[GeometryMetric], group: Group, stack: ExitStack) -> None:
    """Replace the states of metrics by those of the rows that each has seen on all ranks of a
    group, until ``stack`` is closed.

    Every rank must call this with the same metrics.
    """
    held = [
        each if each.on_host else each.map(partial(sent, device=metric.device))
        for metric in metrics
        for each in map(metric.load, metric.declared)
    ]
    device = metrics[0].device if metrics else None
    whole = iter(reduce_states(held, group, device))
    for metric in metrics:
        keep_states(metric, stack)
        for _ in metric.declared:
            metric.store(next(whole))


def keep_states(metric: Any, stack: ExitStack) -> None:
    """Put the states that a metric has now back once ``stack`` is closed."""
    for name, state in metric.metric_state.items():
        stack.callback(setattr, metric, name, state)


def metric_classes(base: type[GeometryMetric] = GeometryMetric) -> Iterator[type[GeometryMetric]]:
    """All classes of metrics that have been defined, those of this package first."""
    for each in base.__subclasses__():
        yield each
        yield from metric_classes(each)
