"""Distances to the two nearest neighbours: candidates from fast products, exact distances, and a proof of both."""

import torch
from torch import Tensor

from embedgeo.functional.moments import CHUNK_ELEMENTS, blocked, chunk_length, row_chunks
from embedgeo.functional.precision import accumulator_dtype, fast_row_norms
from embedgeo.functional.products import BLOCK_BYTES, Operand, fast_dtype

_ALL = 25
"""Number of rows up to which all distances are computed at once."""

_FEW = 16
"""Number of rows up to which differences to all rows take less time, and memory, than products in float64."""

_NO_PRODUCT = "donot_use_mm_for_euclid_dist"


def two_nearest_distances(x: Tensor) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row.

    Squared distances ‖a‖² + ‖b‖² - 2ab of rows rounded to bfloat16 give a limit to those of the two nearest rows of
    each row. Distances to all that are not beyond it are then computed from the differences of the rows, in float32.
    Rows that have too many get a second, closer limit, then, if they are many, products in float64, and finally the
    differences to all rows. Exact duplicates have distance 0. No setting of the process is changed, and none matters.

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
    if n <= _ALL:
        return _compare_with_all(x, pending)
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    for dtype, rounded in ((fast_dtype(x.device), True), (wide, False)):
        if rounded or len(pending) > _FEW:
            pending = _settle(x, Operand.of(x, center, dtype, rounded=rounded), pending, nearest)
    for block in pending.split(chunk_length(n * wide.itemsize, BLOCK_BYTES)) if len(pending) else ():
        nearest[block] = _compare_with_all(x, block)
    return nearest


def _settle(x: Tensor, operand: Operand, pending: Tensor, nearest: Tensor) -> Tensor:
    """Fill in ``nearest`` for the pending rows whose neighbours can be proved; return the other pending rows."""
    finfo, limit = torch.finfo(operand.summed), None
    if not bool(operand.largest.square() < finfo.max / 8):  # a squared distance may overflow
        return pending
    for _ in range(2):  # once a row's limit is known from all others, fewer are below it
        i, j, products, limit, unsettled = operand.near(pending, limit)
        two = _measured(x, operand, pending, i, j, products)
        if operand.dtype != two.dtype:  # what underflows in float32 is negligible beside these
            unsettled |= (two.square() <= x.shape[1] * finfo.tiny / finfo.eps).any(1)
        nearest[pending] = two
        pending, limit = pending[unsettled], limit[unsettled]
        if not len(pending) or len(pending) > len(x) / 2:  # it is not the limit, then
            break
    return pending


def _measured(x: Tensor, operand: Operand, rows: Tensor, i: Tensor, j: Tensor, products: Tensor) -> Tensor:
    """The two smallest distances of each of the rows, shape (m, 2), in the pairs (``rows[i]``, j) with these products.

    Pairs with a row's two smallest products are measured first; then those whose product leaves room for a smaller
    distance.
    """
    distances = torch.full_like(products, torch.inf, dtype=operand.norm.dtype)
    limit = _two_smallest(products.to(distances.dtype), i, len(rows))[:, 1]
    for _ in range(2):
        chosen = ((products <= limit[i]) & distances.isinf()).nonzero().flatten()
        distances[chosen] = pair_distances(x, rows[i[chosen]], j[chosen], operand.summed)
        two = _two_smallest(distances, i, len(rows))
        limit = operand.limit(rows, two[:, 1])
    return two


def _two_smallest(distances: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The smallest and the second smallest of the distances of each row, shape (num_rows, 2); infinite if none."""
    first, second = distances.new_full((2, num_rows), torch.inf)
    first.scatter_reduce_(0, rows, distances, "amin")
    is_first = (distances == first[rows]).nonzero().flatten()
    one = rows.new_full((num_rows,), len(distances)).scatter_reduce_(0, rows[is_first], is_first, "amin")
    others = distances.index_fill(0, one[one < len(distances)], torch.inf)
    return torch.stack((first, second.scatter_reduce_(0, rows, others, "amin")), dim=1)


def pair_distances(x: Tensor, rows: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances of the rows of ``x`` with the indices ``rows``, shape (m,), to ``others``, shape (m,), to 1e-6.

    Differences are computed in ``dtype`` or, if that is wider, in the dtype of ``x``.
    """
    narrow = torch.promote_types(x.dtype, dtype)
    distances = torch.empty(len(rows), dtype=accumulator_dtype(x.device), device=x.device)
    step = chunk_length(x.shape[1], blocked(CHUNK_ELEMENTS, x.device))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        near = x.index_select(0, others[chunk]).to(narrow)
        distances[chunk] = fast_row_norms(near.sub_(x.index_select(0, rows[chunk])))
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
