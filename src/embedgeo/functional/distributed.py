"""Collectives over the ranks of a process group; arguments are left as they are."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from traceback import clear_frames
from typing import Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Group: TypeAlias = "dist.ProcessGroup | OwnGroup | None"  # None: the world, or the ranks that are `together`

_TOGETHER: ContextVar["OwnGroup | None"] = ContextVar("_TOGETHER", default=None)
_NOTHING = -1  # bytes, where there is no collective


class OtherRankError(RuntimeError):
    """A failure of which all ranks have learned."""


class OwnGroup:
    """A process group of which nothing else has collectives, so that a rank that leaves one can disturb nothing else.

    While ranks are `together` they tell each other before each collective, by three integers over this group, that they
    have come to it; one that has failed, wherever it was, says so instead, and no rank waits for another. Where a
    collective itself raises, nobody knows which ranks have it behind them: the group ends, its connections are closed,
    and the collectives of the others raise, too.

    ``original`` is the group of which it is a copy, None for the world: for collectives of others.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.original: dist.ProcessGroup | None = None
        self._process_group: dist.ProcessGroup | None = process_group
        self._has_failed = False  # what ranks do together, and all of them know it
        self._why_ended = ""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # that of a metric which is copied

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; keep no reference to it, or `end` closes nothing."""
        if self._process_group is None:
            raise OtherRankError(f"ranks cannot exchange values any more{self._why_ended}")
        return self._process_group

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context that all ranks enter, and that ends with an exception on all of them or on none."""
        before, had_failed = _TOGETHER.set(self), self._has_failed
        self._has_failed = False
        try:
            yield
            self.agree()
        except Exception:
            with suppress(Exception):
                self.agree(failed=True)
            raise
        finally:
            _TOGETHER.reset(before)
            self._has_failed = had_failed

    def agree(self, when: str = "", nbytes: int = _NOTHING, *, failed: bool = False) -> None:
        """Raise OtherRankError on all ranks if one has failed, or is about to exchange another number of bytes."""
        if self._has_failed:
            raise OtherRankError("it failed before, on this rank or another")

        def exchanged(group: dist.ProcessGroup) -> list[int]:
            state = torch.tensor([failed, nbytes, -nbytes])
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
            return state.tolist()

        failures, last, first = self.issue(exchanged)
        self._has_failed = bool(failures) or last != -first
        if failures:
            raise OtherRankError(f"it failed on another rank {when}".strip())
        if self._has_failed:
            raise OtherRankError(
                f"ranks must exchange the same values; one exchanges {-first} bytes, another one {last} (-1: "
                "none). A metric must have the same states on every rank."
            )

    def issue(self, collective: Callable[..., T]) -> T:
        """Call a collective with the group, which ends if that raises."""
        try:
            return collective(group=self.process_group)
        except BaseException as error:
            clear_frames(error.__traceback__)  # they refer to the group
            self.end(f", since a collective failed: {type(error).__name__}: {error}")
            raise

    def all_come(self, occasion: str, seconds: float) -> bool:
        """Tell whether all ranks call this on an occasion, within so many seconds; the answer is one for all."""
        store = self.process_group.get_group_store()
        is_last = store.add(f"{occasion}/come", 1) == num_ranks(self)
        if not is_last:
            with suppress(RuntimeError):  # nobody was the last one in time
                store.wait([occasion], timedelta(seconds=seconds))
        return store.compare_set(occasion, "", "all" if is_last else "some") == b"all"

    def end(self, why: str = "") -> None:
        """Close the connections to the other ranks."""
        self._why_ended = self._why_ended or why
        group, self._process_group = self._process_group, None
        self.original = None
        with suppress(ValueError, AssertionError, KeyError):  # the world has been destroyed, and the group with it
            if group is not None:
                dist.destroy_process_group(group)


