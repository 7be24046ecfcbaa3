"""Rows that make the numbers: those of largest norm, and the first one of each sequence.

The rows of largest norm are held, so that they can be left out afterwards: a state without some
rows is that state merged with the negative of theirs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Found
from embedgeo.functional.moments import (
    mean_of,
    merge_parts,
    moment_reductions,
    ratio,
    squares_about,
)
from embedgeo.functional.precision import sent, state_device
from embedgeo.functional.rows import NO_TYPE, RowIds, Rows
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.functional.tokens import TokenTable, token_table

NUM_HELD = 128
"""Number of rows of largest norm that are held."""
TOP_SHARE, MOST_TOP = 1e-3, 64
"""The top rows are this share of all rows, rounded up, and at most so many."""
LARGE = 4
"""Times the median norm beyond which a norm is large."""

_STEPS = 16  # bins an octave
# bins span 2^-160 to 2^160, as norms of float32 rows do; one more at each end has the rest, and the
# first of these zero rows, too
_HALF = 160 * _STEPS
_LARGE_STEPS = 2 * _STEPS  # that is `LARGE`
# columns of `OutlierRows.facts`
_NORM, _TOKEN, _SEQUENCE, _PLACE, _PAIRED, _DISTANCE = range(6)


class OutlierRows(NamedTuple):
    """The rows of largest norm, how often each size of norm occurs, and the moments of first
    positions.

    States of rows that share no sequence merge exactly. Of rows of one norm those that were seen
    first are held.

    Attributes:
        rows: the rows of largest norm, in descending order, shape (m, d); m is at most `NUM_HELD`.
        facts: of each its norm, token id (-100: none), the number of its sequence, its place in
            that, from 0 (-1: it is alone in it), how many rows of its sequence
            have its token id, and the sum of its squared distances from these, both NaN where
            that was not looked at; shape (m, 6).
        bins: number of rows by norm, in steps of 1/16 octave, shape (B,).
        first_n: number of rows that are the first one of a sequence of two or more, scalar.
        first_mean: their mean, shape (d,).
        first_m2: squared deviations from it, summed over these rows, shape (d,).
        num_sequences: number of sequences, scalar.
    """

    rows: Tensor
    facts: Tensor
    bins: Tensor
    first_n: Tensor
    first_mean: Tensor
    first_m2: Tensor
    num_sequences: Tensor

    @classmethod
    def empty(cls, dim: int, device: torch.device | None = None) -> "OutlierRows":
        """The state of no rows."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        row = zero.new_zeros(dim)
        held = zero.new_zeros(0, dim), zero.new_zeros(0, 6)
        return cls(*held, zero.new_zeros(2 * _HALF + 2), zero, row, row, zero)

    @property
    def is_first(self) -> Tensor:
        """Marks of the rows held that are the first one of a sequence of two or more, (m,)."""
        return self.facts[:, _PLACE] == 0

    @property
    def token_ids(self) -> Tensor:
        """Shape (m,), int64; -100 where there is none."""
        return self.facts[:, _TOKEN].long()

    def merge(self, other: "OutlierRows") -> "OutlierRows":
        """The state of the rows of ``self`` followed by those of ``other``."""
        facts = torch.cat((self.facts, _renumbered(other.facts, self.num_sequences)))
        largest = _largest(facts[:, _NORM])
        first = merge_parts(
            [(each.first_n, each.first_mean, each.first_m2) for each in (self, other)]
        )
        return OutlierRows(
            torch.cat((self.rows, other.rows)).index_select(0, largest),
            facts.index_select(0, largest),
            self.bins + other.bins,
            *first,
            self.num_sequences + other.num_sequences,
        )

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """What is known of the rows held by all ranks, and then those of them that are the largest;
        first positions as moments are.
        """
        first = moment_reductions(phase, found, self.first_n, self.first_mean, self.first_m2)
        if phase == 0:
            return {"lengths": found.placed(self.bins.new_tensor(len(self.rows)))}
        if phase == 1:
            found["all_lengths"] = found["lengths"].long().tolist()
            return first | {
                "facts": found.placed(self.facts, found["all_lengths"]),
                "bins": self.bins,
                "sequences": found.placed(self.num_sequences),
            }
        if phase == 2:
            largest = _largest(found["facts"][:, _NORM])
            found["largest"] = largest
            place = largest - sum(found["all_lengths"][: found.rank])
            own = ((place >= 0) & (place < len(self.rows))).nonzero().flatten()
            rows = self.rows.new_zeros(len(largest), self.rows.shape[1])
            rows.index_copy_(0, own, self.rows.index_select(0, place[own]))
            return first | {"rows": rows}
        return {}

    def of_ranks(self, found: Found) -> "OutlierRows":
        """The state of the rows of all ranks."""
        sequences = found["sequences"]
        before = sequences.cumsum(0) - sequences
        lengths = torch.tensor(found["all_lengths"], device=before.device)
        facts = _renumbered(found["facts"], before.repeat_interleave(lengths))
        return OutlierRows(
            found["rows"],
            facts.index_select(0, found["largest"]),
            found["bins"],
            found["n"],
            found["mean"],
            found["m2"],
            sequences.sum(),
        )

    def select(self, chosen: Tensor) -> "OutlierRows":
        """The state with only those of the rows held that are marked, shape (m,)."""
        return self._replace(rows=self.rows[chosen], facts=self.facts[chosen])


