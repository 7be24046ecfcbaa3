"""Distances to the two nearest neighbours: candidates from fast products, exact distances, and a proof of both."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from embedgeo.functional.moments import chunk_length, row_chunks
from embedgeo.functional.precision import accumulator_dtype, row_norms

_CANDIDATES = 8, 24
"""Number of candidates of each row; the second for rows that the first does not settle."""

_GROUP = 16
"""Number of columns of which only the smallest value is looked at first."""

_SQUARE = 512
"""Rows on the side of the squares in which products of rows with themselves are taken, each pair once."""

_BLOCK_BYTES = 1 << 23
"""Bytes of squared distances held at a time."""

_SPARE = 32
"""Elements between the rows of a block, so that those of a column do not all meet in one line of the cache."""

_CACHED_ELEMENTS = 1 << 17
"""Elements of rows gathered, or centred, at a time, so that they stay in the processor's cache."""

_LAUNCH = 1 << 4
"""How many times larger blocks are where a launch costs more than a cache saves: on all but the CPU."""

_NORM_PARTS = 3
"""Columns that a squared norm is split into: three numbers of eight binary digits hold the 24 of float32."""

_SUMS_BFLOAT16 = "dtype_out" in torch.ops.aten.mm.overloads()
"""Whether products of bfloat16 can be had in float32, on CUDA."""

_NO_PRODUCT = "donot_use_mm_for_euclid_dist"


def two_nearest_distances(x: Tensor) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row.

    Candidates are found by squared distances ‖a‖² + ‖b‖² - 2ab of rows rounded to bfloat16. The distances to the first
    two candidates are then computed from the differences of the rows, in float32 with float64 sums, and so are those
    to all candidates that might be nearer but for rounding. A row is settled once its last candidate cannot be nearer.
    Rows that are not get more candidates, then products in float64, and finally the differences to all rows. Exact
    duplicates have distance 0. No setting of the process is changed, and none matters.

    Args:
        x: shape (n, d), any floating dtype, finite.

    Returns:
        Shape (n, 2), float64 (float32 on a device without), ascending, within 1e-6 relative of a float64 brute force;
        NaN where there is no such neighbour. Beyond ``x`` and one copy of it, in bfloat16 or, where that does not do,
        in float64, the memory needed is bounded by a few numbers a row.

    >>> two_nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    x, n = x.detach(), x.shape[0]
    wide = accumulator_dtype(x.device)
    nearest = torch.full((n, 2), torch.nan, dtype=wide, device=x.device)
    if n < 3:
        if n == 2:
            nearest[:, 0] = torch.linalg.vector_norm(x[0].to(wide) - x[1].to(wide))
        return nearest
    pending = torch.arange(n, device=x.device)
    if n <= _CANDIDATES[-1] + 1:
        return _compare_with_all(x, pending)
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    for dtype, rounded in ((_fast_dtype(x.device), True), (wide, False)):
        if len(pending):
            pending = _settle(x, _Operand.of(x, center, dtype, rounded=rounded), pending, nearest)
    for block in pending.split(chunk_length(n * wide.itemsize, _BLOCK_BYTES)) if len(pending) else ():
        nearest[block] = _compare_with_all(x, block)
    return nearest


