"""Reductions over the ranks of a process group, of single tensors and of whole states.

A state has a `Reduction`; `reduce_states` takes those of all layers through its rounds together, so
that they need few collectives however many these are.
"""

import json
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from traceback import clear_frames
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Tensors: TypeAlias = Mapping[str, Tensor]
# None: the world, or the ranks that are `together`
Group: TypeAlias = "dist.ProcessGroup | OwnGroup | None"

BUFFER_BYTES = 2**27
"""Bytes that are copied into the buffers of a few collectives."""

ROUNDS_OF_SUMS = "counts", "sums", "squares"
"""The rounds of a `Reduction` after that of maxima."""

_CURRENT_GROUP: ContextVar["OwnGroup | None"] = ContextVar("_CURRENT_GROUP", default=None)
_begun = Counter[str]()  # meetings by their name, on all ranks
_NOTHING = -1  # bytes, where there is no collective


class Ranks(NamedTuple):
    """This rank, and the number of ranks."""

    rank: int
    num_ranks: int

    @classmethod
    def of(cls, group: Group) -> Self:
        """Those of a process group; one rank where none has been initialized."""
        return cls(current_rank(group), num_ranks(group))

    def placed(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Zeros that have this rank's tensor at its place along the first axis.

        Their sum over the ranks is the concatenation of all ranks' tensors, of which ``lengths``
        are the lengths; default: the ranks' tensors of one shape, stacked.
        """
        if lengths is None:
            tensor, lengths = tensor[None], [1] * self.num_ranks
        every = tensor.new_zeros(sum(lengths), *tensor.shape[1:])
        first = sum(lengths[: self.rank])
        every[first : first + len(tensor)] = tensor
        return every


class Reduction(Protocol):
    """The way of a state to the rows of all ranks, in four rounds.

    A round gives tensors by name, of one shape and dtype on all ranks. The next one is given what
    the ranks have reduced, under the same names. So a mean of all ranks is known before the squares
    about it are summed.
    """

    def maxima(self) -> Tensors:
        """Tensors whose elementwise maximum is taken over the ranks."""

    def counts(self, maxima: Tensors) -> Tensors:
        """Tensors that are summed, as are those of the rounds that follow."""

    def sums(self, counts: Tensors) -> Tensors:
        """Those whose shapes follow from the counts."""

    def squares(self, sums: Tensors) -> Tensors:
        """Those about means of all ranks."""

    def result(self, squares: Tensors) -> Any:
        """The state of the rows of all ranks."""


@dataclass(eq=False)
class State(ABC):
    """State of the rows seen: a dataclass of tensors, and of settings, that merges itself.

    A metric holds tensors of integers on the CPU, and the others where the rows are, unless the
    state is ``on_host``.
    """

    on_host: ClassVar[bool] = False

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The state of the rows of ``self`` followed by those of ``other``, which have been counted
        from 0.
        """

    @abstractmethod
    def reduction(self, ranks: Ranks) -> Reduction:
        """The way to the state of the rows of all ranks, which have shared no sequence."""

    def num_bytes(self, num_rows: int, num_types: int) -> int:
        """Bytes of the state, given that of no rows, of so many rows, in float32 or less, and so
        many token types.
        """
        return sum(each.nbytes for each in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The state with all of its tensors changed."""
        return replace(self, **{name: change(each) for name, each in self.tensors().items()})


S = TypeVar("S", bound=State)


class OtherRankError(RuntimeError):
    """A failure of which all ranks have learned."""


class OwnGroup:
    """A process group of which nothing else has collectives, so that a rank that leaves one can
    disturb nothing else.

    While ranks are `together` they tell each other before each collective, by some integers over
    this group, that they have come to it; one that has failed, wherever it was, says so instead,
    and no rank waits for another. Where a collective itself raises, nobody knows which ranks have
    it behind them: the group ends, its connections are closed, and the collectives of the others
    raise, too.

    ``original`` is the group of which it is a copy, None for the world: for collectives of others.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.original: dist.ProcessGroup | None = None
        self._process_group: dist.ProcessGroup | None = process_group
        self._has_failed = False  # what ranks do together, and all of them know it
        self._why_ended = ""
        self._when = ""  # the ranks meet next

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # that of a metric which is copied

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; keep no reference to it, or `end` closes nothing."""
        if self._process_group is None:
            raise OtherRankError(f"ranks cannot exchange values any more{self._why_ended}")
        return self._process_group

    @contextmanager
    def together(self, when: str = "") -> Iterator[None]:
        """Context that all ranks enter, and that ends with an exception on all of them or on none.

        Within another one of this group, an exception is told to the others at once, and what ends
        is the outer one. ``when`` it begins is in what ranks raise where another one is not there,
        because it has failed before.
        """
        is_outer = _CURRENT_GROUP.get() is not self
        before = _CURRENT_GROUP.set(self)
        had_failed = self._has_failed
        if is_outer:
            self._has_failed = False
            self._when = when
        try:
            yield
            if is_outer:
                self.agree()
        except Exception:
            with suppress(Exception):
                self.agree(failed=True)
            raise
        finally:
            _CURRENT_GROUP.reset(before)
            if is_outer:
                self._has_failed = had_failed

    def agree(self, nbytes: int = _NOTHING, *, failed: bool = False) -> None:
        """Raise OtherRankError on all ranks if one has failed, or is about to exchange another
        number of bytes.
        """
        if self._has_failed:
            raise OtherRankError("it failed before, on this rank or another")

        def exchanged(group: dist.ProcessGroup) -> list[int]:
            state = torch.tensor([failed, nbytes, -nbytes], device="cpu")
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
            return state.tolist()

        failures, last, first = self.issue(exchanged)
        when = self._when
        self._when = ""
        self._has_failed = bool(failures) or last != -first
        if failures:
            raise OtherRankError(f"it failed on another rank {when}".strip())
        if self._has_failed:
            raise OtherRankError(
                f"ranks must exchange the same values; one exchanges {-first} bytes, another one "
                f"{last} (-1: none). Train one model in a launch, and give a metric the same "
                "states on every rank."
            )

    def issue(self, collective: Callable[..., T]) -> T:
        """Call a collective with the group, which ends if that raises, as do ranks `together`."""
        try:
            return collective(group=self.process_group)
        except BaseException as error:
            clear_frames(error.__traceback__)  # they refer to the group
            for group in {self, _CURRENT_GROUP.get() or self}:
                group.end(f", since a collective failed: {type(error).__name__}: {error}")
            raise

    def end(self, why: str = "") -> None:
        """Close the connections to the other ranks."""
        self._why_ended = self._why_ended or why
        group = self._process_group
        self._process_group = None
        self.original = None
        # the world has been destroyed, and the group with it
        with suppress(ValueError, AssertionError, KeyError):
            if group is not None:
                dist.destroy_process_group(group)


class Meetings:
    """Occasions to which all ranks come, over the store of the default group.

    No rank waits for another one that was not seen to come for longer than a time limit. So ranks
    meet before a collective. All ranks give their meetings one name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._run = ""  # in front of the keys
        self._missed: list[str] = []

    def begin(self, seconds: float, options: Mapping[str, object]) -> str | None:
        """Meet for the first time; the option that differs between ranks, else as `come`."""
        store = _store()
        attempt = 0
        while store.check([self._key(attempt)]):  # ranks have met there without this one
            attempt += 1
        self._run = self._key(attempt).removesuffix("/begin")
        own = json.dumps({name: str(value) for name, value in options.items()})
        first = json.loads(store.compare_set(f"{self._run}/options", "", own))
        names = [name for name, value in json.loads(own).items() if first.get(name) != value]
        answer = self.come("begin", seconds, "".join(names[:1]))
        if answer is not None:
            _begun[self._name] += 1
            with suppress(RuntimeError):  # another rank has deleted it
                store.delete_key(f"{self._run}/options")
        return answer

    def come(self, occasion: str, seconds: float, said: str = "") -> str | None:
        """What a rank has said, "" for nothing, once all have come to an occasion; None if one has
        not come in time.

        The answer is one for all ranks. Where a rank has left, nobody waits.
        """
        store = _store()
        key = f"{self._run}/{occasion}"
        if said:
            store.set(f"{key}/said", said)
        if store.add(f"{key}/come", 1) == num_ranks():
            store.compare_set(key, "", "all")
        elif not store.add(f"{self._run}/left", 0):
            limit = store.timeout / 4  # several may follow each other before training goes on
            with suppress(RuntimeError):  # nobody was the last one in time
                store.wait([key], min(timedelta(seconds=seconds), limit))
        if store.compare_set(key, "", "some") != b"all":
            self._missed.append(key)
            return None
        answer: str = store.get(f"{key}/said").decode() if store.check([f"{key}/said"]) else ""
        if store.add(f"{key}/read", 1) == num_ranks():
            _forget(store, key)
        return answer

    def leave(self) -> None:
        """Tell the others not to wait; the last rank deletes what is left of the meetings."""
        with suppress(Exception):  # the group is gone, or another rank's process
            store = _store()
            if self._run and store.add(f"{self._run}/left", 1) == num_ranks():
                for key in self._missed:
                    _forget(store, key)
                store.delete_key(f"{self._run}/left")

    def _key(self, attempt: int) -> str:
        return f"embedgeo/{self._name}/{_begun[self._name]}/{attempt}/begin"


def _store() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _forget(store: Any, key: str) -> None:
    for name in (key, f"{key}/said", f"{key}/come", f"{key}/read"):
        with suppress(RuntimeError):  # there is none
            store.delete_key(name)


def own_group(ranks: Sequence[Sequence[int]] | None = None) -> OwnGroup:
    """This rank's one of new groups of these ranks, None: the group of all; every rank must call
    this.
    """
    groups = [range(dist.get_world_size())] if ranks is None else ranks
    config = dist.get_backend_config()
    # what ranks tell each other is on the CPU
    backend = None if "cpu:" in config else f"cpu:gloo,{config}"
    members = [list(each) for each in groups]
    timeout = _store().timeout  # that of the default group
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend=backend)
    made = OwnGroup(group)
    made.agree()  # nobody ends it while another rank still connects
    return made


def own_copy(process_group: dist.ProcessGroup, ranks: OwnGroup) -> OwnGroup:
    """A new group of the ranks of this one, of which those in ``ranks`` each give theirs.

    ValueError on all of them if one is not in its own.
    """
    every = all_gather_object(dist.get_process_group_ranks(process_group), ranks)
    if without := [rank for rank, members in enumerate(every) if rank not in members]:
        raise ValueError(
            f"process_group must be, on each rank, a group that this rank is in; rank {without[0]} "
            "is not in the one that it has. Make one for every rank: dist.new_subgroups…()."
        )
    copied = own_group(sorted({tuple(each) for each in every}))
    copied.original = process_group
    return copied


def together(group: Group, when: str = "") -> AbstractContextManager[None]:
    """`OwnGroup.together`, if it is one."""
    return group.together(when) if isinstance(group, OwnGroup) else nullcontext()


def meet(nbytes: int = _NOTHING) -> None:
    """Wait for the ranks that are `together` with this one, before a collective of so many bytes,
    or before what is no collective of this module.
    """
    if (ranks := _CURRENT_GROUP.get()) is not None:
        ranks.agree(nbytes)


def reduce_states(
    states: Sequence[S], group: Group = None, device: torch.device | None = None
) -> list[S]:
    """The states of the rows of all ranks, given those of this rank's rows, which stay as they are.

    Every rank must call this, with states of the same kinds in the same order. The tensors of all
    states travel together: a round is one collective for each dtype, after the one by which ranks
    that are `together` tell each other that they have come to it, and as many again for each 128
    MiB. A tensor that is larger is reduced in place, without a copy. Collectives are of tensors
    on ``device``; others are sent there for that alone.
    """
    ranks = Ranks.of(group)
    ways = [state.reduction(ranks) for state in states]

    def reduced(of_ways: Sequence[Tensors], op: Any = dist.ReduceOp.SUM) -> list[Tensors]:
        given = [
            {name: _overwritable(tensor, state) for name, tensor in tensors.items()}
            for tensors, state in zip(of_ways, states, strict=True)
        ]
        every = [tensor for tensors in given for tensor in tensors.values()]
        _reduce(every, op, group, device)
        return [*given]

    exchanged = reduced([way.maxima() for way in ways], dist.ReduceOp.MAX)
    for phase in ROUNDS_OF_SUMS:
        exchanged = reduced(
            [getattr(way, phase)(each) for way, each in zip(ways, exchanged, strict=True)]
        )
    return [way.result(each) for way, each in zip(ways, exchanged, strict=True)]


def all_reduce_max(tensor: Tensor, group: Group = None) -> Tensor:
    """Elementwise maximum of the ranks' tensors of one shape, which have no NaN."""
    largest = tensor.detach().clone(memory_format=torch.contiguous_format)
    _reduce([largest], dist.ReduceOp.MAX, group)
    return largest


def all_gather(tensor: Tensor, group: Group = None) -> list[Tensor]:
    """The ranks' tensors, in the order of the ranks; they may differ in shape, but not in dtype and
    dimensions.
    """
    shapes = _all_gather(torch.tensor([tensor.numel(), *tensor.shape], device=tensor.device), group)
    sizes = [int(shape[0]) for shape in shapes]
    flat = tensor.detach().flatten()
    padded = _all_gather(torch.cat((flat, flat.new_zeros(max(sizes) - len(flat)))), group)
    return [
        part[:size].view(shape[1:].tolist())
        for part, size, shape in zip(padded, sizes, shapes, strict=True)
    ]


def all_gather_object(value: T, group: Group = None) -> list[T]:
    """The ranks' values, which are pickled, in the order of the ranks."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(each.numpy().tobytes()) for each in all_gather(pickled, group)]


def is_distributed() -> bool:
    """Tell if a process group has been initialized."""
    return dist.is_available() and dist.is_initialized()


def has_other_ranks() -> bool:
    """Tell if there are several processes."""
    return num_ranks() > 1


def current_rank(group: Group = None) -> int:
    """Rank of this process in a process group; 0 where none has been initialized."""
    return dist.get_rank(_process_group(group)) if is_distributed() else 0


def num_ranks(group: Group = None) -> int:
    """Number of ranks in a process group; 1 where none has been initialized."""
    return dist.get_world_size(_process_group(group)) if is_distributed() else 1


def _process_group(group: Group) -> dist.ProcessGroup | None:
    return group.process_group if isinstance(group, OwnGroup) else group


def _overwritable(tensor: Tensor, state: State) -> Tensor:
    """The tensor, or a copy where to overwrite it would change the state."""
    held = {each.untyped_storage().data_ptr() for each in state.tensors().values()}
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().data_ptr() not in held:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _reduce(
    tensors: Sequence[Tensor], op: Any, group: Group, device: torch.device | None = None
) -> None:
    """Replace contiguous tensors by their reductions over the ranks, on their or this device."""
    for some in _bundles([each for each in tensors if each.numel()]):
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in some:
            by_kind.setdefault((tensor.dtype, device or tensor.device), []).append(tensor.view(-1))
        buffers = [
            torch.cat([part.to(where) for part in parts]) if len(parts) > 1 else parts[0].to(where)
            for (_, where), parts in by_kind.items()
        ]
        meet(sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            _issue(partial(dist.all_reduce, buffer, op=op), group)
        for buffer, flat in zip(buffers, by_kind.values(), strict=True):
            if buffer is not flat[0]:
                for tensor, part in zip(flat, buffer.split([*map(len, flat)]), strict=True):
                    tensor.copy_(part)


def _bundles(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are reduced together, by their order and size alone, which are those of all
    ranks.
    """
    bundle = list[Tensor]()
    num_bytes = 0
    for tensor in tensors:
        if bundle and num_bytes + tensor.nbytes > BUFFER_BYTES:
            yield bundle
            bundle = []
            num_bytes = 0
        bundle.append(tensor)
        num_bytes += tensor.nbytes
    if bundle:
        yield bundle


def _all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(num_ranks(group or _CURRENT_GROUP.get()))]
    meet(tensor.nbytes)
    _issue(partial(dist.all_gather, gathered, tensor), group)
    return gathered


def _issue(collective: Callable[..., object], group: Group) -> None:
    """Call a collective, for which everything else is prepared and to which the ranks have come."""
    group = group or _CURRENT_GROUP.get()
    if isinstance(group, OwnGroup):
        group.issue(collective)
    else:
        collective(group=group)
