"""The smallest squared distances of each row to others, from products of all pairs of rows, a block at a time."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from embedgeo.functional.moments import blocked, row_chunks
from embedgeo.functional.precision import accumulator_dtype, fast_row_norms

_GROUP = 16
"""Number of columns of which only the smallest value is looked at first."""

_SQUARE = 256
"""Rows on the side of the squares in which products of rows with themselves are taken, each pair once."""

BLOCK_BYTES = 1 << 23
"""Bytes of squared distances held at a time."""

_SPARE = 32
"""Elements between the rows of a block, so that those of a column do not all meet in one line of the cache."""

_MANY = 256
"""How many groups and rows that may be among its nearest crowd a row: so many are not kept."""

_PAIRS = 1 << 18
"""So many are kept all the same, of few rows."""

CACHED_ELEMENTS = 1 << 17
"""Elements of rows gathered, or centred, at a time, so that they stay in the processor's cache."""

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
        lost: at least the norm of what rounding took from b, shape (n,).
        largest: the largest ‖b‖.
        rounding: the largest share of a norm that rounding took, of the sums of products, too.
        dtype: of the products.
    """

    rows: Tensor
    norm: Tensor
    lost: Tensor
    largest: Tensor
    rounding: Tensor
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
            norm[chunk] = fast_row_norms(kept)
            if rounded:
                lost[chunk] = fast_row_norms(rows.sub_(kept))
        lost *= 1 + 8 * torch.finfo(summed).eps
        rounding = (lost / norm).nan_to_num().max() + 4 * torch.finfo(summed).eps
        if rounded:  # squares that vanished, of this row and of another one
            lost += 2 * (dim * torch.finfo(summed).tiny) ** 0.5
        norm2 = norm.square()
        for part in y[:n, dim:-_NORM_PARTS].unbind(1):
            part.copy_(norm2.to(digits))
            norm2 -= part
        y[n:, :dim], y[n:, dim:-_NORM_PARTS] = 0, torch.finfo(digits).max
        y[:, -_NORM_PARTS:] = 1
        return cls(y, norm, lost, norm.max(), rounding, dtype)

    @property
    def summed(self) -> torch.dtype:
        """The dtype in which products are summed."""
        return torch.promote_types(self.dtype, torch.float32)

    def limit(self, rows: Tensor, distances: Tensor) -> Tensor:
        """The largest product that a row can have whose distance from one of these, of shape (m,), is at most this.

        Such a row has a norm of at most ``reach``: ‖i‖ plus that distance, or the largest norm if that is less. So what
        rounding changes between them is bounded by the scale of i, and rows of huge norm do not loosen the bounds of
        others unless they shift the mean.
        """
        reach = (self.norm[rows] + distances).clamp(max=self.largest) * (1 + 2 * self.rounding)
        return ((distances + self._moved(rows, reach)).square() + self._slack(rows, reach)).to(self.dtype)

    def farthest(self, rows: Tensor, products: Tensor) -> Tensor:
        """The largest distance that a row can have from one of these, of shape (m,), with this product."""
        squared = products.to(self.norm.dtype).clamp(min=0) * (1 + torch.finfo(self.dtype).eps)  # before it was rounded
        share = torch.finfo(self.summed).eps * 2 * (self.rows.shape[1] + 16)
        share = min(share, 0.25) ** 0.5  # of norms, that slack may add
        reach = ((self.norm[rows] + squared.sqrt()) * ((1 + share) / (1 - share))).clamp(max=self.largest)
        return (squared + self._slack(rows, reach)).sqrt() + self._moved(rows, reach)

    def _moved(self, rows: Tensor, reach: Tensor) -> Tensor:
        """By how much centring and rounding change distances of these rows to rows of such norms, at most."""
        return self.lost[rows] + 4 * torch.finfo(self.summed).eps * self.norm[rows] + self.rounding * reach

    def _slack(self, rows: Tensor, reach: Tensor) -> Tensor:
        """By how much products of these rows with rows of such norms differ from squared distances, at most.

        By rounding of one product and sum a column; the rest of the norms, and their errors; denormals flushed to zero.
        """
        dim, finfo = self.rows.shape[1] - 2 * _NORM_PARTS, torch.finfo(self.summed)
        return finfo.eps * (dim + 24) * (self.norm[rows] + reach).square() + 8 * dim * finfo.tiny * (1 + reach)

    def near(self, rows: Tensor, limit: Tensor | None = None) -> tuple[Tensor, ...]:
        """All pairs of one of the rows with these indices, shape (m,), and one that can be its first or second nearest.

        All rows are taken in order: each product of two of them serves both. Products are compared as integers, which
        takes less time; those that rounding made negative are below all others, too.

        Args:
            rows: their indices.
            limit: what the last call returned for these rows.

        Returns:
            The place in ``rows`` of the first of each pair, and the index of the second; their products; the largest
            products that were looked for, shape (m,); and which rows are crowded: of their pairs, none is given, (m,).
        """
        n, length = len(self.norm), len(self.rows)
        side = math.isqrt(blocked(BLOCK_BYTES, rows.device) // self.dtype.itemsize) // _GROUP * _GROUP or _GROUP
        buffer = self.rows.new_empty(min(side, len(rows)), min(side, length) + _SPARE, dtype=self.dtype)
        integer = _INTEGERS[self.dtype.itemsize]
        known = limit is not None
        limit = self.rows.new_full((len(rows),), torch.inf, dtype=self.dtype) if limit is None else limit.clone()
        many = max(_MANY, _PAIRS // len(rows))
        least = limit.unsqueeze(1).repeat(1, 2)
        most, two = limit.view(integer), least.view(integer)
        count = torch.zeros_like(rows)
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        whole = len(rows) == n
        for start in range(0, len(rows), side):
            left = self.left(rows[start : start + side])
            for first in range(start if whole else 0, length, side):
                others = slice(first, first + side)
                is_mirrored = whole and first == start
                squared = self.squared(left, rows[start : start + side], others, buffer, mirrored=is_mirrored)
                squared = squared.view(integer)
                for axis, begin, other in ((1, start, first), (0, first, start))[: 2 if whole and first > start else 1]:
                    groups = (squared if axis else squared[:, : n - first]).unflatten(axis, (_GROUP, -1))
                    minima = groups.amin(axis) if axis else groups.amin(axis).T.contiguous()
                    own = slice(begin, begin + len(minima))
                    if not known:
                        one, place = minima.min(1, keepdim=True)
                        further = minima.view(self.dtype).scatter(1, place, torch.inf).view(integer)
                        both = torch.cat((two[own], one, further.amin(1, keepdim=True)), dim=1)
                        two[own] = both.topk(2, largest=False).values
                        limit[own] = self.limit(rows[own], self.farthest(rows[own], least[own, 1]))
                    i, group = (minima <= most[own].unsqueeze(1)).nonzero(as_tuple=True)
                    count[own] += i.bincount(minlength=len(minima))
                    few = (count[own][i] <= many).nonzero().flatten()
                    i, group = i[few], group[few]
                    members = groups[i, :, group] if axis else groups.movedim(0, -1)[group, i]
                    at, place = (members <= most[own][i].unsqueeze(1)).nonzero(as_tuple=True)
                    i = begin + i[at]
                    count += i.bincount(minlength=len(count))
                    few = (count[i] <= many).nonzero().flatten()
                    pairs.append((i[few], (other + place * minima.shape[1] + group[at])[few], members[at, place][few]))
        i, j, products = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        kept = ((products <= most[i]) & (count[i] <= many)).nonzero().flatten()
        return i[kept], j[kept], products[kept].view(self.dtype), limit, count > many

    def left(self, rows: Tensor) -> Tensor:
        """The rows with these indices as (-2a, ones, ‖a‖² in parts), whose products with ``self.rows`` are wanted."""
        dim = self.rows.shape[1] - 2 * _NORM_PARTS
        left = self.rows.index_select(0, rows)
        norm2 = left[:, dim:-_NORM_PARTS].clone()
        left[:, :dim] *= -2
        left[:, dim:-_NORM_PARTS] = 1
        left[:, -_NORM_PARTS:] = norm2
        return left

    def squared(self, left: Tensor, rows: Tensor, others: slice, buffer: Tensor, *, mirrored: bool) -> Tensor:
        """Squared distances of the rows with these indices to others, or to themselves (mirrored), in ``buffer``.

        Those of a row to itself are infinite.
        """
        right = self.rows[others]
        squared = buffer[: len(rows), : len(right)]
        for start in range(0, len(rows), _SQUARE):
            part = slice(start, min(start + _SQUARE, len(rows)))
            first = start if mirrored else 0
            out = squared[part, first:]
            if left.dtype == self.dtype:
                torch.mm(left[part], right[first:].T, out=out)
            else:
                torch.mm(left[part], right[first:].T, out_dtype=self.dtype, out=out)
            if mirrored:
                squared[part.stop :, part] = squared[part, part.stop : len(rows)].T
        own = rows - others.start
        place = own.clamp(0, len(right) - 1)
        itself = torch.arange(len(rows), device=rows.device), place
        squared[itself] = torch.where(place == own, torch.inf, squared[itself])
        return squared


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which ``device`` gives products of numbers that bfloat16 represents fastest, with float32 sums."""
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older versions of torch cannot tell
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    return torch.float32