def _largest(norms: Tensor) -> Tensor:
    """Places of the rows to hold: of equal norms, the first ones."""
    return norms.sort(descending=True, stable=True).indices[:NUM_HELD]


def _renumbered(facts: Tensor, first: Tensor) -> Tensor:
    """The facts of rows whose sequences are counted from ``first`` on."""
    facts = facts.clone()
    facts[:, _SEQUENCE] += first
    return facts


def outlier_rows(rows: Rows, norms: Tensor, pairs: Tensor | None = None) -> OutlierRows:
    """The state of the rows of a batch, given their norms, shape (n,), and what
    `tokens.type_table_and_pairs` has of each, without which `negative_table` is unknown.
    """
    x, ids = rows.embeddings, rows.ids
    device = state_device(x.device)
    if not len(x):
        return OutlierRows.empty(x.shape[1], device)
    on_cpu = ids.once("labels", lambda: _labels(ids, len(x)))
    labels = ids.once(("labels", device), lambda: sent(on_cpu.double(), device))
    norms = norms.to(device)
    pairs = norms.new_full((len(x), 2), torch.nan) if pairs is None else pairs.to(device)
    largest = _largest(norms)
    bins = norms.new_zeros(2 * _HALF + 2).index_add_(0, _bin(norms), torch.ones_like(norms))
    places = ids.once(
        ("first rows", x.device),
        lambda: sent((on_cpu[:, _PLACE - _TOKEN] == 0).nonzero().flatten(), x.device),
    )
    first = x.index_select(0, places).to(device, norms.dtype)
    mean = first.sum(0) / max(1, len(first))
    counts = ids.once(
        ("counts", device), lambda: norms.new_tensor([len(first), rows.num_sequences])
    )
    num_first, num_sequences = counts.unbind()
    return OutlierRows(
        x.index_select(0, largest.to(x.device)),
        torch.cat((norms[:, None], labels, pairs), 1).index_select(0, largest),
        bins,
        num_first,
        mean,
        (first - mean).square_().sum(0),
        num_sequences,
    )


def _bin(norms: Tensor) -> Tensor:
    """The place of each norm among the bins."""
    return torch.add(_HALF + 1, norms.log2(), alpha=_STEPS).clamp_(0, 2 * _HALF + 1).long()


def _labels(ids: RowIds, n: int) -> Tensor:
    """The `OutlierRows.facts` of rows that follow from their ids: token, sequence and place in it,
    shape (n, 3).
    """
    every = torch.arange(n, device="cpu")
    token = torch.full_like(every, NO_TYPE) if ids.token_ids is None else ids.token_ids
    sequence = every if ids.sequences is None else ids.sequences[0]
    order = sequence.argsort(stable=True)
    ascending = sequence[order]
    place = torch.empty_like(every)
    place[order] = every - torch.searchsorted(ascending, ascending)
    place.masked_fill_(sequence.bincount()[sequence] == 1, -1)
    return torch.stack((token, sequence, place), 1)


def outlier_shares(
    outliers: OutlierRows, n: Tensor, mean: Tensor, variance: Tensor
) -> dict[str, Tensor]:
    """Shares of rows that stand out.

    Args:
        outliers: the state of the rows.
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        variance: V, scalar.

    Returns:
        ``top_rows_share``, the share of V, about the mean of all rows, of the 0.1 % of rows of
        largest norm, rounded up, at most 64; ``first_positions_share``, that of the first row of
        each sequence of two or more; and ``large_norm_rows``, the share of the rows whose norm is
        beyond 4 times the median norm, to a bin's width: none of at most 4 times, and all from 4.18
        times on. NaN where undefined: no rows, rows that do not vary, no such sequences, and a
        median norm of 0 or beyond 2^±160.
    """
    up_to = outliers.bins.long().cumsum(0).to(n.dtype)
    total = n * variance
    top = outliers.rows[:MOST_TOP]
    is_top = torch.arange(len(top), device=n.device) < num_top(n)
    squares = (top - mean).square().sum(1)
    first = squares_about(mean, outliers.first_n, outliers.first_mean, outliers.first_m2).sum()
    return {
        "top_rows_share": ratio((is_top * squares).sum(), total),
        "first_positions_share": ratio(first, total.where(outliers.first_n > 0, torch.nan)),
        "large_norm_rows": ratio(*_num_large(up_to, n)),
    }


