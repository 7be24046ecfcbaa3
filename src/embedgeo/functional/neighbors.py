"""Distances to the two nearest neighbours: fast candidates, proved to be the right ones, measured exactly."""

from collections.abc import Iterator

import torch
from torch import Tensor

from embedgeo.functional.moments import row_chunks
from embedgeo.functional.precision import accumulator_dtype, matmul_precision, row_norms

_CANDIDATES = 6, 24
"""How many other rows are measured exactly: more for the rows that the first number leaves open."""

_GROUPS = 512
"""Groups of columns in which the smallest values of a row are looked for."""

_BLOCK_ELEMENTS = 1 << 21
"""Distances held at a time."""

_GATHERED_ELEMENTS = 1 << 18
"""Elements of candidates gathered at a time, so that they stay in the processor's cache."""

_MIRRORED_ROWS = 4096
"""Up to so many rows, each product is kept (half of all pairs' are) to be used for both its rows."""

_PADDING = 16
"""Elements left free between the rows of kept products: without them, columns are read half as fast."""

_NO_PRODUCT = "donot_use_mm_for_euclid_dist"


def two_nearest_distances(x: Tensor) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row.

    Candidates come from squared distances ‖a‖² + ‖b‖² - 2ab in bfloat16 and are measured from the difference of
    the rows, in float32 with float64 sums. A row whose second distance lies below every other candidate by more
    than the rounding of those products can have shifted is done; the others are given more candidates, then taken
    again with products in float32, then in float64, and at last by differences alone. Exact duplicates have
    distance 0.

    Args:
        x: shape (n, d), any floating dtype, finite.

    Returns:
        Shape (n, 2), float64, ascending, to 1e-6 relative of a float64 brute force; NaN where there is no
        such neighbour. Memory beyond ``x`` and one copy of it is bounded at any n.

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
    for dtype, rounded in ((torch.float32, True), (torch.float32, False), (wide, False)):
        if len(pending):
            pending = _screen(x, center, pending, nearest, dtype, rounded=rounded)
    for block in _blocks(pending, n):
        nearest[block] = _compare_with_all(x, block)
    return nearest


def _screen(
    x: Tensor, center: Tensor, pending: Tensor, nearest: Tensor, dtype: torch.dtype, *, rounded: bool
) -> Tensor:
    """Fill in ``nearest`` for the pending rows whose candidates are proved right; return the other pending rows.

    A row j nearer to row i than i's second candidate has a norm of at most ``reach``: ‖i‖ plus that distance, or the
    largest norm of all where that is less. So everything that can have gone wrong between i and j is bounded by the
    scale of i, and one row of huge norm spoils nothing.
    """
    n, dim = x.shape
    wide = nearest.dtype
    y = torch.empty(n, dim, dtype=dtype, device=x.device)
    norm, lost = nearest.new_empty(n), nearest.new_zeros(n)
    for chunk in row_chunks(x):
        rows = (x[chunk].to(torch.promote_types(center.dtype, dtype)) - center).to(dtype)
        y[chunk] = rows.bfloat16() if rounded else rows
        norm[chunk] = row_norms(y[chunk])
        if rounded:
            lost[chunk] = torch.linalg.vector_norm(rows.sub_(y[chunk]), dim=1).to(wide)
    eps, tiny, huge = torch.finfo(dtype).eps, torch.finfo(dtype).tiny, torch.finfo(dtype).max
    if not bool(norm.max().square() < huge / 8):  # a squared distance may overflow
        return pending
    norm2 = norm.square().to(dtype)
    rounding = (lost / norm).nan_to_num().max() + 4 * eps
    left = []
    for block, squared in _squared_distances(y, norm2, pending, reduced=rounded):
        squared[torch.arange(len(block), device=x.device), block] = torch.inf
        open_rows, distances = block, squared
        for num_candidates in _CANDIDATES:
            values, candidates = _smallest(distances, num_candidates)
            nearest[open_rows] = _compare_with(x, open_rows, candidates, dtype)
            second, own = nearest[open_rows, 1], norm[open_rows]
            reach = (own + second).clamp(max=norm.max()) * (1 + 2 * rounding)
            moved = lost[open_rows] + rounding * reach + 4 * eps * own
            slack = eps * (2 * (dim + 4) * own * reach + 32 * reach.square()) + 8 * dim * tiny
            beyond = values[:, -1].to(wide) + own.square()
            proved = (second + moved).square() + slack <= beyond
            if dtype != wide:  # nothing underflowed in float32
                proved &= (nearest[open_rows].square() > dim * tiny / eps).all(1)
            open_rows, distances = open_rows[~proved], distances[~proved]
            if not len(open_rows):
                break
        left.append(open_rows)
    return torch.cat(left)


