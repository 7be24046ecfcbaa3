"""The numbers of a measurement: several layers at a time, at once or in a thread while its caller goes on."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from threading import Semaphore
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from embedgeo.capture.layers import Layer
from embedgeo.functional.distributed import all_reduce_max
from embedgeo.metrics.base import ValuesAndErrors
from embedgeo.metrics.defaults import require_same_values
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.results.records import Record

Numbers = dict[str, Tensor]
"""Value and standard error, shape (2,), by key."""


class Reached(NamedTuple):
    """A layer that has rows on some rank.

    Attributes:
        layer_index: its place in forward order.
        layer: what is read.
        metrics: those that have seen its rows.
        further: what computes other values of it, of its own rows or of others, without collectives.
    """

    layer_index: int
    layer: Layer
    metrics: LayerMetrics
    further: Sequence[Callable[[], ValuesAndErrors]] = ()


class Computed(NamedTuple):
    """What a measurement has come to on this rank.

    Attributes:
        numbers: of each layer, by its index.
        widths: of the layers, by their indices.
        failures: what was raised in place of a layer's numbers.
    """

    numbers: dict[int, Numbers]
    widths: dict[int, int]
    failures: list[Exception]

    @classmethod
    def of(cls, layers: Sequence[Reached], outcomes: Sequence[Numbers | Exception]) -> "Computed":
        """The outcomes of layers together."""
        numbers = {each.layer_index: outcome for each, outcome in zip(layers, outcomes, strict=True)}
        return cls(
            {i: outcome for i, outcome in numbers.items() if not isinstance(outcome, Exception)},
            {each.layer_index: each.metrics.dim for each in layers},
            [outcome for outcome in outcomes if isinstance(outcome, Exception)],
        )

    def pairs(self) -> tuple[list[tuple[int, str]], Tensor]:
        """The layer's index and the key of each number; and value and standard error, shape (numbers, 2), float64."""
        keys = [(i, key) for i, numbers in self.numbers.items() for key in numbers]
        pairs = [self.numbers[i][key].double() for i, key in keys]
        return keys, torch.stack([pair.to(pairs[0].device) for pair in pairs]) if pairs else torch.zeros(0, 2)

    def require_same(self, names: Sequence[str], device: torch.device, group: ProcessGroup | None) -> None:
        """Raise ValueError on ranks that repeat rows if they have other numbers, and none of them has failed.

        Args:
            names: of all layers.
            device: on which the ranks compare.
            group: of these ranks; every one must call this.
        """
        if all_reduce_max(torch.tensor(len(self.failures), device=device), group):
            return
        keys, pairs = self.pairs()
        require_same_values([f"{key} at layer {names[i]!r}" for i, key in keys], pairs[:, 0].to(device), group)

    def records(self, names: Sequence[str]) -> list[Record]:
        """A record for each number, given the names of all layers.

        Raises:
            Exception: what was raised in place of a layer's numbers.
        """
        if self.failures:
            raise self.failures[0]
        keys, pairs = self.pairs()
        return [
            Record(layer=names[i], layer_index=i, width=self.widths[i], metric=key, value=value, stderr=stderr)
            for (i, key), (value, stderr) in zip(keys, pairs.tolist(), strict=True)
        ]


class HandedOver(NamedTuple):
    """A measurement that a thread computes.

    Attributes:
        computed: what it comes to.
        why_silent: see `embedgeo.geometry.Geometry.why_silent`.
    """

    computed: Future[Computed]
    why_silent: str


def computed(reached: Callable[[], Sequence[Reached]]) -> Computed:
    """The numbers of layers over the rows of all ranks; every rank must call this. The states stay as they are.

    On a CPU with several threads several layers are computed at a time, each in its share of the threads (`_share`), so
    that numbers do not depend on how many these are. The thread that calls this issues all collectives, and at most as
    many layers as are computed at a time hold the rows of all ranks beside their own.

    Args:
        reached: returns the layers.
    """
    try:
        return _computed(reached())
    except Exception as error:
        return Computed({}, {}, [error])


