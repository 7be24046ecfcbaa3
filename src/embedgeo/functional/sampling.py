"""Uniform sampling without replacement from a stream of rows: of those with the smallest keys.

A key is a uniform random number that depends only on the seed, the stream and the position of the row in the stream. So
neither batches nor ranks matter, and of streams of one length, such as those of layers, equal positions are drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from embedgeo.functional.distributed import Group, all_gather_cat, all_reduce_max, all_reduce_sum, current_rank

_STREAM_BITS = 40


class Sample(NamedTuple):
    """A uniform sample of the rows of one or more streams, or one of the rows of each label.

    Streams whose samples are to be merged must differ in their seed or number, or the same positions are drawn.

    Attributes:
        rows: shape (m, d), in no particular order; in float32 until float64 rows are seen.
        keys: shape (m,), float64 in [0, 1).
        labels: shape (m,), int64, what the rows were labelled with: 0 where with nothing.
        positions: shape (m,), int64, stream · 2⁴⁰ + position of the rows in it: see `row_numbers`.
        seen: number of rows of the streams, those that were left out among them, scalar int64.
        size: how many rows are drawn at most.
        by_label: whether so many are drawn of each label.
    """

    rows: Tensor
    keys: Tensor
    labels: Tensor
    positions: Tensor
    seen: Tensor
    size: int
    by_label: bool = False

    @classmethod
    def empty(cls, dim: int, size: int, *, by_label: bool = False) -> "Sample":
        """The sample of no rows."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.zeros(0, dim), none.double(), none, none, torch.tensor(0), size, by_label)

    def extend(
        self, x: Tensor, labels: Tensor | None = None, kept: Tensor | None = None, *, seed: int, stream: int = 0
    ) -> "Sample":
        """The sample once the next rows of the stream have been seen, of which ``x`` are those that ``kept`` marks.

        ``labels`` are of ``x``; ``seed`` is that of the keys.
        """
        count = len(x) if kept is None else len(kept)
        keys = row_keys(self.seen, count, seed=seed, stream=stream, device=self.keys.device)
        positions = stream_positions(self.seen, count, stream=stream, device=self.keys.device)
        if kept is not None:
            kept = kept.to(keys.device)
            keys, positions = keys[kept], positions[kept]
        labels = torch.zeros_like(positions) if labels is None else labels.to(self.labels)
        return self.merge(Sample(x, keys, labels, positions, self.seen.new_full((), count), *self[5:]))

    def merge(self, other: "Sample") -> "Sample":
        """The sample of the rows that both were drawn from; only the rows that are in it are copied."""
        parts = [self.rows, other.rows]
        keys, labels, positions = (torch.cat(pair) for pair in zip(self[1:4], other[1:4], strict=True))
        if len(keys) > self.size:
            drawn = self._drawn(keys, labels)
            num_own = int((drawn < len(self.keys)).sum())
            keys, labels, positions = keys[drawn], labels[drawn], positions[drawn]
            places = drawn[:num_own], drawn[num_own:] - len(self.keys)
            parts = [rows.index_select(0, each.to(rows.device)) for rows, each in zip(parts, places, strict=True)]
        dtype = torch.promote_types(torch.promote_types(self.rows.dtype, other.rows.dtype), torch.float32)
        rows = torch.cat([part.to(keys.device, dtype) for part in parts])
        return Sample(rows, keys, labels, positions, self.seen + other.seen, *self[5:])

    def select(self, chosen: Tensor) -> "Sample":
        """The sample with only the rows at these indices, in their order."""
        rows, keys, labels, positions = (each.index_select(0, chosen) for each in self[:4])
        return Sample(rows, keys, labels, positions, self.seen, *self[5:])

    def all_reduce(self, group: Group = None) -> "Sample":
        """The sample of the rows of all ranks; all but the rows is exchanged whole, of the rows only those drawn."""
        keys, labels, positions = (all_gather_cat(each, group) for each in self[1:4])
        lengths = all_gather_cat(self.seen.new_tensor([len(self.keys)]), group)
        offset = int(lengths[: current_rank(group)].sum())
        drawn = self._drawn(keys, labels)
        order = drawn[keys[drawn].argsort(stable=True)]
        own = ((order >= offset) & (order < offset + len(self.keys))).nonzero().flatten()
        is_double = bool(all_reduce_max(self.seen.new_tensor(self.rows.dtype == torch.float64), group))
        dtype = torch.float64 if is_double else torch.float32
        rows = torch.zeros(len(order), self.rows.shape[1], dtype=dtype, device=self.rows.device)
        rows.index_copy_(0, own, self.rows.index_select(0, order[own] - offset).to(dtype))
        seen = all_reduce_sum(self.seen, group)
        return Sample(all_reduce_sum(rows, group), keys[order], labels[order], positions[order], seen, *self[5:])

    def _drawn(self, keys: Tensor, labels: Tensor) -> Tensor:
        """Indices, ascending, of the rows with the smallest keys, or with the smallest of each label."""
        if not self.by_label:
            return keys.topk(min(self.size, len(keys)), largest=False, sorted=False).indices.sort().values
        by_key = keys.argsort(stable=True)
        labels, order = labels[by_key].sort(stable=True)
        rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(labels, labels)
        return by_key[order[rank < self.size]].sort().values


def row_keys(
    start: int | Tensor, count: int, *, seed: int, stream: int = 0, device: torch.device | None = None
) -> Tensor:
    """SplitMix64 keys (Steele, Lea & Flood 2014) of the rows from ``start`` on, shape (count,), float64 in [0, 1)."""
    z = stream_positions(start, count, stream=stream, device=device)
    # The seed is mixed once more than the position: it must neither shift the sequence nor be interchangeable with it.
    z = _mix(z) + _mix(_mix(torch.full((), seed, device=device)))
    return _shift(_mix(z), 11).to(torch.float64) * 2.0**-53


def stream_positions(start: int | Tensor, count: int, *, stream: int = 0, device: torch.device | None = None) -> Tensor:
    """`Sample.positions` of the rows ``start`` … ``start + count - 1`` of a stream, shape (count,), int64."""
    return torch.arange(count, dtype=torch.int64, device=device) + start + (stream << _STREAM_BITS)


def row_numbers(positions: Tensor, batches: Sequence[Tensor]) -> Tensor:
    """Numbers of rows among those of all streams, from 0, in the order in which one process would see their batches.

    ``batches`` are the sizes of each stream's batches; of R streams, stream r has the batches r, r + R, ….
    """
    counts = pad_sequence([each.to(positions.device) for each in batches], batch_first=True)
    before = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view(counts.T.shape).T  # rows before each batch
    numbers = torch.empty_like(positions)
    for stream, ends in enumerate(counts.cumsum(1)):
        place = positions - (stream << _STREAM_BITS)
        own = (place >= 0) & (place < 1 << _STREAM_BITS)
        batch = torch.searchsorted(ends, place[own], right=True)
        numbers[own] = place[own] - (ends - counts[stream])[batch] + before[stream][batch]
    return numbers


def _mix(z: Tensor) -> Tensor:
    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (that of int64 is arithmetic and repeats the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample_batches(sample: Sample, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Rows and labels of random whole batches of ``batch_size`` rows, or of a smaller one if there are fewer rows."""
    if len(sample.rows) <= batch_size:
        return [(sample.rows, sample.labels)]
    chosen = sample.keys.argsort()[: len(sample.rows) // batch_size * batch_size]
    return [(sample.rows.index_select(0, batch), sample.labels[batch]) for batch in chosen.split(batch_size)]
