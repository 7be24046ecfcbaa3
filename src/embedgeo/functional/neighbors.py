"""Nearest neighbours: their distances, and copies among rows.

`Neighbors` computes all distances among at most 256 rows, in float64. Among more rows it finds the
few nearest of each row in three turns:

1. It multiplies rows that are rounded to bfloat16, or to float32 where those are multiplied faster.
   Their products tell roughly how far rows are apart.
2. It computes the distances to the rows with the smallest products from differences. These say how
   large the product of a nearer row can be, and it computes the distances of all rows up to that.
3. It leaves rows for which there are too many of these to products in float64.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from embedgeo.functional.moments import chunk_length, row_chunks
from embedgeo.functional.precision import (
    accumulator_dtype,
    matmul_precision,
    norms_of_squares,
    quick_row_norms,
    row_norms,
    search_dtype,
)

_FEW_ROWS = 256  # among which all distances take less time than a search
_BLOCK = 1 << 24  # products that are looked at together at most; four times as many if shared
_FLOAT64_BLOCK = 1 << 20  # distances in float64 that are held at a time
_STRIP_ROWS = 256  # rows that are multiplied at a time on a CPU
_GROUP = 16  # products of a row of which only the smallest is looked at first
_STRIP_GROUPS = _STRIP_ROWS // _GROUP  # of a column's products with a strip
_CROWDED = 32  # products in float64 take less time than differences to one in so many rows
_NORM_PARTS = 3  # numbers in bfloat16 that together have the 24 binary digits of float32
_EXACT = 1e-6  # relative error of a squared distance up to which it is taken from a product
_TIED = 1e-6  # relative difference of distances up to which they are equal, as they are known
_DIRECTIONS = 4  # number of directions that rows are projected on, to find those near to each other

DUPLICATE_TOLERANCE = 1e-5
"""Default of how near rows are taken for copies of each other, relative to the median distance from
the mean.
"""


def two_nearest_distances(x: Tensor) -> Tensor:
    """Return the Euclidean distances of every row to its nearest and second nearest other row.

    Exact duplicates have distance 0. Settings of the process, such as the precision of products in
    float32, neither matter nor change. Beyond copies of ``x`` the memory needed is bounded by a
    block of products and a few numbers a row.

    Args:
        x: shape (n, d), any floating dtype, finite.

    Returns:
        Shape (n, 2), float64 (float32 on a device without), ascending, within 1e-6 relative of a
        float64 brute force; NaN where there is no such neighbour.

    >>> two_nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    neighbors = Neighbors(x)
    return neighbors.nearest(neighbors.every).distances


# computes those of rows at indices (m,) to others
PairDistances = Callable[[Tensor, Tensor], Tensor]


class Nearest(NamedTuple):
    """The two nearest other rows of every row."""

    # shape (n, 2), float64 (float32 on a device without), ascending; NaN where there is none
    distances: Tensor
    places: Tensor  # of these rows, shape (n, 2), int64; any where there is none


