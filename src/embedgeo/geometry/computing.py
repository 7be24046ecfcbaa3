"""The numbers of all layers of a measurement: at once, or in a thread while training goes on."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.metrics.layer import LayerMetrics, ValuePairs, in_sync, reduce
from embedgeo.results.records import Record


class MeasuredLayer(NamedTuple):
    """A layer that has rows on some rank, and the metrics that have seen them."""

    name: str
    layer_index: int  # in forward order
    metrics: LayerMetrics


def compute(layers: Sequence[MeasuredLayer]) -> list[Record]:
    """Records of layers over the rows of all ranks; every rank must call this. The states stay as they are.

    All layers get the rows of all ranks in one exchange. On a CPU with several threads several are then computed at a
    time, each in its share of the threads, so that numbers do not depend on how many these are. An error of a layer is
    raised once all have been computed.
    """
    with in_sync([each.metrics for each in layers]):
        return _records(layers, _computed(layers))


def _computed(layers: Sequence[MeasuredLayer]) -> list[ValuePairs | Exception]:
    num_threads = _threads_a_layer(layers)
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
        with ThreadPoolExecutor(num_workers, "embedgeo", torch.set_num_threads, (num_threads,)) as pool:
            return [values for of_layer in pool.map(work, layers) for values in of_layer]
    finally:
        torch.set_num_threads(all_threads)  # the workers have set that of threads to come, too


def compute_in_thread(layers: Sequence[MeasuredLayer]) -> Future[list[Record]]:
    """Records as `compute` returns them, bit for bit, while the caller goes on; every rank must call this.

    The states get the rows of all ranks now, and are freed layer after layer. The thread issues no collectives, and
    leaves random states and what is set for the whole process alone. On a GPU it has a stream of its own.
    """
    reduce([each.metrics for each in layers])
    num_threads = _threads_a_layer(layers)
    all_threads = torch.get_num_threads()
    is_inference = torch.is_inference_mode_enabled()
    streams = []
    for device in sorted({each.metrics.device for each in layers if each.metrics.device.type == "cuda"}, key=str):
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
            for each in layers:
                values += _values([each])
                for stream in streams:
                    stream.synchronize()  # what is freed then goes to the stream that it was allocated on
                each.metrics.reset()
            return _records(layers, values)

    pool = ThreadPoolExecutor(1, "embedgeo")
    if num_threads is not None:
        pool.submit(torch.set_num_threads, num_threads).result()
        torch.set_num_threads(all_threads)  # the other one has set that of threads to come, too
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def can_start_threads() -> bool:
    """Tell whether threads can be started, which no interpreter does that is about to exit."""
    return threading.main_thread().is_alive()


def _values(layers: Sequence[MeasuredLayer]) -> list[ValuePairs | Exception]:
    """Values of layers, or the exception of one that fails: the one place where they are computed."""
    return [each.metrics.compute() for each in layers]


def _records(layers: Sequence[MeasuredLayer], values: Sequence[ValuePairs | Exception]) -> list[Record]:
    keys: list[tuple[MeasuredLayer, str]] = []
    pairs: list[Tensor] = []
    for layer, of_layer in zip(layers, values, strict=True):
        if isinstance(of_layer, Exception):
            of_layer.add_note(f"at layer {layer.name!r}")
            raise of_layer
        keys += [(layer, key) for key in of_layer]
        pairs += [pair.double() for pair in of_layer.values()]
    numbers = torch.stack([pair.to(pairs[0].device) for pair in pairs]).tolist() if pairs else []  # one transfer
    return [
        Record(
            layer=layer.name,
            layer_index=layer.layer_index,
            width=layer.metrics.dim,
            metric=key,
            value=value,
            stderr=stderr,
        )
        for (layer, key), (value, stderr) in zip(keys, numbers, strict=True)
    ]


def _threads_a_layer(layers: Sequence[MeasuredLayer]) -> int | None:
    """Threads in which each of several layers is computed on a CPU; None where states are on other devices."""
    if any(each.metrics.device.type != "cpu" for each in layers):
        return None
    return max(1, torch.get_num_threads() // max(1, len(layers)))


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """Load CUDA's linear algebra in this thread: it fails where two load it at once."""
    torch.linalg.inv(torch.eye(1, device=device))
