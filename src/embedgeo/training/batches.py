"""The training batches on which the last weights are measured, and what loaders draw from."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from embedgeo.capture.torch_names import local_part, version

_ITERATOR = "_iterator"  # of a loader with persistent workers: it has one
_NUM_WINDOWS = 8  # whose sizes tell a full one


class LastBatches:
    """The batches of the last full window of steps.

    A window is full if it has at least as many sequences as half of the last windows had. The
    batches that are left over at the end of an epoch are fewer or smaller, and make no full window.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        # steps and batches of the window that ends now, and what tells a change of them: ids, and
        # what is held so that nothing else gets these
        self._recent: list[tuple[int, Any, list[object], list[Any]]] = []
        self._full: list[tuple[int, Any, list[object], list[Any]]] = []
        self._sizes = deque[int](maxlen=_NUM_WINDOWS)  # numbers of sequences

    def add(self, step: int, batch: Any) -> None:
        """Add a batch of a step, or another batch of the last step."""
        if self._recent and self._recent[-1][0] != step:
            self._end_step()
        while self._recent and self._recent[0][0] <= step - self._window:
            del self._recent[0]
        self._recent.append((step, batch, _versions(batch), [*_parts(batch)]))

    def full(self) -> list[Any]:
        """The batches of the last full window; empty if there are none."""
        if self._recent:
            self._end_step()
        return [each[1] for each in self._full]

    @property
    def have_changed(self) -> bool:
        """Whether a batch of the full window was written to since it was added."""
        return any(versions != _versions(batch) for _, batch, versions, _ in self._full)

    def _end_step(self) -> None:
        size = sum(_num_sequences(each[1]) for each in self._recent)
        self._sizes.append(size)
        if size >= sorted(self._sizes)[len(self._sizes) // 2]:
            self._full = [*self._recent]


def _parts(batches: object) -> Iterator[Any]:
    """What is in batches, within dicts, lists and tuples."""
    waiting = [batches]
    while waiting:
        each: Any = waiting.pop()
        if isinstance(each, Mapping | list | tuple):
            waiting += each.values() if isinstance(each, Mapping) else each
        else:
            yield each


def _versions(batch: object) -> list[object]:
    return [(id(each), version(each)) for each in _parts(batch) if isinstance(each, Tensor)]


def _num_sequences(batch: Any) -> int:
    """Length of the first tensor in a batch; 0 where none is found."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple):
        return next(filter(None, map(_num_sequences, parts)), 0)
    return 0


def digest(batches: object) -> int:
    """A number, less than 2**63, of the texts and the bytes of tensors in batches.

    It looks into dicts, lists and tuples. Other objects count for nothing, and so do tensors of
    which each rank has a part, or without bytes, as sparse ones.
    """
    hashed = blake2b(digest_size=8)
    for each in _parts(batches):
        if isinstance(each, str):
            hashed.update(each.encode())
        elif isinstance(each, Tensor) and local_part(each) is each:
            hashed.update(f"{each.dtype} {each.shape}".encode())
            with suppress(RuntimeError):
                hashed.update(each.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(hashed.digest()) >> 1


@contextmanager
def kept_generators(loader: object) -> Iterator[None]:
    """Puts the generators that a loader draws from back on exit, and the iterator that one with
    persistent workers has, which would begin anew: training may share them.

    Accelerate takes a loader that is not read to its end for that of training, until it is told
    which ones are read.
    """
    parts = [*getattr(loader, "flattened", [loader])]  # of several, Lightning's own
    iterators = [(part, getattr(part, _ITERATOR)) for part in parts if hasattr(part, _ITERATOR)]
    for part, _ in iterators:
        setattr(part, _ITERATOR, None)
    for name in ("batch_sampler", "sampler"):
        parts += [getattr(part, name, None) for part in parts]
    drawn = [getattr(part, "generator", None) for part in parts]
    states = [(each, each.get_state()) for each in drawn if isinstance(each, torch.Generator)]
    readings = [part.gradient_state for part in parts if hasattr(part, "gradient_state")]
    read = [each.dataloader_references for each in readings]
    try:
        yield
    finally:
        for part, iterator in iterators:
            setattr(part, _ITERATOR, iterator)
        for generator, state in states:
            generator.set_state(state)
        for reading, loaders in zip(readings, read, strict=True):
            reading.dataloader_references = loaders
