"""Nearest neighbours: their distances, copies among rows, and rows as near as those that no token
uses.
"""

import math
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from embedgeo.functional.lockstep import Computation, at_once, computed, on_host
from embedgeo.functional.moments import CHUNK_ELEMENTS, blocked, chunk_length, row_chunks
from embedgeo.functional.precision import (
    accumulator_dtype,
    fast_row_norms,
    is_normal,
    power_of_two,
    product_dtype,
    row_norms,
    search_dtype,
    sent,
    without_autocast,
)

BLOCK_BYTES = 1 << 23  # bytes of squared distances held at a time
# rows of several labels whose neighbours among their own label are looked for at a time
_BLOCK_ROWS = 256
# of a square of which half is multiplied, by bytes: few take long in bfloat16
_STRIP_ROWS = {2: 512, 4: 256, 8: 256}
# by bytes: as these, numbers >= 0 keep their order
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_GROUP = 16  # number of products of which only the smallest is looked at first
# number of parts of a block of products whose smallest give a limit to those of the nearest
_PARTS = 8
# most candidates of a row that are kept; a row with more is left to products in float64
_MOST_PAIRS = 256
# of rows of several layers, of their products and of differences, held at a time on a device
_STACKED_BYTES = 1 << 28
# candidates a row, on average, that are kept before those beyond the limit are left out
_KEPT_PAIRS = 16
# elements between rows of products, so that those of a column do not all meet in one line of the
# cache
_SPARE = 32
_FEW_COORDINATES = 16  # coordinates by which rows are first told apart
_FEW_ROWS = 256  # number of rows up to which neighbours are looked for in float64 right away,
_FEW_PRODUCTS = 1 << 24  # and of multiplications, n² d
# number of rows up to which differences to all rows take less time than products in float64
_FEW_PENDING = 16
_EXACT = 1e-9  # relative error of a distance up to which it is taken from a product
_TIED = 1e-6  # relative difference of distances up to which they are equal, as they are known
# columns that a squared norm is split into: three of eight binary digits hold the 24 of float32
_NORM_PARTS = 3

DUPLICATE_TOLERANCE = 1e-5
"""Default of how near rows are taken for copies of each other, relative to the median distance from
the mean.
"""

FAR_SIGHTED = 1024
"""Most rows whose third and fourth neighbours are looked for, too: enough for a dimension to 2 %.
"""

# share by which an untrained row may be farther than the median of the rows that no token uses
_FARTHER = 0.1
# and as many standard deviations, relative to the mean, of the norm of Gaussian rows
_DEVIATIONS = 4.0
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly
_DIRECTIONS = 4  # number of directions that rows are projected on, to find those near to each other


class Nearest(NamedTuple):
    """The k nearest other rows of every row."""

    # shape (n, k), float64 (float32 on a device without), ascending; NaN where there is none
    distances: Tensor
    places: Tensor  # of these rows, shape (n, k), int64; any where there is none


