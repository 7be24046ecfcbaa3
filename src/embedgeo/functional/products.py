"""The smallest squared distances of each row to others, from products of all pairs of rows, a block at a time."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from embedgeo.functional.moments import row_chunks
from embedgeo.functional.precision import accumulator_dtype, row_norms

_GROUP = 16
"""Number of columns of which only the smallest value is looked at first."""

_SQUARE = 512
"""Rows on the side of the squares in which products of rows with themselves are taken, each pair once."""

BLOCK_BYTES = 1 << 23
"""Bytes of squared distances held at a time."""

_SPARE = 32
"""Elements between the rows of a block, so that those of a column do not all meet in one line of the cache."""

CACHED_ELEMENTS = 1 << 17
"""Elements of rows gathered, or centred, at a time, so that they stay in the processor's cache."""

_LAUNCH = 1 << 4
"""How many times larger blocks are where a launch costs more than a cache saves: on all but the CPU."""

_NORM_PARTS = 3
"""Columns that a squared norm is split into: three numbers of eight binary digits hold the 24 of float32."""

_SUMS_BFLOAT16 = "dtype_out" in torch.ops.aten.mm.overloads()
"""Whether products of bfloat16 can be had in float32, on CUDA."""


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of the size of a number of so many bytes: its digits as an integer, which have the order of those from zero up."""


class Operand(NamedTuple):
    """Centred rows b as (b, ‖b‖² in parts, ones), whose products are squared distances.

    Their products with (-2a, ones, ‖a‖² in parts) are, so that nothing larger than these is rounded to ``dtype``.

    Attributes:
        rows: shape (n or more, d + parts + ones); those beyond n fill up the last group: they are infinitely far away.
        norm: ‖b‖, shape (n,).
        lost: the norm of what rounding took from b, shape (n,).
        dtype: of the products.
    """

    rows: Tensor
    norm: Tensor
    lost: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, center: Tensor, dtype: torch.dtype, *, rounded: bool) -> Self:
        """The rows of ``x``, rounded to bfloat16 or not, for products in ``dtype``."""
        n, dim = x.shape
        summed, wide = torch.promote_types(dtype, torch.float32), accumulator_dtype(x.device)
        digits = torch.bfloat16 if rounded else dtype
        held = torch.bfloat16 if rounded and x.device.type == "cuda" and _SUMS_BFLOAT16 else dtype
        y = torch.empty(-(-n // _GROUP) * _GROUP, dim + 2 * _NORM_PARTS, dtype=held, device=x.device)
        norm, lost = (torch.zeros(n, dtype=wide, device=x.device) for _ in range(2))
        for chunk in row_chunks(x, blocked(CACHED_ELEMENTS, x.device)):
            rows = (x[chunk].to(torch.promote_types(center.dtype, summed)) - center).to(summed)
            kept = y[:n][chunk, :dim].copy_(rows.to(digits)).to(summed)
            norm[chunk] = row_norms(kept)
            if rounded:
                lost[chunk] = row_norms(rows.sub_(kept))
        norm2 = norm.square()
        for part in y[:n, dim:-_NORM_PARTS].unbind(1):
            part.copy_(norm2.to(digits))
            norm2 -= part
        y[n:, :dim], y[n:, dim:-_NORM_PARTS] = 0, torch.finfo(digits).max
        y[:, -_NORM_PARTS:] = 1
        return cls(y, norm, lost, dtype)

    def candidates(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k smallest squared distances of the rows with these indices, shape (m,), to others, ascending; and whose.

        They are compared as integers, which takes less time; those that rounding made negative come first, in no order.
        All rows are taken in order: each product of two of them serves both. No value is waited for.
        """
        n, length = len(self.norm), len(self.rows)
        side = math.isqrt(blocked(BLOCK_BYTES, rows.device) // self.dtype.itemsize) // _GROUP * _GROUP or _GROUP
        buffer = self.rows.new_empty(min(side, len(rows)), min(side, length) + _SPARE, dtype=self.dtype)
        values = torch.full((len(rows), k), torch.inf, dtype=self.dtype, device=rows.device)
        columns = torch.zeros((len(rows), k), dtype=torch.int64, device=rows.device)
        integer = _INTEGERS[self.dtype.itemsize]
        kept = values.view(integer)
        whole = len(rows) == n
        for start in range(0, len(rows), side):
            block = slice(start, start + side)
            for first in range(start if whole else 0, length, side):
                others = slice(first, first + side)
                squared = self._squared(rows[block], others, buffer, mirrored=whole and first == start)
                squared = squared.view(integer)
                _keep_smallest(squared, 1, first, kept[block], columns[block])
                if whole and first > start:
                    _keep_smallest(squared[:, : n - first], 0, start, kept[others], columns[others])
        return values, columns

    def _squared(self, rows: Tensor, others: slice, buffer: Tensor, *, mirrored: bool) -> Tensor:
        """Squared distances of the rows with these indices to others, or to themselves (mirrored), in ``buffer``.

        Those of a row to itself are infinite.
        """
        right = self.rows[others]
        squared = buffer[: len(rows), : len(right)]
        dim = right.shape[1] - 2 * _NORM_PARTS
        for start in range(0, len(rows), _SQUARE):
            part = slice(start, min(start + _SQUARE, len(rows)))
            row, norm2, ones = self.rows.index_select(0, rows[part]).split((dim, _NORM_PARTS, _NORM_PARTS), dim=1)
            left = torch.cat((-2 * row, ones, norm2), dim=1)
            first = start if mirrored else 0
            out = squared[part, first:]
            if left.dtype == self.dtype:
                torch.mm(left, right[first:].T, out=out)
            else:
                torch.mm(left, right[first:].T, out_dtype=self.dtype, out=out)
            if mirrored:
                squared[part.stop :, part] = squared[part, part.stop : len(rows)].T
        own = rows - others.start
        place = own.clamp(0, len(right) - 1)
        itself = torch.arange(len(rows), device=rows.device), place
        squared[itself] = torch.where(place == own, torch.inf, squared[itself])
        return squared


def _keep_smallest(squared: Tensor, axis: int, first: int, values: Tensor, columns: Tensor) -> None:
    """Put into ``values``, shape (b, k), what is smaller in ``squared``, and whose it is into ``columns``.

    The k groups with the smallest minima hold them all, so only these are sorted.

    Args:
        squared: squared distances of the b rows to others.
        axis: of ``squared``, along which the others are.
        first: the index of the first of them.
        values: the k smallest seen so far, ascending.
        columns: the indices of these rows.
    """
    k, width = values.shape[1], squared.shape[axis]
    count = width // _GROUP
    minima = squared.unflatten(axis, (_GROUP, count)).amin(axis)
    groups = (minima if axis else minima.T).topk(min(k, count), largest=False, sorted=False).indices
    places = (groups.unsqueeze(2) + torch.arange(0, width, count, device=squared.device)).flatten(1)
    found = (squared if axis else squared.T).gather(1, places)
    least = torch.cat((values, found), dim=1).topk(k, largest=False)
    values.copy_(least.values)
    columns.copy_(torch.cat((columns, places + first), dim=1).gather(1, least.indices))


def blocked(size: int, device: torch.device) -> int:
    """The size of a block on this device, given that on the CPU."""
    return size if device.type == "cpu" else _LAUNCH * size


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which ``device`` gives products of numbers that bfloat16 represents fastest, with float32 sums."""
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older versions of torch cannot tell
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    return torch.float32