def _squared_distances(y: Tensor, norm2: Tensor, pending: Tensor, *, reduced: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of the rows ``pending``, shape (b,), and ‖b‖² - 2ab of each of them with all n rows, shape (b, n or more).

    All are in one buffer, which the next block overwrites and the caller may; its columns beyond n, up to a whole
    number of groups, are infinite. Where all of no more than `_MIRRORED_ROWS` rows are pending (so, in order), each
    product is taken once: a block has those with earlier rows from the panels of these.
    """
    n = len(y)
    width = -(-n // _GROUPS) * _GROUPS
    squared = y.new_full((min(len(pending), _block_rows(n)), width), torch.inf)
    mirrored = len(pending) == n <= _MIRRORED_ROWS
    panels: list[tuple[int, Tensor]] = []
    for block in _blocks(pending, n):
        start = int(block[0]) if mirrored else 0
        panel = y.new_empty(len(block), n - start + _PADDING)[:, : n - start]
        with matmul_precision(y.device, reduced=reduced):
            torch.mm(y.index_select(0, block).mul_(-2), y[start:].T, out=panel)
        rows = squared[: len(block)]
        torch.add(panel, norm2[start:], out=rows[:, start:n])
        for first, earlier in panels:
            columns = slice(first, first + len(earlier))
            mirror = earlier[:, start - first : start - first + len(block)].T
            torch.add(mirror, norm2[columns], out=rows[:, columns])
        if mirrored:
            panels.append((start, panel))
        yield block, rows


def _smallest(squared: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest values of each row of ``squared``, shape (b, whole groups), ascending, and their columns.

    First the groups of columns with the smallest minima, which hold them all; then the values of those groups.
    """
    groups = squared.unflatten(1, (-1, _GROUPS)).amin(1).topk(k, largest=False, sorted=False)
    members = torch.arange(0, squared.shape[1], _GROUPS, device=squared.device)
    columns = (groups.indices.unsqueeze(2) + members).flatten(1)
    values, places = squared.gather(1, columns).topk(k, largest=False)
    return values, columns.gather(1, places)


def _compare_with(x: Tensor, block: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """The two smallest distances of the rows ``block``, shape (b,), to the rows ``others``, shape (b, k).

    Differences are taken in ``dtype``, or in that of ``x``, if wider.
    """
    narrow = torch.promote_types(x.dtype, dtype)
    distances = []
    step = max(1, _GATHERED_ELEMENTS // max(1, others.shape[1] * x.shape[1]))
    for rows, columns in zip(block.split(step), others.split(step), strict=True):
        gathered = x.index_select(0, columns.reshape(-1)).to(narrow).view(*columns.shape, -1)
        gathered -= x.index_select(0, rows).unsqueeze(1)
        distances.append(row_norms(gathered))
    return torch.cat(distances).topk(2, largest=False).values


def _compare_with_all(x: Tensor, block: Tensor) -> Tensor:
    """The two smallest distances of the rows ``block``, shape (b,), to every other row."""
    wide = accumulator_dtype(x.device)
    a = x.index_select(0, block).to(wide)
    distances = torch.cat(
        [torch.cdist(a, x[chunk].to(wide), compute_mode=_NO_PRODUCT) for chunk in row_chunks(x)], dim=1
    )
    distances[torch.arange(len(block), device=x.device), block] = torch.inf
    return distances.topk(2, largest=False).values


def _blocks(rows: Tensor, n: int) -> tuple[Tensor, ...]:
    return rows.split(_block_rows(n)) if len(rows) else ()


def _block_rows(n: int) -> int:
    """How many rows' distances to all n rows fit into a block."""
    return max(1, _BLOCK_ELEMENTS // n)