def own_group(ranks: Sequence[Sequence[int]] | None = None) -> OwnGroup:
    """This rank's one of new groups of these ranks, None: the group of all; every rank must call this."""
    groups = [range(dist.get_world_size())] if ranks is None else ranks
    config = dist.get_backend_config()
    backend = None if "cpu:" in config else f"cpu:gloo,{config}"  # what ranks tell each other is on the CPU
    members = [list(each) for each in groups]
    assert dist.group.WORLD is not None
    timeout = dist.group.WORLD.get_group_store().timeout  # type: ignore[attr-defined]  # that of the default group
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend=backend)
    return OwnGroup(group)


def own_copy(process_group: dist.ProcessGroup, ranks: OwnGroup) -> OwnGroup:
    """A new group of the ranks of this one, of which those in ``ranks`` each give theirs."""
    every = all_gather_object(dist.get_process_group_ranks(process_group), ranks)
    copied = own_group(sorted({tuple(each) for each in every}))
    copied.original = process_group
    return copied


def together(group: Group) -> AbstractContextManager[None]:
    """`OwnGroup.together`, if it is one."""
    return group.together() if isinstance(group, OwnGroup) else nullcontext()


def meet() -> None:
    """Wait for the ranks that are `together` with this one, before what is no collective of this module."""
    if (ranks := _TOGETHER.get()) is not None:
        ranks.agree()


def all_reduce_sum(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum of the ranks' tensors of one shape."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def all_reduce_max(tensor: Tensor, group: Group = None) -> Tensor:
    """Elementwise maximum of the ranks' tensors of one shape."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def all_gather(tensor: Tensor, group: Group = None) -> list[Tensor]:
    """The ranks' tensors, in the order of the ranks; they may differ in shape, but not in dtype and dimensions."""
    shapes = _all_gather(torch.tensor([tensor.numel(), *tensor.shape], device=tensor.device), group)
    sizes = [int(shape[0]) for shape in shapes]
    flat = tensor.detach().flatten()
    padded = _all_gather(torch.cat((flat, flat.new_zeros(max(sizes) - len(flat)))), group)
    return [part[:size].view(shape[1:].tolist()) for part, size, shape in zip(padded, sizes, shapes, strict=True)]


def all_gather_cat(tensor: Tensor, group: Group = None) -> Tensor:
    """Concatenation of the ranks' one-dimensional tensors, which may differ in length, in the order of the ranks."""
    return torch.cat(all_gather(tensor, group))


def all_gather_object(value: T, group: Group = None) -> list[T]:
    """The ranks' values, which are pickled, in the order of the ranks."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(each.numpy().tobytes()) for each in all_gather(pickled, group)]


def is_distributed() -> bool:
    """Tell if a process group has been initialized."""
    return dist.is_available() and dist.is_initialized()


def has_other_ranks() -> bool:
    """Tell if there are several processes."""
    return is_distributed() and dist.get_world_size() > 1


def current_rank(group: Group = None) -> int:
    """Rank of this process in a process group; 0 where none has been initialized."""
    return dist.get_rank(_process_group(group)) if is_distributed() else 0


def num_ranks(group: Group = None) -> int:
    """Number of ranks in a process group; 1 where none has been initialized."""
    return dist.get_world_size(_process_group(group)) if is_distributed() else 1


def _process_group(group: Group) -> dist.ProcessGroup | None:
    return group.process_group if isinstance(group, OwnGroup) else group


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
    _issue(partial(dist.all_reduce, reduced, op=op), reduced.nbytes, group)
    return reduced


def _all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(num_ranks(group or _TOGETHER.get()))]
    _issue(partial(dist.all_gather, gathered, tensor), tensor.nbytes, group)
    return gathered


def _issue(collective: Callable[..., object], nbytes: int, group: Group) -> None:
    """Call a collective, for which everything else is prepared, once the ranks that are `together` have come to it."""
    ranks = _TOGETHER.get()
    if ranks is not None:
        ranks.agree(nbytes=nbytes)
    group = group or ranks
    if not isinstance(group, OwnGroup):
        collective(group=group)
        return
    try:
        group.issue(collective)
    except BaseException as error:
        if ranks is not None:
            ranks.end(f", since a collective failed: {type(error).__name__}: {error}")
        raise
