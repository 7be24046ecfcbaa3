"""Exchanges between the ranks of a process group; arguments are left as they are.

An `Exchange` is a generator that yields what it wants to have summed over the ranks, or the largest
of, or dealt out to them, and goes on once there are answers. So those of many states, of many
layers, go on side by side, see `embedgeo.functional.lockstep.at_once`, and their requests travel
together, in a few collectives however many these are: see `exchanged`.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter
from traceback import clear_frames
from typing import Literal, NamedTuple, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
# None: the world, or the ranks that are `together`
Group: TypeAlias = "dist.ProcessGroup | OwnGroup | None"
Kind: TypeAlias = Literal["sum", "largest", "dealt"]

_TOGETHER: ContextVar["OwnGroup | None"] = ContextVar("_TOGETHER", default=None)
_NOTHING = -1  # bytes, where there is no collective
# integers, 16 KiB, that have room beside those by which ranks tell that they have come
_NUM_TOLD = 1 << 11
_MOST_BYTES = 1 << 29  # that are reduced at a time


@dataclass(eq=False, slots=True)
class Request:
    """A tensor to be reduced over the ranks, or dealt out to them."""

    tensor: Tensor
    kind: Kind
    overwrite: bool = False  # the tensor, which is then the answer
    answer: Tensor | None = None


Exchange: TypeAlias = Generator[list[Request], None, T]
"""A generator that yields requests, goes on once some of them have an answer, and returns its
result.
"""


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
        is_outer = _TOGETHER.get() is not self
        before, had_failed = _TOGETHER.set(self), self._has_failed
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
            _TOGETHER.reset(before)
            if is_outer:
                self._has_failed = had_failed

    def agree(
        self, nbytes: int = _NOTHING, *, failed: bool = False, told: Tensor | None = None
    ) -> None:
        """Raise OtherRankError on all ranks if one has failed, or is about to exchange another
        number of bytes.

        ``told`` are a few integers, which become the largest ones of all ranks.
        """
        if self._has_failed:
            raise OtherRankError("it failed before, on this rank or another")

        def exchanged(group: dist.ProcessGroup) -> list[int]:
            state = torch.zeros(3 + _NUM_TOLD, dtype=torch.int64, device="cpu")
            state[:3] = torch.tensor([failed, nbytes, -nbytes], device="cpu")
            if told is not None:
                state[3 : 3 + len(told)] = told
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
            if told is not None:
                told.copy_(state[3 : 3 + len(told)])
            return state[:3].tolist()

        failures, last, first = self.issue(exchanged)
        when, self._when = self._when, ""
        self._has_failed = bool(failures) or last != -first
        if failures:
            raise OtherRankError(f"it failed on another rank {when}".strip())
        if self._has_failed:
            raise OtherRankError(
                f"ranks must exchange the same values; one exchanges {-first} bytes, another one "
                f"{last} (-1: "
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
        """Tell whether all ranks call this on an occasion, within so many seconds; the answer is
        one for all.
        """
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
        # the world has been destroyed, and the group with it
        with suppress(ValueError, AssertionError, KeyError):
            if group is not None:
                dist.destroy_process_group(group)


def own_group(ranks: Sequence[Sequence[int]] | None = None) -> OwnGroup:
    """This rank's one of new groups of these ranks, None: the group of all; every rank must call
    this.
    """
    groups = [range(dist.get_world_size())] if ranks is None else ranks
    config = dist.get_backend_config()
    # what ranks tell each other is on the CPU
    backend = None if "cpu:" in config else f"cpu:gloo,{config}"
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


def together(group: Group, when: str = "") -> AbstractContextManager[None]:
    """`OwnGroup.together`, if it is one."""
    return group.together(when) if isinstance(group, OwnGroup) else nullcontext()


def meet() -> None:
    """Wait for the ranks that are `together` with this one, before what is no collective of this
    module.
    """
    _meet(_NOTHING)


def total(tensor: Tensor, *, overwrite: bool = False) -> Exchange[Tensor]:
    """Sum of the ranks' tensors of one shape; it may ``overwrite`` the tensor, which saves
    memory.
    """
    return _answer_to(Request(tensor, "sum", overwrite=overwrite))


def largest(tensor: Tensor) -> Exchange[Tensor]:
    """Elementwise maximum of the ranks' tensors of one shape."""
    return _answer_to(Request(tensor, "largest"))


