"""Distances to the two nearest neighbours: candidates from fast products, exact distances, and a proof of both."""

import torch
from torch import Tensor

from embedgeo.functional.moments import blocked, chunk_length, row_chunks
from embedgeo.functional.precision import accumulator_dtype, row_norms
from embedgeo.functional.products import BLOCK_BYTES, CACHED_ELEMENTS, Operand, fast_dtype

_CANDIDATES = 8, 24
"""Number of candidates of each row; the second for rows that the first does not settle."""

_FEW = 16
"""Number of rows up to which differences to all rows take less time, and memory, than products in float64."""

_NO_PRODUCT = "donot_use_mm_for_euclid_dist"


def two_nearest_distances(x: Tensor) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row.

    Candidates are found by squared distances ‖a‖² + ‖b‖² - 2ab of rows rounded to bfloat16. The distances to the first
    two candidates are then computed from the differences of the rows, in float32 with float64 sums, and so are those
    to all candidates that might be nearer but for rounding. A row is settled once its last candidate cannot be nearer.
    Rows that are not get more candidates, then, if they are many, products in float64, and finally the differences to
    all rows. Exact duplicates have distance 0. No setting of the process is changed, and none matters.

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
    for dtype, rounded in ((fast_dtype(x.device), True), (wide, False)):
        if rounded or len(pending) > _FEW:
            pending = _settle(x, Operand.of(x, center, dtype, rounded=rounded), pending, nearest)
    for block in pending.split(chunk_length(n * wide.itemsize, BLOCK_BYTES)) if len(pending) else ():
        nearest[block] = _compare_with_all(x, block)
    return nearest


def _settle(x: Tensor, operand: Operand, pending: Tensor, nearest: Tensor) -> Tensor:
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


def _proved(x: Tensor, operand: Operand, rows: Tensor, values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
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
    step = chunk_length(x.shape[1] * others.shape[1], blocked(CACHED_ELEMENTS, x.device))
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