def two_nearest_distances(
    x: Tensor, apart: Tensor | None = None, together: Tensor | None = None
) -> Tensor:
    """Euclidean distances of every row to its nearest and second nearest other row: see
    `few_nearest`.

    Args:
        x: shape (n, d), any floating dtype, finite.
        apart: labels, shape (n,), int64; rows of one label are not each other's neighbours.
            Default: all may be.
        together: labels, shape (n,), int64; only rows of one label are each other's neighbours.
            Default: all may be.

    Returns:
        Shape (n, 2), float64 (float32 on a device without), ascending, within 1e-6 relative of a
        float64 brute force; NaN where there is no such neighbour.

    >>> two_nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    return few_nearest(x, 2, rounded_rows(x), apart=apart, together=together).distances


def few_nearest(
    x: Tensor,
    k: int,
    operand: "Operand | None",
    far_sighted: Tensor | None = None,
    among: Tensor | None = None,
    apart: Tensor | None = None,
    together: Tensor | None = None,
) -> Nearest:
    """The k nearest rows of every row, of those of its label ``together`` and of another label
    ``apart``; k is small.

    Squared distances ‖a‖² + ‖b‖² - 2ab of rows rounded to bfloat16 give a limit to those of the
    nearest rows of each row. Distances to all that are not beyond it are then computed from the
    differences of the rows, in float32. Rows that have too many, or whose distances are too small
    for float32, are left to products in float64. Exact duplicates have distance 0. No setting of
    the process is changed, and none matters.

    Of rows other than those at the places ``far_sighted``, default all, two are looked for; the
    others are NaN.

    Beside products in float64, and all distances: lines "nearest two" of
    ``benchmarks/estimators.py``. Beyond ``x`` and its operand the memory needed is bounded by a few
    numbers a row; with labels, or ``among``, there is a copy of the operand, too.

    Args:
        x: shape (n, d), any floating dtype, finite.
        k: number of neighbours.
        operand: the `rounded_rows` of ``x``.
        far_sighted: places among the rows that are looked at.
        among: indices of the rows that are looked at, shape (m,); default: all. Places are among
            these.
        apart: labels of ``x``, shape (n,), int64; default: all rows may be neighbours.
        together: labels of ``x``, shape (n,), int64.
    """
    x = x.detach()
    num_rows = len(x if among is None else among)
    every = torch.arange(num_rows, device=x.device)
    ranks = torch.full((num_rows, 1), k if far_sighted is None else 2, device=x.device)
    if far_sighted is not None:
        ranks[far_sighted] = k
    order, rows = every, among
    if among is not None:
        apart, together = (None if each is None else each[among] for each in (apart, together))
    if apart is not None or together is not None:
        for labels in (apart, together):
            order = order if labels is None else order[labels[order].argsort(stable=True)]
        apart, together = (None if each is None else each[order] for each in (apart, together))
        ranks, rows = ranks[order], order if among is None else among[order]
    found = _few_nearest(x, rows, operand, ranks, k, apart, together)
    found.distances.masked_fill_(torch.arange(k, device=x.device) >= ranks, torch.nan)
    if order is every:
        return found
    back = torch.empty_like(order).scatter_(0, order, every)
    return Nearest(found.distances[back], order[found.places[back]])


def _few_nearest(
    x: Tensor,
    rows: Tensor | None,
    operand: "Operand | None",
    ranks: Tensor,
    k: int,
    apart: Tensor | None,
    together: Tensor | None,
) -> Nearest:
    """The nearest of the rows of ``x`` at these indices, default all, in the order of their labels.

    As many as their ``ranks``, shape (m, 1), count; places are among these rows.
    """
    if operand is None or _are_few(len(ranks), x.shape[1]):
        every = torch.arange(len(ranks), device=x.device)
        x = x if rows is None else x.index_select(0, rows)
        return _by_differences(x, _nearest_by_products(x, every, k, apart, together))
    operand = operand if rows is None else operand.part(rows)
    pairs, limit, is_pending = _candidate_pairs(operand, ranks, k, apart, together)
    nearest = _measured(x, rows, operand, *pairs, limit, ranks, k)
    nearest.distances.masked_fill_(nearest.distances.isinf(), torch.nan)
    finfo = torch.finfo(torch.float32)
    # what underflows in float32 is negligible beside the other squares
    is_pending |= (nearest.distances[:, :2].square() <= x.shape[1] * finfo.tiny / finfo.eps).any(1)
    pending = is_pending.nonzero().flatten()
    if len(pending):
        del operand
        compare = _compare_with_all if len(pending) <= _FEW_PENDING else _nearest_by_products
        found = compare(x if rows is None else x.index_select(0, rows), pending, k, apart, together)
        for of_all, of_pending in zip(nearest, found, strict=True):
            of_all[pending] = of_pending
    return nearest


def distinct_nearest(
    x: Tensor,
    tolerance: float,
    operand: "Operand | None",
    order: Tensor | None = None,
    apart: Tensor | None = None,
) -> tuple[Nearest, Tensor]:
    """The four nearest of the distinct rows, and for each row the place of its copy: `few_nearest`,
    `distinct_rows`.

    The third and fourth are those of at most `FAR_SIGHTED` of them, those with the least ``order``,
    random numbers of the rows, shape (n,); of the others they are NaN. Without ``order`` these are
    spread evenly over the rows.

    Where no rows look like copies by a few of their coordinates, the distances of all tell if there
    are any: line "copies" of ``benchmarks/estimators.py``. Of copies with different labels the one
    that is kept counts. ``operand`` is the `rounded_rows` of ``x``.
    """
    every = torch.arange(len(x), device=x.device)
    order = every * _GOLDEN % 1 if order is None else order
    few = x[:, :_FEW_COORDINATES].to(accumulator_dtype(x.device))
    few = few[few.sum(1).argsort()]
    if (
        len(x) > 2
        and apart is None
        and not bool((few.diff(dim=0).abs() <= tolerance * few.std(0)).all(1).any())
    ):
        nearest = few_nearest(x, 4, operand, order.argsort()[:FAR_SIGHTED])
        norms = torch.cat([fast_row_norms(x[chunk]) for chunk in row_chunks(x)])
        # what vanished
        scale = norms.square().mean().sqrt() + (x.shape[1] * torch.finfo(torch.float32).tiny) ** 0.5
        # median distances from the mean are at most √2 scale
        if bool((nearest.distances[:, 0] > 1.5 * tolerance * scale).all()):
            return nearest, every
    kept, place = distinct_rows(x, tolerance)
    among = None if len(kept) == len(x) else kept
    return few_nearest(x, 4, operand, far_sighted(order, place), among, apart), place


def far_sighted(order: Tensor, place: Tensor) -> Tensor:
    """Places of the `FAR_SIGHTED` distinct rows with the least ``order`` of a copy, given each
    row's place, (n,).
    """
    num_points = int(place.max()) + 1 if len(place) else 0
    least = torch.full_like(order[:num_points], torch.inf).scatter_reduce_(0, place, order, "amin")
    return least.argsort()[:FAR_SIGHTED]


class Search(NamedTuple):
    """Search of the k nearest rows of every row that is looked at, on a device, which is not waited
    for.
    """

    x: Tensor  # shape (n, d), any floating dtype, finite
    rows: Tensor  # indices of those that are looked at, shape (m,), on the CPU
    k: int
    # labels of ``x``, shape (n,), on the CPU: rows of one are not each other's neighbours
    apart: Tensor | None = None
    together: Tensor | None = None  # the same: only rows of one label are each other's neighbours

    def labels(self) -> list[Tensor | None]:
        """The labels of the rows that are looked at, ``apart`` and ``together``."""
        return [None if each is None else each[self.rows] for each in (self.apart, self.together)]

    def looked_at(self) -> Tensor:
        """The rows that are looked at, shape (m, d)."""
        is_all = len(self.rows) == len(self.x) and bool((self.rows.diff() > 0).all())
        return self.x if is_all else self.x.index_select(0, sent(self.rows, self.x.device))


def nearest_of_searches(searches: list[Search]) -> Computation[list[Nearest]]:
    """The k nearest of each search, as of `few_nearest`, on the CPU; those of equal shapes are
    looked for together.
    """
    groups, last = list[list[int]](), dict[tuple[Any, ...], list[int]]()
    for number, each in enumerate(searches):
        size = len(each.rows), each.x.shape[1]
        shape = size, each.k, each.x.dtype, each.x.device, each.apart is None, each.together is None
        most = max(1, _STACKED_BYTES // max(1, each.x.element_size() * math.prod(size)))
        if len(last.get(shape, range(most))) == most:
            last[shape] = []
            groups.append(last[shape])
        last[shape].append(number)
    found = yield from at_once(
        *(_nearest_of_alike([searches[number] for number in group]) for group in groups)
    )
    nearest = dict(zip(chain(*groups), chain(*found), strict=True))
    return [nearest[number] for number in range(len(searches))]


def _nearest_of_alike(searches: list[Search]) -> Computation[list[Nearest]]:
    """The k nearest of searches of equal shapes: from products in float32, and where these do not
    tell, in float64.
    """
    k, num_rows = searches[0].k, len(searches[0].rows)
    if num_rows < 2:
        none = torch.full((num_rows, k), torch.nan, dtype=torch.float64, device="cpu")
        return [Nearest(none, none.new_zeros(num_rows, k, dtype=torch.int64))] * len(searches)
    device = searches[0].x.device
    labels = [
        None
        if None in each
        else sent(torch.stack([label for label in each if label is not None]), device)
        for each in zip(*(search.labels() for search in searches), strict=True)
    ]
    own = torch.arange(num_rows, device=device).expand(len(searches), num_rows)
    narrow = torch.promote_types(searches[0].x.dtype, torch.float32)
    x = torch.stack([search.looked_at() for search in searches])
    distances, places, is_known = yield from on_host(*_nearest_by_dtype(x, own, k, labels, narrow))
    del x, own
    for dtype in {accumulator_dtype(device)} - {narrow}:
        missing = [(~each).nonzero().flatten() for each in is_known]
        if not any(map(len, missing)):
            break
        chosen = torch.stack(
            [pad(each, (0, max(map(len, missing)) - len(each))) for each in missing]
        )
        x = torch.stack([search.looked_at() for search in searches])
        found = yield from on_host(*_nearest_by_dtype(x, sent(chosen, device), k, labels, dtype))
        del x
        for number, of_layer in enumerate(missing):
            for whole, part in zip((distances, places, is_known), found, strict=True):
                whole[number, of_layer] = part[number, : len(of_layer)]
    for number, search in enumerate(searches):
        # rows that are as good as copies: they are few
        if len(unknown := (~is_known[number]).nonzero().flatten()):
            of_search = [None if each is None else each[number] for each in labels]
            found = _nearest_by_products(search.looked_at(), sent(unknown, device), k, *of_search)
            distances[number, unknown], places[number, unknown] = (each.cpu() for each in found)
    distances.masked_fill_(distances.isinf(), torch.nan)
    return [Nearest(*each) for each in zip(distances.double(), places, strict=True)]


def _nearest_by_dtype(
    x: Tensor, own: Tensor, k: int, labels: list[Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The k nearest of some rows of L layers, and marks of those that are certain; no device is
    waited for.

    The rows with the smallest squared distances from products in ``dtype``, some more than k, are
    compared by differences. It is certain that no other row is nearer where its product would have
    to be smaller than theirs: see `Operand.limit`. Where the process has float32 products of
    rounded operands (TF32), these are in float64.

    Args:
        x: shape (L, m, d).
        own: indices of the rows whose neighbours are looked for, shape (L, f).
        k: number of neighbours.
        labels: ``apart`` and ``together``, shape (L, m); None: all rows may be neighbours.
        dtype: float32 or float64.

    Returns:
        Distances, shape (L, f, k), inf where there is no neighbour; their places, int64; and the
        marks, (L, f), bool.
    """
    num_layers, num_rows, dim = x.shape
    wide, num_found = accumulator_dtype(x.device), min(max(_GROUP, k + k // 8 + 4), num_rows - 1)
    centred = x.to(dtype)
    centred = centred - centred.mean(1, keepdim=True)
    unit = power_of_two(centred.abs().amax((1, 2)))
    centred /= unit[:, None, None]
    norm2 = centred.square().sum(2)
    norm = norm2.sqrt()
    largest = norm.amax(1)[:, None, None]
    finfo = torch.finfo(dtype)
    exact = product_dtype(centred)
    others = centred.to(exact)
    offset = torch.arange(num_layers, device=x.device)[:, None] * num_rows
    flat = x.reshape(-1, dim)
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    of_row = num_layers * max(num_rows, num_found * dim) * exact.itemsize
    for at in own.split(max(1, _STACKED_BYTES // of_row), dim=1):
        rows = (at + offset).flatten()
        left = centred.reshape(-1, dim).index_select(0, rows).view(*at.shape, dim)
        with without_autocast(x.device):
            products = torch.baddbmm(
                norm2[:, None].to(exact), left.to(exact), others.mT, alpha=-2
            ).to(dtype)
        products.scatter_(2, at[..., None], torch.inf)
        for label, is_apart in zip(labels, (True, False), strict=True):
            if label is not None:
                same = label.gather(1, at)[..., None] == label[:, None]
                products.masked_fill_(same if is_apart else ~same, torch.inf)
        least, place = products.topk(num_found, largest=False)
        near = (
            flat.index_select(0, (place + offset[..., None]).flatten())
            .view(*place.shape, dim)
            .to(dtype)
        )
        near -= flat.index_select(0, rows).view(*at.shape, 1, dim)
        near /= unit[:, None, None, None]
        distances = fast_row_norms(near).to(wide).masked_fill_(least.isinf(), torch.inf)
        nearest, order = distances.topk(min(k, num_found), largest=False)
        own_norm, farthest = norm.gather(1, at)[..., None].to(wide), nearest[..., -1:]
        reach = torch.minimum(own_norm + farthest, largest) * (1 + 8 * finfo.eps)
        moved = 4 * finfo.eps * (own_norm + reach)
        slack = finfo.eps * (dim + 24) * (own_norm + reach).square() + 8 * dim * finfo.tiny * (
            1 + reach
        )
        is_certain = (farthest + moved).square() + slack < least[..., -1:] + own_norm.square()
        is_certain |= least[..., -1:].isinf() | (num_found == num_rows - 1)
        if dtype != wide:  # where squares of differences have vanished
            is_certain &= nearest[..., :1].square() > dim * finfo.tiny / finfo.eps
        nearest = pad(nearest * unit[:, None, None], (0, k - nearest.shape[2]), value=torch.inf)
        parts.append(
            (nearest, pad(place.gather(2, order), (0, k - order.shape[2])), is_certain[..., 0])
        )
    distances, places, is_certain = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return distances, places, is_certain


def same_label_shares(nearest: Nearest, place: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose nearest distinct row has their label, and what it would be of random
    neighbours.

    A row that stands for copies counts by the share of those with the label; of two that are
    equally near, each counts half. A random neighbour is any row that is no copy of the row.

    Args:
        nearest: two or more nearest of the distinct rows, N of them.
        place: the place among these of each row, shape (n,): see `distinct_nearest`.
        labels: of the rows, shape (n,), int64.

    Returns:
        Both shares, means over rows, shape (2,); NaN where there is no other row, or squared
        distances overflow or vanish.
    """
    num_points, dtype = len(nearest.distances), nearest.distances.dtype
    if num_points < 2 or not bool(is_normal(nearest.distances[:, 0].square()).all()):
        return nearest.distances.new_full((2,), torch.nan)
    _, label, counts = labels.unique(return_inverse=True, return_counts=True)
    of_point, copies_with_label = (place * len(counts) + label).unique(return_counts=True)
    num_copies = place.bincount(minlength=num_points)

    def with_label(points: Tensor) -> Tensor:
        """Number of the copies of a point for each row, shape (n,), that have the row's label."""
        wanted = points * len(counts) + label
        at = torch.searchsorted(of_point, wanted).clamp(max=len(of_point) - 1)
        return torch.where(of_point[at] == wanted, copies_with_label[at], 0).to(dtype)

    first, second = (
        with_label(points[place]) / num_copies[points[place]]
        for points in nearest.places[:, :2].unbind(1)
    )
    near, next_one = nearest.distances[:, :2].unbind(1)
    is_tied = (next_one <= (1 + _TIED) * near)[place]
    shares = torch.where(is_tied, (first + second) / 2, first)
    at_random = (counts[label] - with_label(place)) / (len(place) - num_copies[place])
    return torch.stack((shares.mean(), at_random.mean()))


def nearest_distances(
    x: Tensor, k: int, apart: Tensor | None = None, together: Tensor | None = None
) -> Tensor:
    """Euclidean distances of every row to its k nearest other rows, or to those of some of them.

    Squared distances ‖a‖² + ‖b‖² - 2ab of the centred rows are taken in float64, a block of rows at
    a time. Where the bound of their error is small enough, the k smallest are those of the
    neighbours, for a change of all values by at most ε changes the k-th smallest by at most ε. In
    the other rows, those with a neighbour at less than some hundredths of their norm, the distances
    that the bound leaves among the k smallest are taken from differences. Exact duplicates have
    distance 0. No setting of the process is changed, and none matters.

    Args:
        x: shape (n, d), any floating dtype, finite.
        k: number of neighbours.
        apart: labels, shape (n,), int64; rows of one label are not each other's neighbours.
            Default: all may be.
        together: labels, shape (n,), int64; only rows of one label are each other's neighbours.
            Default: all may be.

    Returns:
        Shape (n, k), float64 (float32 on a device without), ascending, within 1e-6 relative of a
        float64 brute force; NaN where there is no such neighbour. Beyond ``x`` and a copy of it in
        float64, the memory needed is bounded by k numbers a row.

    >>> nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]), 2)
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    x, every = x.detach(), torch.arange(len(x), device=x.device)
    if together is None:
        return _nearest_by_products(x, every, k, apart).distances
    order = together.argsort(stable=True)
    nearest = torch.full((len(x), k), torch.nan, dtype=accumulator_dtype(x.device), device=x.device)
    for start, end in _spans(together[order]):
        rows = order[start:end]
        labels = (None if each is None else each[rows] for each in (apart, together))
        nearest[rows] = _nearest_by_products(
            x.index_select(0, rows), every[: len(rows)], k, *labels
        ).distances
    return nearest


def _spans(labels: Tensor) -> list[tuple[int, int]]:
    """Starts and ends of spans of rows, whose ``labels``, shape (n,), ascend, that have all rows of
    their labels.
    """
    spans = [(0, 0)]
    for count in labels.unique_consecutive(return_counts=True)[1].tolist():
        start, end = spans[-1]
        if end - start + count <= _BLOCK_ROWS:
            spans[-1] = (start, end + count)
        else:
            spans.append((end, end + count))
    return [(start, end) for start, end in spans if end > start]


def rounded_rows(x: Tensor) -> "Operand | None":
    """The rows of ``x``, shape (n, d), as `few_nearest` looks for candidates; None where it does
    not.

    Those are few rows, and such that a squared distance may overflow in float32.
    """
    if _are_few(*x.shape):
        return None
    operand = Operand.of(x.detach(), search_dtype(x.device), rounded=True)
    return operand if bool(operand.largest.square() < torch.finfo(torch.float32).max / 8) else None


def _are_few(num_rows: int, dim: int) -> bool:
    return num_rows <= _FEW_ROWS and num_rows**2 * dim <= _FEW_PRODUCTS


def _by_differences(x: Tensor, nearest: Nearest) -> Nearest:
    """The nearest of all rows with distances from their differences, so that equal ones are
    equal.
    """
    rows = torch.arange(len(x), device=x.device).repeat_interleave(nearest.places.shape[1])
    distances = pair_distances(x, rows, nearest.places.flatten(), nearest.distances.dtype)
    distances = distances.view(nearest.places.shape).masked_fill_(
        nearest.distances.isnan(), torch.nan
    )
    distances, order = distances.sort(1)
    return Nearest(distances, nearest.places.gather(1, order))


class Operand(NamedTuple):
    """Centred rows b as (b, ‖b‖² in parts, ones), whose products are squared distances.

    Their products with (-2a, ones, ‖a‖² in parts) are, so that nothing larger than these is rounded
    to ``dtype``.
    """

    # shape (n + 16, d + parts + ones); those beyond n fill up the last group: infinitely far away
    rows: Tensor
    norm: Tensor  # ‖b‖, shape (n,)
    lost: Tensor  # at least the norm of what rounding took from b, shape (n,)
    largest: Tensor  # the largest ‖b‖
    rounding: Tensor  # the largest share of a norm that rounding took, of the sums of products, too

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype, *, rounded: bool = False) -> Self:
        """The rows of ``x`` for products in ``dtype``; rounded to bfloat16, no setting of the
        process changes them.
        """
        n, dim = x.shape
        summed = torch.promote_types(dtype, torch.float32)
        digits = torch.bfloat16 if rounded else dtype
        center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
        y = torch.empty(n + _GROUP, dim + 2 * _NORM_PARTS, dtype=dtype, device=x.device)
        norm = torch.zeros(n, dtype=accumulator_dtype(x.device), device=x.device)
        lost = torch.zeros_like(norm)
        for chunk in row_chunks(x, blocked(CHUNK_ELEMENTS // 2, x.device)):
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
        y[n:, :dim] = 0
        y[n:, dim:-_NORM_PARTS] = torch.finfo(digits).max
        y[:, -_NORM_PARTS:] = 1
        return cls(y, norm, lost, norm.max(), rounding)

    def part(self, rows: Tensor) -> Self:
        """Some of the rows, those at these indices."""
        filled = torch.cat((rows, torch.arange(len(self.norm), len(self.rows), device=rows.device)))
        norm = self.norm[rows]
        return self._replace(
            rows=self.rows.index_select(0, filled),
            norm=norm,
            lost=self.lost[rows],
            largest=norm.max(),
        )

    def left(self, rows: Tensor | slice) -> Tensor:
        """(-2a, ones, ‖a‖² in parts) of the rows a at these indices, (m, d + ones + parts)."""
        left = self.rows[rows] * -2
        left[:, -_NORM_PARTS:] = self.rows[rows, -2 * _NORM_PARTS : -_NORM_PARTS]
        left[:, -2 * _NORM_PARTS : -_NORM_PARTS] = 1
        return left

    def block(self, num_rows: int, num_columns: int) -> Tensor:
        """Room for products of so many rows with others, to be used again and again."""
        return self.rows.new_empty(num_rows, num_columns + _SPARE)

    def squared(
        self, left: Tensor, first: int, last: int, block: Tensor, *, is_mirrored: bool = False
    ) -> Tensor:
        """Squared distances of the rows that ``left`` is of to those from ``first`` to before
        ``last``, in a block.

        Mirrored are those of rows to themselves, each one product in two places; of a row to itself
        it is infinite.
        """
        right, n = self.rows[first:last], len(left)
        squared = block[:n, : last - first]
        if not is_mirrored:
            return torch.mm(left, right.T, out=squared)  # which autocast leaves alone
        length = _STRIP_ROWS[self.rows.dtype.itemsize]
        for start in range(0, n, length):
            strip = slice(start, min(start + length, n))
            torch.mm(left[strip], right[start:].T, out=squared[strip, start:])
            squared[strip.stop :, strip] = squared[strip, strip.stop : n].T
        squared.diagonal().fill_(torch.inf)
        return squared

    def limit(self, rows: Tensor | slice, distances: Tensor) -> Tensor:
        """The largest product that a row can have whose distance from one of these, of shape (m,),
        is at most this.

        Such a row has a norm of at most ``reach``, so that rows of huge norm do not loosen the
        bounds of others.
        """
        reach = (self.norm[rows] + distances).clamp(max=self.largest) * (1 + 2 * self.rounding)
        return ((distances + self._moved(rows, reach)).square() + self._slack(rows, reach)).to(
            self.rows.dtype
        )

    def farthest(self, rows: Tensor | slice, products: Tensor) -> Tensor:
        """The largest distance that a row can have from one of these, of shape (m,), with this
        product.
        """
        squared = products.to(self.norm.dtype).clamp(min=0)
        squared *= 1 + torch.finfo(self.rows.dtype).eps  # before it was rounded
        share = torch.finfo(self._summed).eps * 2 * (self.rows.shape[1] + 16)
        share = min(share, 0.25) ** 0.5  # of norms, that slack may add
        reach = ((self.norm[rows] + squared.sqrt()) * ((1 + share) / (1 - share))).clamp(
            max=self.largest
        )
        return (squared + self._slack(rows, reach)).sqrt() + self._moved(rows, reach)

    def _moved(self, rows: Tensor | slice, reach: Tensor) -> Tensor:
        """The most by which centring and rounding change distances of these rows to rows of such
        norms.
        """
        return (
            self.lost[rows]
            + 4 * torch.finfo(self._summed).eps * self.norm[rows]
            + self.rounding * reach
        )

    def _slack(self, rows: Tensor | slice, reach: Tensor) -> Tensor:
        """The most by which rounding changes products of these rows with rows of such norms,
        denormals included.
        """
        dim, finfo = self.rows.shape[1] - 2 * _NORM_PARTS, torch.finfo(self._summed)
        return finfo.eps * (dim + 24) * (
            self.norm[rows] + reach
        ).square() + 8 * dim * finfo.tiny * (1 + reach)

    @property
    def _summed(self) -> torch.dtype:
        return torch.promote_types(self.rows.dtype, torch.float32)


def _candidate_pairs(
    operand: Operand, ranks: Tensor, k: int, apart: Tensor | None, together: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Pairs (i, j) of a row and one that may be among its nearest, with their products; and marks
    of rows left out.

    Between these is a product of each row, about that of its rank. ``together`` is ascending, and
    so is ``apart`` among rows with the same; rows of a label ``apart`` that more than half of all
    rows have are left out. Each product serves two rows: those of a square are looked through by
    row and, off the diagonal, by column. They are compared as integers, which takes less time;
    those that rounding made negative are below all others, too.
    """
    n = len(operand.norm)
    dtype = operand.rows.dtype
    device = operand.rows.device
    integer = _INTEGERS[dtype.itemsize]
    side = math.isqrt(blocked(BLOCK_BYTES, device) // dtype.itemsize) // _GROUP * _GROUP or _GROUP
    smallest = torch.full((n, k), torch.inf, dtype=dtype, device=device)
    limit = smallest[:, 0].clone()
    is_crowded = torch.zeros(n, dtype=torch.bool, device=device)
    if apart is not None:
        place, counts = apart.unique(return_inverse=True, return_counts=True)[1:]
        is_crowded = (2 * counts > n)[place]
    pairs = [(torch.arange(0, device=device), torch.arange(0, device=device), limit[:0])]
    room = _KEPT_PAIRS * n
    tiles = [
        (row, column, end)
        for start, end in ([(0, n)] if together is None else _spans(together))
        for row in range(start, end, side)
        for column in range(row, end, side)
    ]
    longest = min(side, max(end - start for start, _, end in tiles))
    block = operand.block(longest, -(-longest // _GROUP) * _GROUP)
    for number, (start, first, end) in enumerate(tiles, 1):
        if first == start:
            left = operand.left(slice(start, min(start + side, end)))
        last = first + -(-min(side, end - first) // _GROUP) * _GROUP
        squared = operand.squared(left, first, last, block, is_mirrored=first == start)
        if together is not None or (
            apart is not None and bool(apart[start + len(left) - 1] >= apart[first])
        ):
            _exclude(
                squared[:, : n - first],
                slice(start, start + len(left)),
                slice(first, last),
                apart,
                together,
            )
        squared = squared.view(integer)
        by_row = squared.unflatten(1, (_GROUP, -1))
        sides = [(start, first, by_row, by_row.amin(1))]
        if first > start:
            by_column = squared[:, : end - first].unflatten(0, (_GROUP, -1))
            sides.append((first, start, by_column.movedim(2, 0), by_column.amin(0).T.contiguous()))
        for begin, offset, groups, minima in sides:
            own = slice(begin, begin + len(minima))
            # of some rows only the nearest one, unless others are within the limit
            if minima.shape[1] > _PARTS:
                near = torch.stack(
                    [part.amin(1) for part in minima.tensor_split(_PARTS, dim=1)], dim=1
                )
            else:
                near = groups.flatten(1)
            near = (
                torch.cat((smallest[own].view(integer), near), dim=1).topk(k, largest=False).values
            )
            smallest[own] = near.view(dtype)
            farthest = operand.farthest(own, smallest[own].gather(1, ranks[own] - 1).squeeze(1))
            limit[own] = operand.limit(own, farthest).clamp(max=torch.finfo(dtype).max)
            limit[own].masked_fill_(is_crowded[own], -torch.inf)
            i, j, found = _up_to(limit[own].view(integer), groups, minima)
            pairs.append((begin + i, offset + j, found.view(dtype)))
        if number == len(tiles) or sum(len(i) for i, _, _ in pairs) > room:
            i, j, products = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            is_crowded |= i[products <= limit[i]].bincount(minlength=n) > _MOST_PAIRS
            limit.masked_fill_(is_crowded, -torch.inf)
            kept = (products <= limit[i]).nonzero().flatten()
            pairs = [(i[kept], j[kept], products[kept])]
            room = max(room, 2 * len(kept))
    return pairs[0], smallest.gather(1, ranks - 1).squeeze(1), is_crowded


def _up_to(limit: Tensor, groups: Tensor, minima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of products, shape (m, 16, columns / 16), up to a limit of each row,
    shape (m,).
    """
    i, group = (minima <= limit[:, None]).nonzero(as_tuple=True)
    members = groups[i, :, group]
    at, place = (members <= limit[i, None]).nonzero(as_tuple=True)
    return i[at], place * minima.shape[1] + group[at], members[at, place]


def _measured(
    x: Tensor,
    rows: Tensor | None,
    operand: Operand,
    i: Tensor,
    j: Tensor,
    products: Tensor,
    limit: Tensor,
    ranks: Tensor,
    k: int,
) -> Nearest:
    """The k nearest of each row in the pairs (i, j) with these products; infinitely far where there
    are none.

    First those up to ``limit``, shape (m,), are measured, then those that may be nearer. Row i is
    that of ``x`` at rows[i], default at i.
    """
    distances = torch.full_like(products, torch.inf, dtype=operand.norm.dtype)
    nearest, at = distances, i
    for _ in range(2):
        chosen = ((products <= limit[i]) & distances.isinf()).nonzero().flatten()
        near, far = (each[chosen] if rows is None else rows[each[chosen]] for each in (i, j))
        distances[chosen] = pair_distances(x, near, far, torch.float32)
        nearest, at = _smallest(distances, i, len(ranks), k)
        limit = operand.limit(slice(None), nearest.gather(1, ranks - 1).squeeze(1))
    return Nearest(nearest, torch.cat((j, j.new_zeros(1)))[at])


def _smallest(distances: Tensor, rows: Tensor, num_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of the distances of each row, shape (num_rows, k), and their places; infinite
    if none.
    """
    smallest = distances.new_full((k, num_rows), torch.inf)
    places = []
    for each in smallest:
        each.scatter_reduce_(0, rows, distances, "amin")
        found = (distances == each[rows]).nonzero().flatten()
        one = rows.new_full((num_rows,), len(distances)).scatter_reduce_(
            0, rows[found], found, "amin"
        )
        distances = distances.index_fill(0, one[one < len(distances)], torch.inf)
        places.append(one)
    return smallest.T.contiguous(), torch.stack(places, dim=1)


def pair_distances(x: Tensor, rows: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances of rows of ``x`` to others, at indices (m,), to 1e-6; in ``dtype`` or that of
    ``x``, if wider.
    """
    x, narrow = x.detach(), torch.promote_types(x.dtype, dtype)
    distances = torch.empty(len(rows), dtype=accumulator_dtype(x.device), device=x.device)
    step = min(len(rows), chunk_length(x.shape[1], blocked(CHUNK_ELEMENTS // 2, x.device)))
    # new room for each chunk would take as long as the rest
    room = x.new_empty(2, step, x.shape[1])
    for start in range(0, len(rows), max(1, step)):
        chunk = slice(start, start + step)
        near, far = room[:, : len(rows[chunk])]
        torch.index_select(x, 0, others[chunk], out=near)
        torch.index_select(x, 0, rows[chunk], out=far)
        distances[chunk] = fast_row_norms(near.to(narrow).sub_(far))
    return distances


def _compare_with_all(
    x: Tensor, rows: Tensor, k: int, apart: Tensor | None, together: Tensor | None
) -> Nearest:
    """The k nearest of these rows, shape (m,), among all other rows, by differences alone."""
    wide = accumulator_dtype(x.device)
    left = x.index_select(0, rows).to(wide)
    mode = "donot_use_mm_for_euclid_dist"
    parts = [torch.cdist(left, x[chunk].to(wide), compute_mode=mode) for chunk in row_chunks(x)]
    distances = _without_others(torch.cat(parts, dim=1), rows, apart, together)
    nearest, places = distances.topk(k, largest=False)
    return Nearest(nearest.masked_fill_(nearest.isinf(), torch.nan), places)


def _nearest_by_products(
    x: Tensor, rows: Tensor, k: int, apart: Tensor | None = None, together: Tensor | None = None
) -> Nearest:
    """The k nearest of these rows, shape (m,), among other rows, by products in float64; both of
    shape (m, k).
    """
    wide = accumulator_dtype(x.device)
    nearest = torch.full((len(rows), k), torch.nan, dtype=wide, device=x.device)
    places = rows.new_zeros(len(rows), k)
    found = min(k, len(x) - 1)
    if found < 1:
        return Nearest(nearest, places)
    operand = Operand.of(x, wide)
    step = chunk_length(len(operand.rows) * wide.itemsize, blocked(BLOCK_BYTES, x.device))
    block = operand.block(min(step, len(rows)), len(x))
    for start in range(0, len(rows), step):
        own = rows[start : start + step]
        squared = _without_others(
            operand.squared(operand.left(own), 0, len(x), block), own, apart, together
        )
        least, place = squared.topk(found, largest=False)
        distances = least.clamp(min=0).sqrt()
        farthest = operand.farthest(own.unsqueeze(1), least)
        # not where a square has overflowed
        is_exact = (farthest <= (1 + _EXACT) * distances).all(1)
        if not bool(is_exact.all()):
            blurred = (~is_exact).nonzero().flatten()
            limit = operand.limit(own[blurred], farthest[blurred, -1])
            i, j = (~(squared[blurred] > limit.unsqueeze(1))).nonzero(as_tuple=True)
            near = torch.full_like(squared[blurred], torch.inf)
            near[i, j] = pair_distances(x, own[blurred][i], j, wide)
            near = _without_others(near, own[blurred], apart, together)
            distances[blurred], place[blurred] = near.topk(found, largest=False)
        if apart is not None or together is not None:
            distances.masked_fill_(distances.isinf(), torch.nan)
        nearest[start : start + step, :found] = distances
        places[start : start + step, :found] = place
    return Nearest(nearest, places)


def _without_others(
    distances: Tensor, rows: Tensor, apart: Tensor | None, together: Tensor | None
) -> Tensor:
    """Distances of these rows, shape (m,), to all rows, infinite where these may not be their
    neighbours; in place.
    """
    _exclude(
        distances.scatter_(1, rows.unsqueeze(1), torch.inf), rows, slice(None), apart, together
    )
    return distances


def _exclude(
    distances: Tensor,
    rows: Tensor | slice,
    others: slice,
    apart: Tensor | None,
    together: Tensor | None,
) -> None:
    """Make distances of rows to others infinite, in place, where by their labels they are not
    neighbours.
    """
    if apart is not None:
        distances.masked_fill_(apart[rows].unsqueeze(1) == apart[others], torch.inf)
    if together is not None:
        distances.masked_fill_(together[rows].unsqueeze(1) != together[others], torch.inf)


def merge_duplicates(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """The distinct rows of ``x``, in any order: one of each set of rows that chains of near pairs
    join.

    Two rows are near if their distance is at most ``tolerance`` times the median distance of the
    distinct rows from their mean. That scale neither changes with the origin nor with the order of
    the rows, it grows with the unit of the embeddings, and a few rows of huge norm (attention
    sinks), or many copies of one row, hardly move it.

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
    """Indices of the rows that `merge_duplicates` keeps, and for each row the place among them of
    its copy, (n,).
    """
    kept = torch.arange(len(x), device=x.device)
    distinct, place = x.unique(dim=0, return_inverse=True)
    if len(distinct) == len(x):
        distinct, place = x, kept
    else:
        kept = torch.empty_like(kept[: len(distinct)]).index_copy_(0, place, kept)
    if tolerance > 0 and len(kept) > 1:
        projected = computed(projections(distinct))
        if float(projected.norms.median()) > 0:
            found = computed(distinct_by_projections(distinct, projected, tolerance))
            near, place_near = (each.to(x.device) for each in found)
            kept, place = kept[near], place_near[place]
    return kept, place


def copies(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """Indices of the first row that equals each, but for rounding: see `merge_duplicates`; a NaN or
    Inf equals none.
    """
    first = torch.arange(len(x), device=x.device)
    finite = x.isfinite().all(1).nonzero().flatten()
    if len(finite) > 1:
        _, place = distinct_rows(x if len(finite) == len(x) else x[finite], tolerance)
        least = torch.full_like(place, len(x)).scatter_reduce(0, place, finite, "amin")
        first[finite] = least[place]
    return first


class Projections(NamedTuple):
    """Projections of rows on some directions, by which near ones are looked for; on the CPU.

    Rows that are near to each other have near projections on any direction.
    """

    places: Tensor  # shape (n, 4), float64
    norms: Tensor  # of the rows from about their mean, shape (n,), float64
    rounding: float  # share of a norm that is at least the error of its places

    def of(self, rows: Tensor) -> Self:
        """Those of the rows at these indices."""
        return self._replace(places=self.places[rows], norms=self.norms[rows])


def projections(x: Tensor) -> Computation[Projections]:
    """The projections of rows ``x``, shape (n, d), any floating dtype, in the accumulator's
    dtype.
    """
    n, dim = x.shape
    wide = accumulator_dtype(x.device)
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    directions = _generic_directions(dim, wide, x.device)
    norm = torch.empty(n, dtype=wide, device=x.device)
    place = torch.empty(n, _DIRECTIONS, dtype=wide, device=x.device)
    for chunk in row_chunks(x):
        rows = x[chunk].to(wide) - center
        norm[chunk] = row_norms(rows)
        torch.mm(rows, directions, out=place[chunk])  # in float64 no setting matters
    place, norm = yield from on_host(place, norm)
    return Projections(place, norm, 8 * dim**0.5 * torch.finfo(wide).eps)


@lru_cache(maxsize=4)
def _generic_directions(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unit vectors, the columns of shape (d, 4), such that no layer is constant along one."""
    angles = torch.arange(1, dim * _DIRECTIONS + 1, dtype=dtype, device=device).square()
    directions = angles.sin().view(_DIRECTIONS, dim)
    return (directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)).T


def distinct_by_projections(
    x: Tensor, projected: Projections, tolerance: float
) -> Computation[tuple[Tensor, Tensor]]:
    """The `distinct_rows` of ``x`` on any device, given their projections; all in order if no two
    are near.

    Rows are sorted by their projections on one direction, and each is compared with those after it,
    as long as there are any within reach whose other projections are near, too: first with the next
    one alone, which finds copies, and one of these stays. Both results are on the CPU.
    """
    n = len(x)
    every = torch.arange(n, device="cpu")
    order = projected.places[:, 0].argsort()
    place = projected.places[order]
    norms = projected.norms[order]
    rounding = projected.rounding * norms[:, None]
    label = every  # by place in the order, the first row of those joined to it
    compared = every  # places in the order, of one of each run of equal rows
    reach = 0.0
    for most in (1, n):
        pairs = _with_near_projections(
            place[compared], rounding[compared], label[compared], reach, most
        )
        if len(pairs[0]):
            left, right = (compared[each] for each in pairs)
            i, j = (sent(order[each], x.device) for each in (left, right))
            (distances,) = yield from on_host(pair_distances(x, i, j, accumulator_dtype(x.device)))
            is_near = distances <= reach
            label = _join(label, left[is_near], right[is_near])
            compared = compared[label[compared] == compared] if most == 1 else compared
        if len(compared) > 1:
            reach = tolerance * float(norms[compared].median())
            reach = reach if reach < math.inf else 0.0
    is_first = label == every
    if bool(is_first.all()):
        return every, every
    return order[is_first], torch.empty_like(every).scatter_(
        0, order, is_first.cumsum(0)[label] - 1
    )


def _with_near_projections(
    place: Tensor, rounding: Tensor, label: Tensor, reach: float, most: int
) -> tuple[Tensor, Tensor]:
    """Pairs of rows of different labels that may be within reach of each other, at most so many
    places apart.

    The first projections, in the first column of ``place``, ascend.
    """
    pairs = [(label[:0], label[:0])]
    for lag in range(1, min(most + 1, len(place))):
        within = (place[lag:] - place[:-lag]).abs() <= reach + rounding[lag:] + rounding[:-lag]
        if not bool(within[:, 0].any()):
            break
        left = (within.all(1) & (label[lag:] != label[:-lag])).nonzero().flatten()
        pairs.append((left, left + lag))
    left, right = map(torch.cat, zip(*pairs, strict=True))
    return left, right


def _join(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The smallest index in the set of each index, once the sets of ``left`` and ``right`` are
    joined.
    """
    while bool((label[left] != label[right]).any()):
        least = torch.minimum(label[left], label[right])
        for side in (left, right):
            label = label.scatter_reduce(0, label[side], least, "amin")
        while not label.equal(jumped := label[label]):
            label = jumped
    return label


def untrained_rows(x: Tensor, unused: Tensor) -> Tensor | None:
    """Marks of the rows of an embedding matrix that look like those which no token uses, whose
    indices are ``unused``.

    These rows have had decay, and at the output a push away from the hidden states, but no example
    of their own. The rows that lie as near to their mean as they do have seen no more: within 1.1 +
    4 / √(2d) times the median distance of an unused row to the mean of the others. (Norms of
    Gaussian rows have the C.V. 1 / √(2d).) The reference is that of Land & Bartolo 2024 ("Fishing
    for Magikarp"); the limit is not theirs. None where it cannot be told: fewer than two unused
    rows are finite, or more than half of the other rows are as near as they, as before the
    training.
    """
    wide = accumulator_dtype(x.device)
    known = x[unused].to(wide)
    is_finite = known.isfinite().all(1)
    unused, known = unused[is_finite], known[is_finite]
    if (m := len(unused)) < 2:
        return None
    center = known.mean(0)
    of_known = row_norms(known - center) * m / (m - 1)  # from the mean of the others
    distance = torch.empty(len(x), dtype=wide, device=x.device)
    for chunk in row_chunks(x):
        distance[chunk] = row_norms(x[chunk].to(wide) - center)
    distance[unused] = of_known
    rounding = 4 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(center)
    limit = (1 + _FARTHER + _DEVIATIONS / (2 * x.shape[1]) ** 0.5) * of_known.median()
    is_near = distance <= limit + rounding
    return None if 2 * int(is_near.sum() - is_near[unused].sum()) > len(x) - m else is_near