def dealt(tensor: Tensor, *, overwrite: bool = False) -> Exchange[Tensor]:
    """Rows that the ranks have for this one, given those that it has for each of R ranks, shape (R,
    ...).

    Row r of the result, of the same shape, is from rank r. Of a single rank it is the tensor
    itself. It may ``overwrite`` the tensor.
    """
    return _answer_to(Request(tensor, "dealt", overwrite=overwrite))


def of_each_rank(tensor: Tensor, group: Group = None) -> Exchange[Tensor]:
    """The ranks' tensors of one shape, stacked in the order of the ranks."""
    return concatenated(tensor[None], [1] * num_ranks(group), group)


def concatenated(tensor: Tensor, lengths: Sequence[int], group: Group = None) -> Exchange[Tensor]:
    """Concatenation along the first axis of the ranks' tensors, of these lengths, in the order of
    the ranks.
    """
    every = tensor.new_zeros(sum(lengths), *tensor.shape[1:])
    first = sum(lengths[: current_rank(group)])
    every[first : first + len(tensor)] = tensor
    return (yield from total(every, overwrite=True))


def answered(
    exchange: Exchange[T], answer: Callable[[Request], Tensor] = attrgetter("tensor")
) -> T:
    """Result of an exchange, given a function that answers requests; default: as where there is a
    single rank.
    """
    while True:
        try:
            requests = next(exchange)
        except StopIteration as end:
            return end.value
        for request in requests:
            request.answer = answer(request)


def exchanged(exchange: Exchange[T], group: Group = None) -> T:
    """Result of an exchange between the ranks of a group, all of which must call this.

    Each round is one collective for each dtype, or two where maxima are among its requests, after
    the one by which ranks that are `together` tell each other that they have come to it. A few
    maxima are told there, too, and first. More than 512 MiB are exchanged in as many parts.
    """
    while True:
        try:
            requests = next(exchange)
        except StopIteration as end:
            return end.value
        maxima = [request for request in requests if request.kind == "largest"]
        _reduce(
            maxima
            if maxima and _can_be_told(sum(each.tensor.numel() for each in maxima), group)
            else requests,
            group,
        )


