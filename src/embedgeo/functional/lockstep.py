"""Computations that go on side by side, those of all layers, and make their calls of some functions
together.

A `Computation` is a generator that yields the calls it wants made, and goes on once some of them
have an answer. On a GPU one copy to the host then serves all layers, as one batch of each operation
does. See `computed`, which makes them.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Question(Protocol):
    """Something that a generator yields, to which it is given an answer before it goes on."""

    answer: Any  # None: not yet


Q = TypeVar("Q", bound=Question)


@dataclass(eq=False, slots=True)
class Call:
    """A call of a function that takes the arguments of many callers at once."""

    function: Callable[[list[Any]], Any]
    argument: Any
    answer: Any = None
    is_made: bool = False
    is_alone: bool = False  # together with others it has failed


@dataclass(frozen=True)
class Failure:
    """The answer to a call whose function has raised an exception for its argument."""

    error: Exception


Computation: TypeAlias = Generator[list[Call], None, T]
"""A generator that yields calls, goes on once some of them have an answer, and returns its result.
"""


def at_once(*generators: Generator[list[Q], None, Any]) -> Generator[list[Q], None, list[Any]]:
    """Results of several generators that go on side by side."""
    results: list[Any] = [None] * len(generators)
    waiting: dict[int, list[Q]] = {number: [] for number in range(len(generators))}
    while True:
        for number, questions in [*waiting.items()]:
            if not questions or any(question.answer is not None for question in questions):
                try:
                    waiting[number] = next(generators[number])
                except StopIteration as end:
                    results[number] = end.value
                    del waiting[number]
        if not waiting:
            return results
        yield [
            question
            for questions in waiting.values()
            for question in questions
            if question.answer is None
        ]


def called(
    function: Callable[[list[Any]], list[T] | Computation[list[T]]], argument: Any
) -> Computation[T]:
    """The result of a function for one argument; it is called with those of all callers, and
    returns as many results.

    It may be a computation itself. What it raises for this argument is raised here.
    """
    call = Call(function, argument)
    while call.answer is None:
        yield [call]
    if isinstance(call.answer, Failure):
        raise call.answer.error
    return call.answer


def on_host(*values: Any) -> Computation[tuple[Any, ...]]:
    """Tensors, or tuples of tensors and settings, on the CPU.

    Those of all callers are copied together, once nothing else can go on. What is on the CPU is
    given back as it is.
    """
    tensors = [each for value in values for each in _fields(value) if _is_elsewhere(each)]
    if not tensors:
        return values
    copies = iter((yield from called(_copied, tensors)))
    moved = (
        [next(copies) if _is_elsewhere(each) else each for each in _fields(value)]
        for value in values
    )
    pairs = zip(values, moved, strict=True)
    return tuple(
        _like(value, fields) if isinstance(value, tuple) else fields[0] for value, fields in pairs
    )


def computed(computation: Computation[T]) -> T:
    """Result of a computation, whose calls of one function are made together; copies to the host
    come last.

    A function that raises an exception is called for each argument alone, so that only those who
    caused it get it.
    """
    waiting: dict[Computation[Any], list[Call]] = {computation: []}  # for any of these
    answering: dict[Computation[Any], list[Call]] = {}
    while True:
        for each, calls in [*waiting.items()]:
            if calls and all(call.answer is None for call in calls):
                continue
            try:
                waiting[each] = next(each)
            except StopIteration as end:
                if each is computation:
                    return end.value
                del waiting[each]
                _answer(answering.pop(each), end.value)
            except Exception as error:
                if each is computation:
                    raise
                del waiting[each]
                _fail(answering.pop(each), error)
        if any(
            not calls or any(call.answer is not None for call in calls)
            for calls in waiting.values()
        ):
            continue
        for function, together in _due(chain(*waiting.values())):
            found = _made(function, together)
            if found is not None:
                waiting[found], answering[found] = [], together


def stepwise(function: Callable[P, Computation[T]]) -> Callable[P, T]:
    """Decorator of a generator function, which then returns the result; `steps` has it go on beside
    others.
    """

    @wraps(function)
    def result(*args: P.args, **kwargs: P.kwargs) -> T:
        return computed(function(*args, **kwargs))

    result.steps = function  # type: ignore[attr-defined]
    return result


def steps(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Computation[T]:
    """The computation of a function that is `stepwise`, or of another one, which is called at its
    first step.
    """
    return getattr(function, "steps", partial(_in_one_step, function))(*args, **kwargs)


def _in_one_step(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Computation[T]:
    yield from ()
    return function(*args, **kwargs)


def _due(calls: Iterable[Call]) -> list[tuple[Callable[[list[Any]], Any], list[Call]]]:
    """Functions with the calls that are to be made together now; copies to the host only where
    nothing else is due.
    """
    together: dict[tuple[Callable[[list[Any]], Any], int], list[Call]] = {}
    for call in {id(call): call for call in calls if not call.is_made}.values():
        together.setdefault((call.function, id(call) if call.is_alone else 0), []).append(call)
    due = [(function, some) for (function, _), some in together.items()]
    return [each for each in due if each[0] is not _copied] or due


def _made(
    function: Callable[[list[Any]], Any], calls: Sequence[Call]
) -> Computation[list[Any]] | None:
    """Make calls together and answer them, or return the computation that their answers will be the
    result of.
    """
    for call in calls:
        call.is_made = True
    try:
        found = function([call.argument for call in calls])
    except Exception as error:
        _fail(calls, error)
        return None
    if isinstance(found, Generator):
        return found
    _answer(calls, found)
    return None


def _answer(calls: Sequence[Call], answers: Sequence[Any]) -> None:
    for call, answer in zip(calls, answers, strict=True):
        call.answer = answer


def _fail(calls: Sequence[Call], error: Exception) -> None:
    """Have calls made again, each alone, or answer the one that has been made alone."""
    for call in calls:
        call.is_made, call.is_alone = False, True
    if len(calls) == 1:
        calls[0].answer, calls[0].is_made = Failure(error), True


def _fields(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _like(value: tuple[Any, ...], fields: list[Any]) -> tuple[Any, ...]:
    return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _copied(of_callers: list[list[Tensor]]) -> list[list[Tensor]]:
    """The tensors of all callers on the CPU: in one copy for each device."""
    flat = [each for tensors in of_callers for each in tensors]
    copies = dict[int, Tensor]()
    for device in {each.device for each in flat}:
        there = sorted(
            {id(each): each for each in flat if each.device == device}.values(),
            key=_itemsize,
            reverse=True,
        )
        # the widest first, so that all fit in
        parts = [each.detach().reshape(-1).view(torch.uint8) for each in there]
        on_cpu = torch.cat(parts).cpu().split([len(part) for part in parts])
        copies |= {
            id(each): part.view(each.dtype).view(each.shape)
            for each, part in zip(there, on_cpu, strict=True)
        }
    return [[copies[id(each)] for each in tensors] for tensors in of_callers]


def _itemsize(tensor: Tensor) -> int:
    return tensor.itemsize