def num_top(n: Tensor) -> Tensor:
    """Number of the top rows among n."""
    return (n * TOP_SHARE).ceil().clamp(max=MOST_TOP)


def _median_bin(up_to: Tensor, n: Tensor) -> Tensor:
    """The bin of the median norm, given the number of rows up to each bin."""
    return torch.searchsorted(up_to, n / 2)


def _num_large(up_to: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Number of rows whose norm is large, and n, NaN where the median is in no bin."""
    median = _median_bin(up_to, n)
    last = len(up_to) - 1
    is_known = (median > 0) & (median < last) & (n > 0)
    below = up_to.take((median + _LARGE_STEPS).clamp(max=last))
    return n - below, n.where(is_known, torch.nan)


def large_rows(outliers: OutlierRows, n: Tensor) -> Tensor:
    """Marks of the rows held that are large and no first position, shape (m,).

    They are those with a norm beyond 4 times the median, as `outlier_shares` counts them; where
    there are none, the top rows.
    """
    median = _median_bin(outliers.bins.long().cumsum(0).to(n.dtype), n)
    is_large = (
        (_bin(outliers.facts[:, _NORM]) > median + _LARGE_STEPS) & (median > 0) & ~outliers.is_first
    )
    rank = torch.arange(len(is_large), device=is_large.device)
    is_top = (rank < num_top(n)) & ~outliers.is_first
    return torch.where(is_large.any(), is_large, is_top)


def outlier_table(outliers: OutlierRows, mean: Tensor, m2: Tensor) -> dict[str, Tensor]:
    """``token_id`` (-100: none), ``place`` in the sequence, from 0 (-1: unknown), ``norm`` and
    ``share_of_V`` of the rows of largest norm, in descending order, shape (m,).
    """
    squares = (outliers.rows - mean).square().sum(1)
    return {
        "token_id": outliers.token_ids,
        "place": outliers.facts[:, _PLACE].long(),
        "norm": outliers.facts[:, _NORM],
        "share_of_V": ratio(squares, m2.sum().expand_as(squares)),
    }


def negative_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The moments that leave rows ``x``, shape (k, d), out of those they are merged with: n, mean
    and m2.
    """
    n = x.new_tensor(float(len(x)))
    mean = mean_of(n, x.sum(0))
    return -n, mean, -(x - mean).square().sum(0)


def negative_scatter(x: Tensor) -> Scatter:
    """The scatter that leaves rows ``x`` out of the one it is merged with."""
    n, mean, scatter = row_scatter(x, small=True)
    return Scatter(-n, mean, -scatter)


def negative_table(left_out: OutlierRows) -> TokenTable:
    """The table that leaves the rows held out of the one it is merged with.

    Of a type and sequence with n rows, r of which are left out, Σ n_s² loses 2 r n - r², and Σ n_s
    m2_s the squared distances of all pairs with one of these r.
    """
    sequences = left_out.facts[:, _SEQUENCE].long()
    table = token_table(left_out.rows, left_out.token_ids, sequences)
    at = torch.searchsorted(table.token_ids.to(left_out.rows.device), left_out.token_ids)
    both = torch.stack((left_out.token_ids, sequences), 1)
    _, group, counts = both.unique(dim=0, return_inverse=True, return_counts=True)
    num_left_out = counts[group].double()
    paired, distance = left_out.facts[:, _PAIRED], left_out.facts[:, _DISTANCE]
    is_gone = (paired == num_left_out) / num_left_out  # nothing is left in the sequence
    gone, pairs, distances = (
        torch.zeros_like(table.n).index_add_(0, at, each)
        for each in (is_gone, 2 * paired, distance)
    )
    return TokenTable(
        token_ids=table.token_ids,
        n=-table.n,
        mean=table.mean,
        m2=-table.m2,
        sequences=-gone,
        sequence_n2=table.sequence_n2 - pairs,
        sequence_m2=table.sequence_m2 - distances,
    )
