"""The numbers of all layers of a measurement: at once, or in a thread while training goes on."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import is_distributed
from embedgeo.functional.lockstep import at_once, computed, steps
from embedgeo.metrics.layer import LayerMetrics, ValuePairs, in_sync, reduce
from embedgeo.results.records import Record

# of states that are exchanged together, beside which the rows of all ranks are held
_MOST_BYTES = 1 << 30
# an operation on so many takes about as long as a thread of a busy machine needs to join in
_FEW_NUMBERS = 2**18


class MeasuredLayer(NamedTuple):
    """A layer that has rows on some rank, and the metrics that have seen them."""

    name: str
    layer_index: int  # in forward order
    metrics: LayerMetrics
    num_bytes: int = 0  # of its states, on the rank where these are the largest


def compute(layers: Sequence[MeasuredLayer]) -> list[Record]:
    """Records of layers over the rows of all ranks; every rank must call this. The states stay as
    they are.

    Layers get the rows of all ranks in one exchange, as many at a time as have states of 1 GiB on
    each rank. On a CPU with several threads several are then computed at a time, each in its share
    of the threads, so that numbers do not depend on how many these are, or in one if it is small.
    An error of a layer is raised once all have been computed.
    """
    values = list[ValuePairs | Exception]()
    for some in _exchanged_together(layers):
        with in_sync([each.metrics for each in some]):
            values += _computed(some, _threads_a_layer(layers))
    return _records(layers, values)


def _exchanged_together(layers: Sequence[MeasuredLayer]) -> Iterator[Sequence[MeasuredLayer]]:
    """Layers in turn, several at a time; on all ranks the same ones."""
    if not is_distributed():
        yield layers
        return
    ends = accumulate(each.num_bytes for each in layers)
    for _, some in groupby(zip(layers, ends, strict=True), lambda each: each[1] // _MOST_BYTES):
        yield [layer for layer, _ in some]


def _computed(
    layers: Sequence[MeasuredLayer], num_threads: int | None
) -> list[ValuePairs | Exception]:
    all_threads = torch.get_num_threads()
    if num_threads in (None, all_threads) or not can_start_threads():
        with ExitStack() as stack:
            for kind in {"cpu", *(each.metrics.device.type for each in layers)}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return _values(layers)
    num_workers = min(all_threads, len(layers))
    is_inference = torch.is_inference_mode_enabled()

    def work(layer: MeasuredLayer) -> list[ValuePairs | Exception]:
        with torch.inference_mode(is_inference), torch.no_grad():  # states made under it need it
            return _values([layer])

    try:
        with ThreadPoolExecutor(
            num_workers, "embedgeo", torch.set_num_threads, (num_threads,)
        ) as pool:
            return [values for of_layer in pool.map(work, layers) for values in of_layer]
    finally:
        torch.set_num_threads(all_threads)  # the workers have set that of threads to come, too


def compute_in_thread(layers: Sequence[MeasuredLayer]) -> Future[list[Record]]:
    """Records as `compute` returns them, bit for bit, while the caller goes on; every rank must
    call this.

    The states get the rows of all ranks now, and are freed layer after layer. The thread issues no
    collectives, and leaves random states and what is set for the whole process alone. On a GPU it
    has a stream of its own.
    """
    for some in _exchanged_together(layers):
        reduce([each.metrics for each in some])
    num_threads = _threads_a_layer(layers)
    all_threads = torch.get_num_threads()
    is_inference = torch.is_inference_mode_enabled()
    streams = []
    for device in sorted(
        {each.metrics.device for each in layers if each.metrics.device.type == "cuda"}, key=str
    ):
        _load_linear_algebra(device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        streams.append(stream)

    def work() -> list[Record]:
        values = list[ValuePairs | Exception]()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.no_grad())
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for some in [layers] if streams else [[each] for each in layers]:
                values += _values(some)
                for stream in streams:
                    # what is freed then goes to the stream that it was allocated on
                    stream.synchronize()
                for each in some:
                    each.metrics.reset()
            return _records(layers, values)

    pool = ThreadPoolExecutor(1, "embedgeo")
    if num_threads is not None:
        pool.submit(torch.set_num_threads, num_threads).result()
        torch.set_num_threads(all_threads)  # the other one has set that of threads to come, too
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """Context for operations on so many numbers: one thread where they are few, on a CPU.

    Threads of a team wait for each other at the end of every operation. Where other processes keep
    a processor busy, that takes longer than the operation. The model outside of the context has the
    threads that it had; a thread of the user's whose very first operation falls into it keeps one.
    """
    num_threads = torch.get_num_threads()
    if size > _FEW_NUMBERS or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def can_start_threads() -> bool:
    """Tell whether threads can be started, which no interpreter does that is about to exit."""
    return threading.main_thread().is_alive()


def _values(layers: Sequence[MeasuredLayer]) -> list[ValuePairs | Exception]:
    """Values of layers, or the exception of one that fails: the one place where they are computed.

    On another device than the CPU they are computed side by side, so that it is waited for a few
    times for all layers.
    """
    if all(each.metrics.device.type == "cpu" for each in layers):
        return [each.metrics.compute() for each in layers]
    return computed(at_once(*(steps(LayerMetrics.compute, each.metrics) for each in layers)))


def _records(
    layers: Sequence[MeasuredLayer], values: Sequence[ValuePairs | Exception]
) -> list[Record]:
    keys: list[tuple[MeasuredLayer, str]] = []
    pairs: list[Tensor] = []
    for layer, of_layer in zip(layers, values, strict=True):
        if isinstance(of_layer, Exception):
            of_layer.add_note(f"at layer {layer.name!r}")
            raise of_layer
        keys += [(layer, key) for key in of_layer]
        pairs += [pair.double() for pair in of_layer.values()]
    # one transfer
    numbers = torch.stack([pair.to(pairs[0].device) for pair in pairs]).tolist() if pairs else []
    return [
        Record(
            layer=layer.name,
            layer_index=layer.layer_index,
            width=layer.metrics.width,
            metric=key,
            value=value,
            stderr=stderr,
        )
        for (layer, key), (value, stderr) in zip(keys, numbers, strict=True)
    ]


def _threads_a_layer(layers: Sequence[MeasuredLayer]) -> int | None:
    """Threads in which each of several layers is computed on a CPU; None where states are on other
    devices.
    """
    if any(each.metrics.device.type != "cpu" for each in layers):
        return None
    metrics = [each.metrics for each in layers]
    if layers and all(max(each.num_rows, each.dim) * each.dim <= _FEW_NUMBERS for each in metrics):
        return 1
    return max(1, torch.get_num_threads() // max(1, len(layers)))


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """Load CUDA's linear algebra in this thread: it fails where two load it at once."""
    torch.linalg.inv(torch.eye(1, device=device))
