"""Distances to the two nearest neighbours: candidates from fast products, exact distances, and a proof of both."""

from collections.abc import Iterator

import torch
from torch import Tensor

from embedgeo.functional.moments import chunk_length, row_chunks
from embedgeo.functional.precision import accumulator_dtype, matmul_precision, row_norms

_CANDIDATES = 8, 24
"""Number of candidates of each row; the second for rows that the first does not settle."""

_GROUPS = 512
"""Number of groups of columns in which the smallest values of a row are searched for."""

_BLOCK_BYTES = 1 << 24
"""Bytes of squared distances held at a time."""

_GATHERED_ELEMENTS = 1 << 18
"""Elements of rows gathered at a time, so that they stay in the processor's cache."""

_NORM_PARTS = 3
"""Columns that a squared norm is split into: three numbers of eight binary digits hold the 24 of float32."""

_NO_PRODUCT = "donot_use_mm_for_euclid_dist"


def two_nearest_distances(x: Tensor) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row.

    Candidates are found by squared distances ‖a‖² + ‖b‖² - 2ab of rows rounded to bfloat16. The distances to the first
    two candidates are then computed from the differences of the rows, in float32 with float64 sums, and so are those
    to all candidates that might be nearer but for rounding. A row is settled once its last candidate cannot be nearer.
    Rows that are not get more candidates, then products in float32, then in float64, and finally the differences to
    all rows. Exact duplicates have distance 0.

    Args:
        x: shape (n, d), any floating dtype, finite.

    Returns:
        Shape (n, 2), float64 (float32 on a device without), ascending, within 1e-6 relative of a float64 brute force;
        NaN where there is no such neighbour. Beyond ``x`` and one copy of it, in float64 at worst, the memory needed
        is bounded whatever n is.

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
    if n <= _CANDIDATES[-1] + 1:
        return _compare_with_all(x, torch.arange(n, device=x.device))
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    pending = torch.arange(n, device=x.device)
    for dtype, rounded in ((_fast_dtype(x.device), True), (torch.float32, False), (wide, False)):
        if len(pending):
            pending = _screen(x, center, pending, nearest, dtype, rounded=rounded)
    for block in _blocks(pending, n, wide):
        nearest[block] = _compare_with_all(x, block)
    return nearest


def _screen(
    x: Tensor, center: Tensor, pending: Tensor, nearest: Tensor, dtype: torch.dtype, *, rounded: bool
) -> Tensor:
    """Fill in ``nearest`` for the pending rows whose neighbours can be proved; return the other pending rows.

    A row j that is nearer to row i than its second candidate has a norm of at most ``reach``: ‖i‖ plus the distance of
    that candidate, or the largest norm of all if that is less. So the rounding errors between i and j are bounded by
    the scale of i, and rows of huge norm do not loosen the bounds of the others unless they shift the mean.
    """
    dim, wide = x.shape[1], nearest.dtype
    summed = torch.promote_types(dtype, torch.float32)  # the dtype in which products are summed
    eps, tiny, huge = torch.finfo(summed).eps, torch.finfo(summed).tiny, torch.finfo(summed).max
    y, norm, lost = _augmented(x, center, dtype, rounded=rounded)
    if not bool(norm.max().square() < huge / 8):  # a squared distance may overflow
        return pending
    rounding = (lost / norm).nan_to_num().max() + 4 * eps
    left = []
    for block, to_all in _squared_distances(y, pending, reduced=rounded):
        to_all[torch.arange(len(block), device=x.device), block] = torch.inf
        rows, squared = block, to_all
        for num_candidates in _CANDIDATES:
            values, candidates = _smallest(squared, num_candidates)
            least = values.to(wide)
            least -= torch.finfo(dtype).eps / 2 * least.abs()  # a lower bound before rounding to ``dtype``
            distances = torch.full_like(least, torch.inf)
            distances[:, :2] = _distances(x, rows[:, None].expand(-1, 2), candidates[:, :2], summed)
            second, own = distances[:, :2].amax(1), norm[rows]
            reach = (own + second).clamp(max=norm.max()) * (1 + 2 * rounding)
            moved = lost[rows] + rounding * reach + 4 * eps * own
            # rounding of one product and sum a column; the rest of the norms; denormals flushed to zero
            slack = eps * (dim + 8) * (own + reach).square() + 8 * dim * tiny * (1 + reach)
            bound = (second + moved).square() + slack  # rows nearer than ``second`` have less
            i, j = (least[:, 2:] < bound[:, None]).nonzero(as_tuple=True)
            distances[i, j + 2] = _distances(x, rows[i], candidates[i, j + 2], summed)
            nearest[rows] = distances.topk(2, largest=False).values
            proved = bound <= least[:, -1]
            if dtype != wide:  # what underflows in float32 is negligible beside these
                proved &= (nearest[rows] > dim**0.5 * tiny / eps).all(1)
            rows, squared = rows[~proved], squared[~proved]
            if not len(rows):
                break
        left.append(rows)
    return torch.cat(left)