class Neighbors:
    """Finds copies and nearest neighbours among the same rows, once or several times.

    Args:
        x: shape (n, d), any floating dtype, finite.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        self.every = torch.arange(len(x), device=x.device)

    @cached_property
    def _rounded(self) -> "RoundedRows":
        return RoundedRows.of(self.x, self._projected)

    @cached_property
    def _projected(self) -> "Projections":
        return Projections.of(self.x)

    def distinct(self, tolerance: float = DUPLICATE_TOLERANCE) -> tuple[Tensor, Tensor]:
        """Find the distinct rows: see `merge_duplicates`.

        Returns:
            Indices of the distinct rows, ascending, each the first of its copies, and for each row
            the place of its copy among them, (n,).
        """
        kept = self.every
        place = kept
        projected = self._projected
        # copies first, since the scale is that of the distinct rows; those are next to each other
        for most, share in ((1, 0.0), (len(self.x), tolerance)):
            if len(kept) < 2:
                continue
            reach = 0.0
            if share:
                is_all = len(kept) == len(self.x)
                norms = (projected if is_all else Projections.of(self.x[kept])).norms
                reach = share * float(norms.median().nan_to_num(posinf=0))
            i, j = projected.pairs(kept, reach, most)
            is_near = pair_distances(self.x, kept[i], kept[j]) <= reach
            i, j = i[is_near], j[is_near]
            if len(i):
                label, of_kept = _joined(len(kept), i, j).unique(return_inverse=True)
                kept = kept[label]
                place = of_kept[place]
        return kept, place

    def nearest(
        self,
        rows: Tensor,
        apart: Tensor | None = None,
        together: Tensor | None = None,
    ) -> Nearest:
        """Find the two nearest of some rows among these.

        Args:
            rows: indices of these rows, shape (m,): all of them are ``every``. Places are among
                them.
            apart: labels of all rows, shape (n,), int64; rows of one label are not each other's
                neighbours. Default: all may be.
            together: labels of all rows; only rows of one label are each other's neighbours.
                Default: all may be.
        """
        apart, together = (None if each is None else each[rows] for each in (apart, together))
        if together is None:
            return self._nearest(rows, apart, None)
        order = together.argsort()
        found = self._nearest(rows[order], None if apart is None else apart[order], together[order])
        back = order.argsort()
        return Nearest(found.distances[back], order[found.places[back]])

    def _nearest(
        self,
        rows: Tensor,
        apart: Tensor | None,
        together: Tensor | None,
    ) -> Nearest:
        """Find the two nearest of these rows among each other; labels are theirs, and ``together``
        ascends.
        """
        if len(rows) <= _FEW_ROWS:
            every = torch.arange(len(rows), device=rows.device)
            return Float64Rows.of(self.x[rows]).nearest(every, apart, together)
        rounded = self._rounded if rows is self.every else self._rounded.part(rows)
        nearest, is_known = rounded.nearest(
            lambda i, j: pair_distances(self.x, rows[i], rows[j]), apart, together
        )
        pending = (~is_known).nonzero().flatten()
        if len(pending):
            exact = Float64Rows.of(self.x[rows]).nearest(pending, apart, together)
            nearest.distances[pending], nearest.places[pending] = exact
        return nearest


def _exclude(
    distances: Tensor,
    rows: Tensor | slice,
    apart: Tensor | None,
    together: Tensor | None = None,
    columns: slice = slice(None),
) -> Tensor:
    """Make distances of some rows to others infinite, in place, where labels forbid neighbours."""
    if apart is not None:
        distances.masked_fill_(apart[rows, None] == apart[columns], torch.inf)
    if together is not None:
        distances.masked_fill_(together[rows, None] != together[columns], torch.inf)
    return distances


def _smallest(distances: Tensor) -> Nearest:
    """Take the two smallest distances of each row of shape (m, n); NaN where they are infinite."""
    nearest, places = distances.topk(min(2, distances.shape[1]), largest=False)
    nearest.masked_fill_(nearest.isinf(), torch.nan)
    missing = 0, 2 - nearest.shape[1]
    return Nearest(pad(nearest, missing, value=torch.nan), pad(places, missing))


def pair_distances(x: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Compute the distances of rows of ``x``, at indices (m,), to others from their differences."""
    if not len(rows):
        return x.new_empty(0, dtype=accumulator_dtype(x.device))
    # of a fourth as many pairs the differences, and squares, stay in the processor's nearest cache
    step = max(1, chunk_length(x.shape[1], x.device) // 4)
    pairs = torch.stack((rows, others), 1)
    signs = x.new_tensor([[1, -1]])

    def norms(of_rows: Callable[[Tensor], Tensor]) -> Tensor:
        # the sum of a bag, one row times 1 and another times -1, is their difference, in one pass
        bags = (
            embedding_bag(pair, x, per_sample_weights=signs.expand(len(pair), 2), mode="sum")
            for pair in pairs.split(step)
        )
        return torch.cat([*map(of_rows, bags)])

    squares = norms(lambda differences: differences.square_().sum(1))
    return norms_of_squares(squares, lambda: norms(row_norms))


class Float64Rows(NamedTuple):
    """Centred rows in float64 (float32 on a device without), as the rows (b, ‖b‖², 1).

    The product with (-2a, 1, ‖a‖²) is the squared distance ‖a - b‖². Rounding changes it by at most
    (d + 24) ε (‖a‖ + ‖b‖)², where ε is the dtype's, and (‖a‖ + ‖b‖)² ≤ 2 (‖a‖² + ‖b‖²). Where that
    may be too much, the distance is computed from the rows' difference.
    """

    x: Tensor  # shape (n, d), as they were given
    values: Tensor  # shape (n, d + 2)
    squares: Tensor  # ‖b‖², shape (n,)

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Centre the rows of ``x``, shape (n, d)."""
        values = x.new_empty(len(x), x.shape[1] + 2, dtype=accumulator_dtype(x.device))
        centred = values[:, :-2]
        torch.sub(x, x.mean(0, dtype=values.dtype), out=centred)
        squares = torch.linalg.vecdot(centred, centred)
        values[:, -2] = squares
        values[:, -1] = 1
        return cls(x, values, squares)

    def squared_distances(
        self, rows: Tensor, apart: Tensor | None = None, together: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Compute the squared distances of these rows to all from products, infinite to themselves
        and where labels forbid neighbours, and whether products tell all.
        """
        own = self.squares.index_select(0, rows)
        left = self.values.index_select(0, rows)
        left[:, :-2] *= -2
        left[:, -2] = 1
        left[:, -1] = own
        squared = left.new_empty(len(rows), len(self.x))
        torch.mm(left, self.values.T, out=squared)  # autocast leaves one with an out alone
        squared.scatter_(1, rows[:, None], torch.inf)
        _exclude(squared, rows, apart, together)
        # a square that has overflowed is NaN, and so is the least of its row
        most = own + self.squares.amax()
        return squared, bool((squared.amin(1) > self._error / _EXACT * most).all())

    @property
    def _error(self) -> float:
        """The largest error of a squared distance beside the sum of both squared norms."""
        return 2 * (self.x.shape[1] + 24) * torch.finfo(self.squares.dtype).eps

    def nearest(
        self, rows: Tensor, apart: Tensor | None, together: Tensor | None = None
    ) -> Nearest:
        """Find the two nearest of these rows among all."""
        found = [
            self._nearest(block, apart, together)
            for block in rows.split(max(1, _FLOAT64_BLOCK // max(1, len(self.x))))
        ]
        return Nearest(*(torch.cat(each) for each in zip(*found, strict=True)))

    def _nearest(self, rows: Tensor, apart: Tensor | None, together: Tensor | None) -> Nearest:
        if not len(rows):
            none = self.squares.new_empty(0, 2)
            return Nearest(none, none.long())
        squared, is_clear = self.squared_distances(rows, apart, together)
        if is_clear:
            nearest, places = _smallest(squared)
            return Nearest(nearest.sqrt(), places)
        sums = self.squares[rows, None] + self.squares
        is_blurred = ~(squared > self._error / _EXACT * sums)
        # a row whose distance is larger than two others may be is none of the two
        sums *= self._error
        most = (squared + sums).topk(min(2, len(self.x)), largest=False).values[:, -1:]
        is_blurred &= ~(squared - sums > most)
        i, j = is_blurred.nonzero(as_tuple=True)
        distances = squared.clamp_(min=0).sqrt_()
        distances[i, j] = pair_distances(self.x, rows[i], j).to(distances.dtype)
        distances.scatter_(1, rows[:, None], torch.inf)
        return _smallest(_exclude(distances, rows, apart, together))


class RoundedRows(NamedTuple):
    """Centred rows, rounded to `search_dtype`, as the rows (b, ‖b‖² in three parts, three ones).

    The product with (-2a, three ones, ‖a‖² in three parts) is the squared distance ‖a - b‖²,
    summed in float32.

    How large can the product of a and b be, if the rows that they were rounded from are at a
    distance of at most r? Rounding moved the rows by at most ρ‖a‖ and ρ‖b‖, so that ‖a - b‖ is at
    most r + ρ (‖a‖ + ‖b‖). Then ‖b‖ ≤ ‖a‖ + r + ρ (‖a‖ + ‖b‖), from which it follows that
    ‖b‖ ≤ (‖a‖ + r) (1 + ρ) / (1 - ρ) ≤ (‖a‖ + r) (1 + 4ρ), for ρ ≤ 1/2. Let B be that, or the
    largest of all norms where that is less. Rounding of the product in float32, and of the squared
    norms, is at most (d + 48) ε (‖a‖ + B)². So the product is at most (r + ρ (‖a‖ + B))² +
    (d + 48) ε (‖a‖ + B)², or what that is rounded to, as rounding keeps the order. A row far off
    does not blur the others, as B does not grow with its norm.
    """

    values: Tensor  # shape (n, d + 6)
    norms: Tensor  # ‖b‖, or a little more where that is next to nothing, shape (n,)
    unit: Tensor  # what the rows were divided by, a power of two
    rounding: Tensor  # ρ

    @classmethod
    def of(cls, x: Tensor, projected: "Projections") -> Self:
        """Centre, scale and round the rows of ``x``, shape (n, d)."""
        n, dim = x.shape
        largest = projected.norms.max().to(x)
        # a power of two, by which division is exact
        unit = torch.where(largest > 0, largest / (2 * largest.frexp().mantissa), 1)
        values = x.new_empty(n, dim + 2 * _NORM_PARTS, dtype=search_dtype(x.device))
        values[:, -_NORM_PARTS:] = 1
        norms = torch.empty(n, dtype=accumulator_dtype(x.device), device=x.device)
        lost = torch.empty_like(norms)
        for chunk in row_chunks(x):
            rows = (x[chunk] - projected.center).div_(unit).float()
            rounded = values[chunk, :dim].copy_(rows)
            norms[chunk] = quick_row_norms(rounded.float())
            lost[chunk] = torch.linalg.vector_norm(rows.sub_(rounded), dim=1)
        rest = norms.square()
        for part in values[:, dim:-_NORM_PARTS].unbind(1):
            part.copy_(rest.bfloat16())
            rest -= part
        # so large that beside them it is nothing what products lose where numbers underflow
        norms = norms.clamp(min=2.0**-50)
        # float32 has taken less than 2⁻²⁰ from centred rows, and takes less from distances; what it
        # takes from sums of what is lost is less, or nothing beside the rounding of products
        return cls(values, norms, unit, (lost / norms).max() + 2.0**-20)

    def part(self, rows: Tensor) -> Self:
        """Take the rows at these indices."""
        return self._replace(values=self.values.index_select(0, rows), norms=self.norms[rows])

    def largest_products(self, rows: slice, distances: Tensor) -> Tensor:
        """The largest product of each of these rows with a row that is at most that far away."""
        distances = distances / self.unit
        own = self.norms[rows]
        both = own + ((own + distances) * (1 + 4 * self.rounding)).clamp(max=self.norms.max())
        error = (self.values.shape[1] + 42) * torch.finfo(torch.float32).eps
        largest = (distances + self.rounding * both).square() + error * both.square()
        dtype = self.values.dtype
        return largest.clamp(max=torch.finfo(dtype).max).to(dtype)

    def products(self, rows: slice, columns: slice, out: Tensor) -> None:
        """Multiply these rows with those of the columns, and make the products of a row with itself
        infinite.
        """
        parts = slice(-2 * _NORM_PARTS, -_NORM_PARTS)
        left = self.values[rows] * -2
        left[:, -_NORM_PARTS:] = self.values[rows, parts]
        left[:, parts] = 1
        with matmul_precision(out.device):
            # autocast leaves a product alone that has an out
            torch.mm(left, self.values[columns].T, out=out)
        out[:, rows.start - columns.start : rows.stop - columns.start].fill_diagonal_(torch.inf)

    def nearest(
        self, distance: PairDistances, apart: Tensor | None, together: Tensor | None = None
    ) -> tuple[Nearest, Tensor]:
        """Find the two nearest of each row, given what computes the distances of pairs, and labels,
        of which ``together`` ascends: see `Neighbors.nearest`.

        Returns:
            The nearest, and marks of the rows for which they are known.
        """
        n = len(self.values)
        is_on_cpu = self.values.device.type == "cpu"
        is_shared = is_on_cpu and n * n <= 4 * _BLOCK
        length = n if is_shared else min(n, _BLOCK // n or 1)
        strip = _STRIP_ROWS if is_on_cpu else length
        # an odd number of groups: numbers at a large power of two apart share places in the cache
        width = (-(-n // _GROUP) | 1) * _GROUP
        end = -(-n // _STRIP_ROWS) * _STRIP_ROWS
        room = self.values.new_empty(_start(end, width) if is_shared else length * width)
        blocks = []
        for start in range(0, n, length):
            block = Products.of(room, min(length, n - start), width, is_shared)
            for at in range(0, len(block.minima), strip):
                lines = slice(at, min(at + strip, len(block.minima)))
                rows = slice(start + lines.start, start + lines.stop)
                first = block.first(at)
                products = block.lines(lines)
                stop = n
                if together is not None:
                    stop = int(torch.searchsorted(together, together[rows.stop - 1], right=True))
                columns = slice(first, stop)
                products[:, stop - first :] = torch.inf
                self.products(rows, columns, products[:, : stop - first])
                _exclude(products[:, : stop - first], rows, apart, together, columns)
                block.group(lines)
            blocks.append(self._nearest(distance, start, block))
        *nearest, is_known = (torch.cat(each) for each in zip(*blocks, strict=True))
        return Nearest(*nearest), is_known

    def _nearest(
        self, distance: PairDistances, start: int, products: "Products"
    ) -> tuple[Tensor, ...]:
        """Find the two nearest of each row from ``start`` on by their products, and mark the rows
        for which they are known.
        """
        minima = products.minima
        m = len(minima)
        block = torch.arange(m, device=minima.device)[:, None].expand(-1, 2)
        rows = start + block
        # the smallest products of two groups; where these are infinite, a row's with itself
        least, group = minima.topk(2, largest=False)
        is_none = least.view(self.values.dtype).isinf()
        members, places = products.of_groups(block.flatten(), group.flatten())
        guessed = places.gather(1, members.argmin(1)[:, None]).view(m, 2).where(~is_none, rows)
        distances = distance(rows.flatten(), guessed.flatten()).view(m, 2)
        distances.masked_fill_(is_none, torch.inf)
        limit = self.largest_products(slice(start, start + m), distances.amax(1))
        is_known = ~limit.isnan()
        limit = limit.view(minima.dtype)[:, None]
        # of a group of products only the smallest is looked at, unless that is small enough
        i, group = (minima <= limit).nonzero(as_tuple=True)
        is_known &= i.bincount(minlength=m) <= minima.shape[1] * _GROUP // _CROWDED
        i, group = i[is_known[i]], group[is_known[i]]
        members, places = products.of_groups(i, group)
        at, member = (members <= limit[i]).nonzero(as_tuple=True)
        i, j = i[at], places[at, member]
        is_new = (j[:, None] != guessed[i]).all(1)
        i, j = i[is_new], j[is_new]
        nearest = _smallest(_by_row(i, distance(start + i, j), distances))
        return nearest.distances, _by_row(i, j, guessed).gather(1, nearest.places), is_known


class Products(NamedTuple):
    """Products of rows with all, 16 in a group, and the smallest of each group.

    Where a product serves two rows, it is in the line of the one in the earlier strip of 256 rows;
    those of a row in its own line begin with its strip, and those before are in its column. Lines
    follow each other without a gap.
    """

    values: Tensor  # one after the other
    # read as integers, numbers from 0 up keep their order, any below is less, and min is faster
    minima: Tensor  # shape (m, w / 16)
    is_shared: bool  # each product serves two rows

    @classmethod
    def of(cls, room: Tensor, length: int, width: int, is_shared: bool) -> Self:
        """Take the room for so many lines of products."""
        dtype = torch.int16 if room.dtype == torch.bfloat16 else torch.int32
        return cls(room, room.new_empty(length, width // _GROUP, dtype=dtype), is_shared)

    @property
    def _width(self) -> int:
        return self.minima.shape[1] * _GROUP

    def first(self, line: Any) -> Any:
        """The first column of which a line, or each of some, has the product."""
        return line // _STRIP_ROWS * (_STRIP_ROWS * self.is_shared)

    def lines(self, lines: slice) -> Tensor:
        """The products in these lines, those of one strip where products serve two rows."""
        first = self.first(lines.start)
        width = self._width - first
        start = _start(first, self._width) + (lines.start - first) * width
        return self.values[start : start + (lines.stop - lines.start) * width].view(-1, width)

    def group(self, lines: slice) -> None:
        """Find the smallest of each group in these lines, a strip where products serve two rows."""
        first = self.first(lines.start)
        count = len(self.minima)
        products = self.lines(lines).view(self.minima.dtype)
        first_group = first // _GROUP
        self.minima[lines, first_group:] = products.unflatten(1, (_GROUP, -1)).amin(1)
        if self.is_shared and lines.stop < count:
            later = products[:, _STRIP_ROWS : count - first]
            minima = later.unflatten(0, (_GROUP, -1)).amin(0)
            self.minima[lines.stop :, first_group : first_group + len(minima)] = minima.T

    def of_groups(self, rows: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The products in a group of each of these rows, shape (p, 16), as integers, and the places
        of the rows that they are with.
        """
        rows = rows[:, None]
        groups = groups[:, None]
        is_in_line = groups * _GROUP >= self.first(rows)
        first = torch.minimum(self.first(rows), self.first(groups * _GROUP))
        width = self._width - first
        place = first + groups - first // _GROUP
        between = (width // _GROUP).where(is_in_line, _STRIP_GROUPS)
        line, column = place.where(~is_in_line, rows), place.where(is_in_line, rows)
        at = _start(first, self._width) + (line - first) * width + column - first
        member = torch.arange(_GROUP, device=rows.device)
        flat = self.values.view(self.minima.dtype)
        members = flat.take(at.addcmul(between * width.where(~is_in_line, 1), member))
        return members, place.addcmul(between, member)


def _start(first: Any, width: int) -> Any:
    """The place of the strip of lines that have the products from a column on, where a strip has
    256 products less in a line than the one before.
    """
    return first * width - first * (first - _STRIP_ROWS) // 2


def _by_row(i: Tensor, values: Tensor, first: Tensor) -> Tensor:
    """Put values, shape (p,), of the rows ``i``, which ascend, beside the first ones of each row,
    shape (m, k); infinite, or -1, where a row has fewer.
    """
    counts = i.bincount(minlength=len(first))
    column = torch.arange(len(i), device=i.device) - (counts.cumsum(0) - counts)[i]
    none = torch.inf if values.is_floating_point() else -1
    out = pad(first, (0, int(counts.max())), value=none)
    out[i, first.shape[1] + column] = values
    return out


def merge_duplicates(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """Return the distinct rows of ``x``, in any order: one of each set of rows that chains of near
    pairs join.

    Two rows are near if their distance is at most ``tolerance`` times the median distance of the
    distinct rows from their mean. That scale neither changes with the origin nor with the order of
    the rows, it grows with the unit of the embeddings, and a few rows of huge norm (attention
    sinks), or many copies of one row, hardly move it.

    Args:
        x: shape (n, d), any floating dtype, finite.
        tolerance: at least 0; 0 merges rows that are equal in every coordinate only.

    Returns:
        Shape (number of distinct rows, d).

    >>> merge_duplicates(torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.000001]])).shape
    torch.Size([2, 2])
    """
    return x[Neighbors(x).distinct(tolerance)[0]]


class Projections(NamedTuple):
    """Projections of rows on some directions. Rows that are near to each other have near ones."""

    places: Tensor  # shape (n, 4), float32 (float64 where the rows are)
    norms: Tensor  # distances of the rows from their mean, shape (n,)
    rounding: Tensor  # the largest error of each row's places, shape (n,)
    center: Tensor  # the mean of the rows, shape (d,)

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Project the rows of ``x``, shape (n, d)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        center = x.mean(0, dtype=dtype)
        directions = _generic_directions(x.shape[1], dtype, x.device)
        places = torch.empty(len(x), _DIRECTIONS, dtype=dtype, device=x.device)
        norms = torch.empty(len(x), dtype=accumulator_dtype(x.device), device=x.device)
        with matmul_precision(x.device):
            for chunk in row_chunks(x):
                rows = x[chunk] - center
                norms[chunk] = quick_row_norms(rows)
                torch.mm(rows, directions, out=places[chunk])
        return cls(places, norms, 8 * x.shape[1] ** 0.5 * torch.finfo(dtype).eps * norms, center)

    def pairs(self, rows: Tensor, reach: float, most: int) -> tuple[Tensor, Tensor]:
        """Find the pairs of these rows, as places among them, that may be within reach of each
        other, and are at most so many places apart where rows are sorted by their first projection.
        """
        order = self.places[rows, 0].argsort()
        place = self.places[rows[order]]
        rounding = self.rounding[rows[order]]
        pairs = [(order[:0], order[:0])]
        for lag in range(1, min(most + 1, len(rows))):
            within = reach + rounding[lag:] + rounding[:-lag]
            is_near = ~((place[lag:] - place[:-lag]).abs() > within[:, None])
            if not bool(is_near[:, 0].any()):
                break
            left = is_near.all(1).nonzero().flatten()
            pairs.append((order[left], order[left + lag]))
        i, j = (torch.cat(each) for each in zip(*pairs, strict=True))
        return i, j


@lru_cache(maxsize=4)
def _generic_directions(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unit vectors, the columns of shape (d, 4), such that no layer is constant along one."""
    angles = torch.arange(1, dim * _DIRECTIONS + 1, dtype=dtype, device=device).square()
    directions = angles.sin().view(_DIRECTIONS, dim)
    return (directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)).T


def _joined(count: int, i: Tensor, j: Tensor) -> Tensor:
    """Return the smallest number in the set of each of ``count`` numbers, where pairs (i, j) join
    their sets.
    """
    label = torch.arange(count, device=i.device)
    while bool((label[i] != label[j]).any()):
        least = torch.minimum(label[i], label[j])
        for side in (i, j):
            label = label.scatter_reduce(0, label[side], least, "amin")
        while not label.equal(jumped := label[label]):
            label = jumped
    return label


def same_label_shares(nearest: Nearest, place: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose nearest distinct row has their label, and what it would be of random
    neighbours.

    A row that stands for copies counts by the share of those with the label; of two that are
    equally near, each counts half. A random neighbour is any row that is no copy of the row.

    Args:
        nearest: of the distinct rows, N of them.
        place: the place among these of each row, shape (n,): see `Neighbors.distinct`.
        labels: of the rows, shape (n,), int64.

    Returns:
        Both shares, means over rows, shape (2,); NaN where a row has no neighbour.
    """
    near, next_one = nearest.distances[place].unbind(1)
    if not len(place) or bool(near.isnan().any()):
        return near.new_full((2,), torch.nan)
    # of each row: the nearest point and the next one, and how many rows are copies of the row
    points = nearest.places[place]
    num_copies = place.bincount()
    _, label, counts = labels.unique(return_inverse=True, return_counts=True)
    of_point, of_row, copies_with_label = (place * len(counts) + label).unique(
        return_inverse=True, return_counts=True
    )
    wanted = points * len(counts) + label[:, None]
    at = torch.searchsorted(of_point, wanted).clamp(max=len(of_point) - 1)
    with_label = torch.where(of_point[at] == wanted, copies_with_label[at], 0).to(near.dtype)
    first, second = (with_label / num_copies[points]).unbind(1)
    share = torch.where(next_one <= (1 + _TIED) * near, (first + second) / 2, first).mean()
    others = (counts[label] - copies_with_label[of_row]).to(near.dtype)
    return torch.stack((share, (others / (len(place) - num_copies[place])).mean()))