def all_reduce_sum(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum of the ranks' tensors of one shape."""
    return exchanged(total(tensor), group)


def all_reduce_max(tensor: Tensor, group: Group = None) -> Tensor:
    """Elementwise maximum of the ranks' tensors of one shape."""
    return exchanged(largest(tensor), group)


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
    return is_distributed() and dist.get_world_size() > 1


def current_rank(group: Group = None) -> int:
    """Rank of this process in a process group; 0 where none has been initialized."""
    return dist.get_rank(_process_group(group)) if is_distributed() else 0


def num_ranks(group: Group = None) -> int:
    """Number of ranks in a process group; 1 where none has been initialized."""
    return dist.get_world_size(_process_group(group)) if is_distributed() else 1


def _process_group(group: Group) -> dist.ProcessGroup | None:
    return group.process_group if isinstance(group, OwnGroup) else group


class _Piece(NamedTuple):
    """Some elements of what is reduced, (1, m), or dealt out, (R, m), and the place for the answer,
    maybe the same.
    """

    given: Tensor
    answer: Tensor
    kind: Kind


def _answer_to(request: Request) -> Exchange[Tensor]:
    while request.answer is None:
        yield [request]
    return request.answer


def _reduce(requests: list[Request], group: Group) -> None:
    """Answer requests."""
    pieces = list[_Piece]()
    answers = list[Tensor]()
    for request in requests:
        given = _as_sent(request)
        is_own = (request.overwrite or given is not request.tensor) and given.is_contiguous()
        answers.append(
            given.detach()
            if is_own
            else torch.empty_like(given, memory_format=torch.contiguous_format)
        )
        num_rows = len(given) if request.kind == "dealt" else 1
        shape, step = (
            (num_rows, given.numel() // num_rows),
            max(1, _MOST_BYTES // given.itemsize // num_rows),
        )
        parts = zip(
            *(each.reshape(shape).split(step, dim=1) for each in (given.detach(), answers[-1])),
            strict=True,
        )
        pieces += [_Piece(part, answer, request.kind) for part, answer in parts if part.numel()]
    for bundle in _bundles(pieces):
        _reduce_bundle(bundle, group)
    for request, answer in zip(requests, answers, strict=True):
        request.answer = _as_received(request, answer)


def _bundles(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are exchanged together, by their order and size alone, which are those of all
    ranks.
    """
    bundle, num_bytes = list[_Piece](), 0
    for piece in pieces:
        if bundle and num_bytes + piece.given.nbytes > _MOST_BYTES:
            yield bundle
            bundle, num_bytes = [], 0
        bundle.append(piece)
        num_bytes += piece.given.nbytes
    if bundle:
        yield bundle


def _reduce_bundle(bundle: list[_Piece], group: Group) -> None:
    """Reduce pieces, those of one kind in one collective; where they are a few maxima, ranks tell
    each other these.
    """
    kinds = defaultdict[tuple[Kind, torch.dtype, torch.device], list[_Piece]](list)
    for piece in bundle:
        kinds[piece.kind, piece.given.dtype, piece.given.device].append(piece)
    buffers = {
        kind: torch.cat([piece.given for piece in pieces], dim=1) for kind, pieces in kinds.items()
    }
    ranks = _TOGETHER.get()
    num_numbers = sum(buffer.numel() for buffer in buffers.values())
    if (
        ranks is not None
        and {kind for kind, _, _ in kinds} == {"largest"}
        and _can_be_told(num_numbers, group)
    ):
        told = torch.cat([buffer.cpu().flatten() for buffer in buffers.values()])
        ranks.agree(nbytes=told.nbytes, told=told)
        parts = told.split([buffer.numel() for buffer in buffers.values()])
        buffers = {kind: part[None] for kind, part in zip(buffers, parts, strict=True)}
    else:
        _meet(sum(buffer.nbytes for buffer in buffers.values()))
        for kind, buffer in buffers.items():
            if kind[0] == "dealt":
                buffers[kind] = torch.empty_like(buffer)
                _issue(partial(dist.all_to_all_single, buffers[kind], buffer), group)
            else:
                op = dist.ReduceOp.SUM if kind[0] == "sum" else dist.ReduceOp.MAX
                _issue(partial(dist.all_reduce, buffer, op=op), group)
    for kind, pieces in kinds.items():
        sizes = [piece.given.shape[1] for piece in pieces]
        for piece, part in zip(pieces, buffers[kind].split(sizes, dim=1), strict=True):
            piece.answer.copy_(part)


def _can_be_told(num_numbers: int, group: Group) -> bool:
    """Tell whether so many maxima over a group can be among what the ranks that are `together` tell
    each other.
    """
    ranks = _TOGETHER.get()
    return ranks is not None and group in (None, ranks) and num_numbers <= _NUM_TOLD


def _as_sent(request: Request) -> Tensor:
    """A tensor as numbers that are summed exactly beside others in float64, or as integers of the
    same order.
    """
    tensor = request.tensor
    if request.kind == "dealt":
        return tensor
    if request.kind == "sum":
        if tensor.is_floating_point():
            return tensor
        whole = tensor.long()
        return torch.stack((whole >> 32, whole & 0xFFFFFFFF)).double()
    if not tensor.is_floating_point():
        return tensor.long()
    # NaN without a sign
    return _ordered(torch.where(tensor.isnan(), torch.nan, tensor).double().view(torch.int64))


def _as_received(request: Request, answer: Tensor) -> Tensor:
    """The answer to a request, undoing `_as_sent`."""
    tensor = request.tensor
    if request.kind == "sum" and not tensor.is_floating_point():
        high, low = answer.long()
        answer = (high << 32) + low
    elif request.kind == "largest" and tensor.is_floating_point():
        answer = _ordered(answer).view(torch.float64)
    return answer.to(tensor.dtype)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floating-point numbers as integers of the same order, NaN the largest, and these as
    the bits again.
    """
    return bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)


def _all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(num_ranks(group or _TOGETHER.get()))]
    _meet(tensor.nbytes)
    _issue(partial(dist.all_gather, gathered, tensor), group)
    return gathered


def _meet(nbytes: int) -> None:
    if (ranks := _TOGETHER.get()) is not None:
        ranks.agree(nbytes=nbytes)


def _issue(collective: Callable[..., object], group: Group) -> None:
    """Call a collective, for which everything else is prepared and to which the ranks have come."""
    ranks = _TOGETHER.get()
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
