"""The training batches on which the last weights are measured, and what loaders draw from."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from embedgeo.capture.torch_names import local_part, version

_ITERATOR = "_iterator"  # of a loader with persistent workers: it has one
_NUM_WINDOWS = 8  # whose sizes tell a full one
_FEW = 16  # elements, which are all looked at


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
        kept = copy(batch) if isinstance(batch, Mapping | list) else batch  # a step may pop from it
        self._recent.append((step, kept, _versions(kept), [*_parts(kept, Tensor)]))

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


def _parts(batches: object, kinds: Any) -> Iterator[Any]:
    """What is of these kinds in batches, within dicts, lists and tuples. Long ones of numbers, say,
    are told by their first element.
    """
    if isinstance(batches, kinds):
        yield batches
    elif isinstance(batches, Mapping | list | tuple):
        first = batches
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if len(batches) <= _FEW or isinstance(first, Mapping | kinds):
            for each in batches.values() if isinstance(batches, Mapping) else batches:
                yield from _parts(each, kinds)


def _versions(batch: object) -> list[object]:
    return [(id(each), version(each)) for each in _parts(batch, Tensor)]


def _num_sequences(batch: object) -> int:
    """Length of the first tensor in a batch that has one; 0 where there is none."""
    return next((len(each) for each in _parts(batch, Tensor) if each.ndim and len(each)), 0)


def digest(batches: object) -> int:
    """A number, less than 2**63, of the texts and the bytes of tensors in batches.

    It looks into dicts, lists and tuples. Other objects count for nothing, and so do tensors of
    which each rank has a part, or without bytes, as sparse ones.
    """
    hashed = blake2b(digest_size=8)
    for each in _parts(batches, Tensor | str):
        if isinstance(each, str):
            hashed.update(each.encode())
        elif local_part(each) is each:
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
