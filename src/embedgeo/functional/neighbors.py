"""Distances to the two nearest neighbours: candidates from fast products, exact distances, and a proof of both."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from embedgeo.functional.moments import CHUNK_ELEMENTS, blocked, chunk_length, row_chunks
from embedgeo.functional.precision import accumulator_dtype, fast_row_norms, in_range, row_norms

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


DUPLICATE_TOLERANCE = 1e-5
"""How near to each other rows are one and the same, relative to the median distance from the mean, unless told."""

_FEW_COPIES = 16
"""Number of coordinates by which rows are first told apart."""

_DIRECTIONS = 4
"""Number of directions that rows are projected on, to find those near to each other."""


def merge_duplicates(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """The distinct rows of ``x``, in any order: one of each set of rows that chains of near pairs join.

    Two rows are near if their distance is at most ``tolerance`` times the median distance of the distinct rows from
    their mean. That scale neither changes with the origin nor with the order of the rows, it grows with the unit of
    the embeddings, and a few rows of huge norm (attention sinks), or many copies of one row, hardly move it.

    Args:
        x: shape (n, d), any floating dtype, finite.
        tolerance: at least 0; 0 merges rows that are equal in every coordinate only.

    Returns:
        Shape (number of distinct rows, d); ``x`` itself if all are.

    >>> merge_duplicates(torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.000001]])).shape
    torch.Size([2, 2])
    """
    kept, _ = distinct_rows(x, tolerance)
    return x if len(kept) == len(x) else x[kept]


def distinct_rows(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> tuple[Tensor, Tensor]:
    """The indices of the rows that `merge_duplicates` keeps, and which of them stands for each row.

    Returns:
        The indices, shape (number of distinct rows,), in any order; and for each row the place among them, shape (n,).
    """
    kept, place = _distinct_but_for_equal(x)
    if tolerance > 0 and len(kept) > 1:
        near, place_near = _distinct_but_for_near(x if len(kept) == len(x) else x[kept], tolerance)
        kept, place = kept[near], place_near[place]
    return kept, place


def look_distinct(x: Tensor, tolerance: float) -> bool:
    """Whether no two rows of ``x`` look like copies by a few of their coordinates; a guess, to be confirmed."""
    if len(x) < 3:
        return False
    few = x[:, :_FEW_COPIES].to(accumulator_dtype(x.device))
    place = (few - few.mean(0)) @ _directions(few)
    place = place[place[:, 0].argsort()]
    return not bool((place.diff(dim=0).abs() <= tolerance * place.std(0)).all(1).any())


def longest_reach(x: Tensor, tolerance: float) -> float:
    """A distance beyond which no two rows are near: a median distance from the mean is at most √2 r.m.s. norms."""
    narrow, wide = torch.promote_types(x.dtype, torch.float32), accumulator_dtype(x.device)
    for dtype in (narrow, wide):  # a row at a time, for many squares do not fit into one sum in float32
        norms = torch.cat([torch.linalg.vector_norm(x[chunk], dim=1, dtype=dtype) for chunk in row_chunks(x)])
        if in_range(norms.square()):
            break
    return 1.5 * tolerance * float(torch.linalg.vector_norm(norms, dtype=wide)) / len(x) ** 0.5


def _distinct_but_for_equal(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `distinct_rows`, for sets of equal rows of ``x``; all in order if there are no equal ones."""
    x = x.contiguous()  # so that each row is summed in the same order, and equal rows have equal sums
    every = torch.arange(len(x), device=x.device)
    sums = torch.empty(len(x), dtype=accumulator_dtype(x.device), device=x.device)
    for chunk in row_chunks(x):  # whose copies in that dtype stay in the processor's cache
        torch.sum(x[chunk], 1, dtype=sums.dtype, out=sums[chunk])
    sums, group = sums.unique(return_inverse=True)
    if not bool(sums.isnan().any()):
        if len(sums) == len(x):
            return every, every
        member = torch.empty_like(group[: len(sums)])
        member[group] = every
        if x.equal(x[member[group]]):
            return member, group
    rows, group = x.unique(dim=0, return_inverse=True)  # different rows have equal sums, or sums overflow
    if len(rows) == len(x):
        return every, every
    member = torch.empty_like(group[: len(rows)])
    member[group] = every
    return member, group