def _augmented(x: Tensor, center: Tensor, dtype: torch.dtype, *, rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Centred rows b as (b, ‖b‖² in parts, ones), shape (n, d + parts + ones); ‖b‖ and the norm of its rounding, (n,).

    Their products with (-2a, ones, ‖a‖² in parts) are squared distances, so that nothing larger than these is rounded
    to ``dtype``.
    """
    n, dim = x.shape
    summed, wide = torch.promote_types(dtype, torch.float32), accumulator_dtype(x.device)
    digits = torch.bfloat16 if rounded else dtype
    y = torch.empty(n, dim + 2 * _NORM_PARTS, dtype=dtype, device=x.device)
    norm, lost = (torch.zeros(n, dtype=wide, device=x.device) for _ in range(2))
    for chunk in row_chunks(x):
        rows = (x[chunk].to(torch.promote_types(center.dtype, summed)) - center).to(summed)
        kept = rows.to(digits).to(summed)
        y[chunk, :dim] = kept
        norm[chunk] = row_norms(kept)
        if rounded:
            lost[chunk] = row_norms(rows.sub_(kept))
    norm2 = norm.square()
    for part in y[:, dim:-_NORM_PARTS].unbind(1):
        part.copy_(norm2.to(digits))
        norm2 -= part
    y[:, -_NORM_PARTS:] = 1
    return y, norm, lost


def _squared_distances(y: Tensor, pending: Tensor, *, reduced: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of the rows ``pending``, shape (b,), with the squared distances to all n rows, shape (b, n or more).

    All blocks share one buffer, which the caller may overwrite. Its columns beyond n, which fill up the last group, are
    infinite.
    """
    n, dim = len(y), y.shape[1] - 2 * _NORM_PARTS
    blocks = _blocks(pending, n, y.dtype)
    buffer = y.new_empty(len(blocks[0]), -(-n // _GROUPS) * _GROUPS)
    buffer[:, n:] = torch.inf
    for block in blocks:
        row, norm2, ones = y.index_select(0, block).split((dim, _NORM_PARTS, _NORM_PARTS), dim=1)
        squared = buffer[: len(block)]
        with matmul_precision(y.device, reduced=reduced):
            torch.mm(torch.cat((-2 * row, ones, norm2), dim=1), y.T, out=squared[:, :n])
        yield block, squared


def _smallest(squared: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest values of each row of ``squared``, shape (b, whole groups), ascending, and their columns.

    The k groups of columns with the smallest minima hold them all, so only these are sorted.
    """
    groups = squared.unflatten(1, (-1, _GROUPS)).amin(1).topk(k, largest=False, sorted=False)
    members = torch.arange(0, squared.shape[1], _GROUPS, device=squared.device)
    columns = (groups.indices.unsqueeze(2) + members).flatten(1)
    values, places = squared.gather(1, columns).topk(k, largest=False)
    return values, columns.gather(1, places)


def _distances(x: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances between the rows ``left`` and ``right`` of ``x``, in the shape of these indices.

    Differences are computed in ``dtype`` or, if that is wider, in the dtype of ``x``.
    """
    narrow = torch.promote_types(x.dtype, dtype)
    step = chunk_length(x.shape[1], _GATHERED_ELEMENTS)
    distances = [
        row_norms(x.index_select(0, b).to(narrow).sub_(x.index_select(0, a)))
        for a, b in zip(left.flatten().split(step), right.flatten().split(step), strict=True)
    ]
    return torch.cat(distances).view(left.shape)


def _compare_with_all(x: Tensor, block: Tensor) -> Tensor:
    """The two smallest distances of the rows ``block``, shape (b,), to all other rows, by differences alone."""
    wide = accumulator_dtype(x.device)
    a = x.index_select(0, block).to(wide)
    distances = torch.cat(
        [torch.cdist(a, x[chunk].to(wide), compute_mode=_NO_PRODUCT) for chunk in row_chunks(x)], dim=1
    )
    distances[torch.arange(len(block), device=x.device), block] = torch.inf
    return distances.topk(2, largest=False).values


def _blocks(rows: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Split rows so that the distances of each block to all n rows, in ``dtype``, fit into ``_BLOCK_BYTES``."""
    return rows.split(chunk_length(n * dtype.itemsize, _BLOCK_BYTES)) if len(rows) else ()


def _fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which ``device`` multiplies numbers that bfloat16 represents fastest, with float32 sums."""
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older versions of torch cannot tell
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    return torch.float32