def computing(reached: Callable[[], Sequence[Reached]]) -> Future[Computed]:
    """The same numbers, bit for bit, computed in a thread while the caller goes on; every rank must call this.

    The states are given away: they get the rows of all ranks now, and their memory is freed layer after layer. The
    thread computes one layer at a time, issues no collectives, and leaves random states and what is set for the whole
    process alone. On a GPU it has a stream of its own, which goes on from what has been queued before.

    Args:
        reached: returns the layers.
    """
    try:
        return _computing(reached())
    except Exception as error:
        future = Future[Computed]()
        future.set_result(Computed({}, {}, [error]))
        return future


def can_start_threads() -> bool:
    """Whether threads can be started, which no interpreter does that is about to exit."""
    return threading.main_thread().is_alive()


def _computed(layers: Sequence[Reached]) -> Computed:
    share, all_threads = _share(layers), torch.get_num_threads()
    if share in (None, all_threads) or not can_start_threads():
        with ExitStack() as stack:
            for kind in {"cpu", *(each.metrics.device.type for each in layers)}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return Computed.of(layers, [_outcome(each) for each in layers])
    num_workers, is_inference = min(all_threads, len(layers)), torch.is_inference_mode_enabled()
    free = Semaphore(num_workers)

    def work(each: Reached, in_sync: ExitStack) -> Numbers | Exception:
        try:
            with in_sync, _modes(is_inference=is_inference):
                return _outcome(each)
        finally:
            free.release()

    try:
        with ThreadPoolExecutor(num_workers, "embedgeo", torch.set_num_threads, (share,)) as pool:
            futures = list[Future[Numbers | Exception]]()
            for each in layers:
                free.acquire()
                futures.append(pool.submit(work, each, each.metrics.sync()))
            return Computed.of(layers, [future.result() for future in futures])
    finally:
        torch.set_num_threads(all_threads)  # the workers have set that of threads to come, too


def _computing(layers: Sequence[Reached]) -> Future[Computed]:
    for each in layers:
        each.metrics.reduce()
    share, all_threads, is_inference = _share(layers), torch.get_num_threads(), torch.is_inference_mode_enabled()
    devices = {each.metrics.device for each in layers}
    streams = [_stream_beside(device) for device in sorted(devices, key=str) if device.type == "cuda"]

    def work() -> Computed:
        outcomes = list[Numbers | Exception]()
        with ExitStack() as stack:
            stack.enter_context(_modes(is_inference=is_inference))
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for each in layers:
                outcomes.append(_outcome(each))
                for stream in streams:
                    stream.synchronize()  # what is freed then goes to the stream that it was allocated on
                each.metrics.reset()
        return Computed.of(layers, outcomes)

    pool = ThreadPoolExecutor(1, "embedgeo")
    if share is not None:
        pool.submit(torch.set_num_threads, share).result()
        torch.set_num_threads(all_threads)  # the other one has set that of threads to come, too
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def _outcome(each: Reached) -> Numbers | Exception:
    """The numbers of a layer, or the exception in their place, raised once the ranks have agreed on it."""
    numbers, failures = Numbers(), list[Exception]()
    for compute in chain(each.metrics.computed(), each.further):
        try:
            values, errors = compute()
            numbers |= {key: torch.stack((value, errors[key])) for key, value in values.items()}
        except Exception as error:  # the other metrics are in step with those of other ranks
            error.add_note(f"at layer {each.layer.name!r}")
            failures.append(error)
    if "Q" in numbers and each.metrics.expected_Q:
        expected = numbers["Q"].new_tensor([each.metrics.expected_Q, torch.nan])
        numbers["norm_Q_expected"] = expected.masked_fill(numbers["Q"][0].isnan(), torch.nan)  # of no rows, nothing
    return failures[0] if failures else numbers


def _share(layers: Sequence[Reached]) -> int | None:
    """Threads in which each of several layers is computed on a CPU; None where states are on other devices."""
    if any(each.metrics.device.type != "cpu" for each in layers):
        return None
    return max(1, torch.get_num_threads() // max(1, len(layers)))


@contextmanager
def _modes(*, is_inference: bool) -> Iterator[None]:
    """The modes of a thread that computes: states made under inference mode can be changed under it alone."""
    with torch.inference_mode(is_inference), torch.no_grad():
        yield


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """Load CUDA's linear algebra in this thread: it fails where two load it at once."""
    torch.linalg.inv(torch.eye(1, device=device))


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU that goes on from where the current one is."""
    _load_linear_algebra(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