def _distinct_but_for_near(x: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """As `distinct_rows`, for sets of rows of ``x`` that chains of near pairs join; all in order if there are none.

    Near rows have near projections on any direction. So rows are sorted by their projections on one, and each is
    compared with those after it, as long as there are any within reach whose other projections are near, too.
    """
    norm, place = _projections(x)
    reach = tolerance * float(norm.median())
    every = torch.arange(len(x), device=x.device)
    if not 0 < reach < math.inf:
        return every, every
    order = place[:, 0].argsort()
    place = place[order]
    rounding = 8 * x.shape[1] ** 0.5 * torch.finfo(place.dtype).eps * norm[order, None].to(place.dtype)
    label = every  # by place in the order, the first row of those joined to it
    for lag in range(1, len(x)):
        within = (place[lag:] - place[:-lag]).abs() <= reach + rounding[lag:] + rounding[:-lag]
        if not bool(within[:, 0].any()):
            break
        first = (within.all(1) & (label[lag:] != label[:-lag])).nonzero().flatten()
        near = pair_distances(x, order[first], order[first + lag], place.dtype) <= reach
        label = _join(label, first[near], first[near] + lag)
    is_first = label == every
    if bool(is_first.all()):
        return every, every
    return order[is_first], torch.empty_like(every).scatter_(0, order, is_first.cumsum(0)[label] - 1)


def _projections(x: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of the rows of ``x`` from their mean, shape (n,), and their places along some directions, (n, k)."""
    n, dim = x.shape
    wide = accumulator_dtype(x.device)
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    directions = _directions(torch.empty(0, dim, dtype=wide, device=x.device))
    norm, place = (torch.empty(shape, dtype=wide, device=x.device) for shape in ((n,), (n, _DIRECTIONS)))
    for chunk in row_chunks(x, blocked(CACHED_ELEMENTS, x.device)):
        rows = x[chunk].to(wide) - center
        norm[chunk] = row_norms(rows)
        torch.mm(rows, directions, out=place[chunk])  # in float64 no setting matters
    return norm, place


def _directions(rows: Tensor) -> Tensor:
    """Unit vectors as columns in the space of rows, shape (n, d): generic, so that no layer is constant along one."""
    dim = rows.shape[1]
    angles = torch.arange(1, dim * _DIRECTIONS + 1, dtype=rows.dtype, device=rows.device)
    directions = angles.square().sin().view(_DIRECTIONS, dim)
    return (directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)).T


def _join(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The smallest index in the same set as each index, once the sets of ``left`` and ``right`` are joined."""
    while bool((label[left] != label[right]).any()):
        least = torch.minimum(label[left], label[right])
        for side in (left, right):
            label = label.scatter_reduce(0, label[side], least, "amin")
        while not label.equal(jumped := label[label]):
            label = jumped
    return label


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


_TOLERANCE = 1e-9
"""Relative error of a distance up to which it is taken from a product."""


def nearest_distances(x: Tensor, k: int) -> Tensor:
    """Euclidean distances of every row to its k nearest other rows.

    Squared distances ‖a‖² + ‖b‖² - 2ab of the centred rows are taken in float64, a block of rows at a time. Where the
    bound of their error is small enough, the k smallest are those of the neighbours, for a change of all values by at
    most ε changes the k-th smallest by at most ε. In the other rows, those with a neighbour at less than some
    hundredths of their norm, the distances that the bound leaves among the k smallest are taken from differences.
    Exact duplicates have distance 0. No setting of the process is changed, and none matters.

    Args:
        x: shape (n, d), any floating dtype, finite.
        k: number of neighbours.

    Returns:
        Shape (n, k), float64 (float32 on a device without), ascending, within 1e-6 relative of a float64 brute force;
        NaN where there is no such neighbour. Beyond ``x`` and a copy of it in float64, the memory needed is bounded by
        k numbers a row.

    >>> nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]), 2)
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    x, n = x.detach(), x.shape[0]
    wide = accumulator_dtype(x.device)
    nearest = torch.full((n, k), torch.nan, dtype=wide, device=x.device)
    found = min(k, n - 1)
    if found < 1:
        return nearest
    operand = Operand.of(x, x.to(torch.promote_types(x.dtype, torch.float32)).mean(0), wide, rounded=False)
    length = len(operand.rows)
    step = chunk_length(length * wide.itemsize, blocked(BLOCK_BYTES, x.device))
    buffer = operand.rows.new_empty(min(step, n), length)
    for rows in torch.arange(n, device=x.device).split(step):
        squared = operand.squared(operand.left(rows), rows, slice(0, length), buffer, mirrored=False)[:, :n]
        least = squared.topk(found, largest=False).values
        distances = least.clamp(min=0).sqrt()
        farthest = operand.farthest(rows.unsqueeze(1), least)
        is_exact = (farthest <= (1 + _TOLERANCE) * distances).all(1)  # not where a square has overflowed
        if not bool(is_exact.all()):
            blurred = (~is_exact).nonzero().flatten()
            limit = operand.limit(rows[blurred], farthest[blurred, -1])
            distances[blurred] = _measured_pairs(x, rows[blurred], squared[blurred], limit, found)
        nearest[rows, :found] = distances
    return nearest


def _measured_pairs(x: Tensor, rows: Tensor, squared: Tensor, limit: Tensor, k: int) -> Tensor:
    """The k smallest distances of the rows, shape (m,), to others whose product, shape (m, n), is not above a limit."""
    i, j = (~(squared > limit.unsqueeze(1))).nonzero(as_tuple=True)
    squared.fill_(torch.inf)
    squared[i, j] = pair_distances(x, rows[i], j, squared.dtype)
    squared[torch.arange(len(rows), device=x.device), rows] = torch.inf
    return squared.topk(k, largest=False).values