class _Operand(NamedTuple):
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
        for chunk in row_chunks(x, _blocked(_CACHED_ELEMENTS, x.device)):
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

        All rows are taken in order: each product of two of them serves both. No value is waited for.
        """
        n, length = len(self.norm), len(self.rows)
        side = math.isqrt(_blocked(_BLOCK_BYTES, rows.device) // self.dtype.itemsize) // _GROUP * _GROUP or _GROUP
        buffer = self.rows.new_empty(min(side, len(rows)), min(side, length) + _SPARE, dtype=self.dtype)
        values = torch.full((len(rows), k), torch.inf, dtype=self.dtype, device=rows.device)
        columns = torch.zeros((len(rows), k), dtype=torch.int64, device=rows.device)
        whole = len(rows) == n
        for start in range(0, len(rows), side):
            block = slice(start, start + side)
            for first in range(start if whole else 0, length, side):
                others = slice(first, first + side)
                squared = self._squared(rows[block], others, buffer, mirrored=whole and first == start)
                _keep_smallest(squared, 1, first, values[block], columns[block])
                if whole and first > start:
                    kept = squared[:, : n - first]
                    _keep_smallest(kept, 0, start, values[others], columns[others])
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
        squared: squared distances to the rows from ``first`` on, which are along ``axis``; the b rows along the other.
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


def _settle(x: Tensor, operand: _Operand, pending: Tensor, nearest: Tensor) -> Tensor:
    """Fill in ``nearest`` for the pending rows whose neighbours can be proved; return the other pending rows."""
    summed = torch.promote_types(operand.dtype, torch.float32)
    if not bool(operand.norm.max().square() < torch.finfo(summed).max / 8):  # a squared distance may overflow
        return pending
    for num_candidates in _CANDIDATES:
        distances, proved = _proved(x, operand, pending, *operand.candidates(pending, num_candidates))
        nearest[pending] = distances
        pending = pending[~proved]
        if not len(pending):
            break
    return pending


def _proved(x: Tensor, operand: _Operand, rows: Tensor, values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The two smallest distances to the candidates of each row, shape (m, 2), and whether no other row is nearer, (m,).

    A row j that is nearer to row i than its second candidate has a norm of at most ``reach``: ‖i‖ plus the distance of
    that candidate, or the largest norm of all if that is less. So the rounding errors between i and j are bounded by
    the scale of i, and rows of huge norm do not loosen the bounds of the others unless they shift the mean.
    """
    norm, lost, dtype = operand.norm, operand.lost, operand.dtype
    dim, wide, summed = x.shape[1], norm.dtype, torch.promote_types(dtype, torch.float32)
    eps, tiny = torch.finfo(summed).eps, torch.finfo(summed).tiny  # of the dtype in which products are summed
    rounding = (lost / norm).nan_to_num().max() + 4 * eps
    least = values.to(wide)
    least -= torch.finfo(dtype).eps / 2 * least.abs()  # a lower bound before rounding to ``dtype``
    distances = torch.full_like(least, torch.inf)
    distances[:, :2] = _distances(x, rows, columns[:, :2], summed)
    second, own = distances[:, :2].amax(1), norm[rows]
    reach = (own + second).clamp(max=norm.max()) * (1 + 2 * rounding)
    moved = lost[rows] + rounding * reach + 4 * eps * own
    # rounding of one product and sum a column; the rest of the norms; denormals flushed to zero
    slack = eps * (dim + 8) * (own + reach).square() + 8 * dim * tiny * (1 + reach)
    bound = (second + moved).square() + slack  # rows nearer than ``second`` have less
    i, j = (least[:, 2:] < bound[:, None]).nonzero(as_tuple=True)
    distances[i, j + 2] = _distances(x, rows[i], columns[i, j + 2, None], summed).squeeze(1)
    nearest = distances.topk(2, largest=False).values
    proved = bound <= least[:, -1]
    if dtype != wide:  # what underflows in float32 is negligible beside these
        proved &= (nearest > dim**0.5 * tiny / eps).all(1)
    return nearest, proved


def _distances(x: Tensor, rows: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances of the rows of ``x`` with the indices ``rows``, shape (m,), to ``others``, shape (m, k).

    Differences are computed in ``dtype`` or, if that is wider, in the dtype of ``x``.
    """
    narrow = torch.promote_types(x.dtype, dtype)
    distances = torch.empty(others.shape, dtype=accumulator_dtype(x.device), device=x.device)
    step = chunk_length(x.shape[1] * others.shape[1], _blocked(_CACHED_ELEMENTS, x.device))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        near = x.index_select(0, others[chunk].flatten()).to(narrow).view(*others[chunk].shape, x.shape[1])
        distances[chunk] = row_norms(near.sub_(x.index_select(0, rows[chunk]).unsqueeze(1)))
    return distances


def _compare_with_all(x: Tensor, block: Tensor) -> Tensor:
    """The two smallest distances of the rows ``block``, shape (b,), to all other rows, by differences alone."""
    wide = accumulator_dtype(x.device)
    a = x.index_select(0, block).to(wide)
    distances = torch.cat(
        [torch.cdist(a, x[chunk].to(wide), compute_mode=_NO_PRODUCT) for chunk in row_chunks(x)], dim=1
    )
    distances[torch.arange(len(block), device=x.device), block] = torch.inf
    return distances.topk(2, largest=False).values


def _blocked(size: int, device: torch.device) -> int:
    """The size of a block on this device, given that on the CPU."""
    return size if device.type == "cpu" else _LAUNCH * size


def _fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which ``device`` gives products of numbers that bfloat16 represents fastest, with float32 sums."""
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older versions of torch cannot tell
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    return torch.float32
