"""Uniform sampling without replacement from a stream of rows, mergeable across streams.

Every row gets a key, a uniform number that depends only on the seed, the stream and the row's place in it; the
sample is the rows with the smallest keys. So any split of the stream into updates gives the same sample, the sample
of several streams is the rows with the smallest keys of all, and no global random state is touched.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_STREAM_BITS = 40


class Sample(NamedTuple):
    """A uniform sample of the rows seen.

    Attributes:
        rows: shape (m, d), in no particular order.
        keys: shape (m,), float64 in [0, 1).
        seen: number of rows it was drawn from, scalar int64.
    """

    rows: Tensor
    keys: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, dim: int) -> "Sample":
        """A sample of no rows."""
        return cls(torch.zeros(0, dim), torch.zeros(0, dtype=torch.float64), torch.tensor(0))


def row_keys(start: int, count: int, *, seed: int, stream: int = 0, device: torch.device | None = None) -> Tensor:
    """Keys of the rows ``start`` … ``start + count - 1`` of a stream, shape (count,), float64 in [0, 1).

    SplitMix64 (Steele, Lea & Flood 2014) of the row's number, in wrapping int64 arithmetic.

    >>> bool((row_keys(0, 5, seed=0)[3:] == row_keys(3, 2, seed=0)).all())
    True
    """
    z = torch.arange(start, start + count, dtype=torch.int64, device=device) + (stream << _STREAM_BITS)
    # Row and seed are mixed differently: seeds must neither shift one sequence nor trade places with a row's number.
    z = _mix(z) + _mix(_mix(torch.tensor(seed, device=device)))
    return _shift(_mix(z), 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = z + _int64(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _int64(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (int64's own repeats the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def extend_sample(sample: Sample, x: Tensor, size: int, *, seed: int, stream: int = 0) -> Sample:
    """Show a sample of at most ``size`` rows the next rows of its stream, ``x``, shape (n, d).

    The sample is kept in float32 until it is shown float64 rows. Streams to be merged must differ in ``seed`` or
    ``stream``, or they are drawn at the same places.
    """
    keys = row_keys(int(sample.seen), len(x), seed=seed, stream=stream, device=x.device)
    shown = sample.seen.new_tensor(len(x))
    if len(sample.keys) == size:
        hopeful = (keys < sample.keys.max()).nonzero().flatten()
        x, keys = x.index_select(0, hopeful), keys[hopeful]
    return merge_samples(sample, Sample(x, keys, shown), size)


def merge_samples(a: Sample, b: Sample, size: int) -> Sample:
    """The sample of at most ``size`` rows of what two samples were drawn from."""
    dtype = torch.promote_types(torch.promote_types(a.rows.dtype, b.rows.dtype), torch.float32)
    rows, keys = torch.cat((a.rows.to(dtype), b.rows.to(dtype))), torch.cat((a.keys, b.keys))
    if len(keys) > size:
        smallest = keys.topk(size, largest=False).indices
        rows, keys = rows.index_select(0, smallest), keys[smallest]
    return Sample(rows, keys, a.seen + b.seen)


def sample_batches(sample: Sample, batch_size: int) -> tuple[Tensor, ...]:
    """Split a sample at random into batches of ``batch_size`` rows; a single smaller one where it has no more."""
    if len(sample.rows) <= batch_size:
        return (sample.rows,)
    rows = sample.rows.index_select(0, sample.keys.argsort())
    whole = len(rows) // batch_size * batch_size
    return rows[:whole].split(batch_size)
