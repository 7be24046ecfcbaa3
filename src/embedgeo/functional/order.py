"""The order of the token types: what depends on the ids of rows alone, and not on their embeddings."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """A few rows that belong to consecutive runs.

    Attributes:
        rows: their places in the batch, run by run, shape (c,).
        runs: the runs that they belong to.
        run: which of these each row belongs to, shape (c,).
        first: which row of the part is the first one of each run, shape (k,).
        last: which is the last one, shape (k,).
        lengths: number of rows of each run in the part, shape (k,).
        num_before: number of rows of the first run that are in parts before.
        is_split: whether the first run has rows in other parts.
    """

    rows: Tensor
    runs: slice
    run: Tensor
    first: Tensor
    last: Tensor
    lengths: Tensor
    num_before: int
    is_split: bool


class Runs:
    """Rows that are alike, one run after the other.

    Args:
        rows: their places in the batch, run by run, shape (n,), int64.
        lengths: number of rows in each run, at least 1, shape (R,), int64.
        groups: what each run belongs to, ascending, shape (R,), int64.
    """

    def __init__(self, rows: Tensor, lengths: Tensor, groups: Tensor) -> None:
        self.rows, self.lengths, self.groups = rows, lengths, groups
        self._parts: dict[int, list[Part]] = {}

    def parts(self, num_rows: int) -> list[Part]:
        """The rows, at most ``num_rows`` at a time, so that only longer runs are split; those made are kept."""
        if num_rows not in self._parts:
            self._parts[num_rows] = list(self._divided(num_rows))
        return self._parts[num_rows]

    def _divided(self, num_rows: int) -> Iterator[Part]:
        numbers, all_lengths = torch.arange(len(self.lengths), device=self.rows.device), self.lengths.tolist()
        run = numbers.repeat_interleave(self.lengths, output_size=len(self.rows))
        for rows, runs, num_before in divided(all_lengths, num_rows):
            index = run[rows] - runs.start
            lengths = index.bincount(minlength=runs.stop - runs.start)
            ends = lengths.cumsum(0)
            is_split = all_lengths[runs.start] > num_rows
            yield Part(self.rows[rows], runs, index, ends - lengths, ends - 1, lengths, num_before, is_split)


class TokenOrder:
    """The rows of a batch in the order of their token types and sequences.

    Args:
        token_ids: shape (n,), int64.
        sequence_ids: shape (n,), int64; None: each row is a sequence of its own.

    Attributes:
        types: the token types, ascending, shape (T,).
        counts: number of rows of each, shape (T,).
        sequences: number of sequences that have such rows, shape (T,).
        squares: Σ_s n_s² over these, n_s being the number of rows in sequence s, shape (T,).
    """

    def __init__(self, token_ids: Tensor, sequence_ids: Tensor | None = None) -> None:
        if sequence_ids is None:
            self._order = token_ids.argsort(stable=True)
        else:
            self._order = sequence_ids.argsort(stable=True)
            self._order = self._order[token_ids[self._order].argsort(stable=True)]
        ids = token_ids[self._order]
        self.types, self._type, self.counts = ids.unique_consecutive(return_inverse=True, return_counts=True)
        self.sequences = self.squares = self.counts
        self._run_lengths: Tensor | None = None
        if sequence_ids is not None:
            begins = torch.ones_like(ids, dtype=torch.bool)
            begins[1:] = (ids.diff() != 0) | (sequence_ids[self._order].diff() != 0)
            first = begins.nonzero().flatten()
            self._run_lengths = torch.cat((first, first.new_full((1,), len(ids)))).diff()
            self._run_type = self._type[first]
            none = torch.zeros_like(self.counts)
            self.sequences = none.index_add(0, self._run_type, torch.ones_like(first))
            self.squares = none.index_add(0, self._run_type, self._run_lengths.square())

    @cached_property
    def single(self) -> tuple[Tensor, Tensor]:
        """The places of the rows whose type no other row has, and these types, of ``types``."""
        types = (self.counts == 1).nonzero().flatten()
        return self._order[(self.counts.cumsum(0) - 1)[types]], types

    @cached_property
    def repeated(self) -> Runs:
        """The rows of each type of two or more, which are the groups."""
        several = self.counts > 1
        return Runs(self._order[several[self._type]], self.counts[several], several.nonzero().flatten())

    @cached_property
    def repeated_in_sequences(self) -> Runs | None:
        """The rows of each type, which are the groups, that has several in one sequence, and others in another one.

        None where each row is a sequence of its own.
        """
        if self._run_lengths is None:
            return None
        kept = (self._run_lengths > 1) & (self.sequences > 1)[self._run_type]
        rows = self._order[kept.repeat_interleave(self._run_lengths, output_size=len(self._order))]
        return Runs(rows, self._run_lengths[kept], self._run_type[kept])


def divided(lengths: list[int], num_rows: int) -> Iterator[tuple[slice, slice, int]]:
    """Divide runs of rows into parts of at most ``num_rows``, so that only runs of more rows than that are split.

    Args:
        lengths: number of rows of each run.
        num_rows: at least 1.

    Yields:
        The rows of a part, the runs that they belong to, and how many rows of the first of these came before.

    >>> [(rows.stop, runs.start, runs.stop, num_before) for rows, runs, num_before in divided([2, 1, 6], 4)]
    [(3, 0, 2, 0), (7, 2, 3, 0), (9, 2, 3, 4)]
    """
    start, run, num_before = 0, 0, 0
    while run < len(lengths):
        length, end = lengths[run] - num_before, run + 1
        if length > num_rows:
            yield slice(start, start + num_rows), slice(run, end), num_before
            start, num_before = start + num_rows, num_before + num_rows
            continue
        while end < len(lengths) and length + lengths[end] <= num_rows:
            length, end = length + lengths[end], end + 1
        yield slice(start, start + length), slice(run, end), num_before
        start, run, num_before = start + length, end, 0
