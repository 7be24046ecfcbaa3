"""Rows of an embedding matrix that are to be known by name: copies, those that no token uses, and untrained ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedgeo.functional.vocabulary import copies, untrained_rows
from embedgeo.results.wording import listed, short

_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
_MOST = 6
"""Rows of each kind that are named in a line."""


@dataclass(frozen=True)
class Names:
    """What a tokenizer says of the rows of a matrix.

    Attributes:
        texts: by token id.
        unreachable: ids of tokens for bytes that UTF-8 never has: no text has them (Land & Bartolo 2024).
    """

    texts: Mapping[int, str]
    unreachable: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Names":
        """The names of a tokenizer's tokens: their texts, or their pieces where these are no text."""
        pieces = {number: str(piece) for piece, number in tokenizer.get_vocab().items()}
        spelled = {number: str(tokenizer.decode([number])) for number in pieces}
        texts = {i: text if text and "�" not in text else pieces[i] for i, text in spelled.items()}
        bytewise = {chr(byte) for byte in _NEVER_IN_UTF8}  # as byte-level tokenizers write these bytes
        fallback = {f"<0x{byte:02X}>" for byte in _NEVER_IN_UTF8}
        unreachable = {i for i, p in pieces.items() if p in fallback or (p in bytewise and "�" in spelled[i])}
        return cls(texts, frozenset(unreachable))


@dataclass(frozen=True)
class NamedRows:
    """Rows of a matrix that are to be known by name.

    Attributes:
        num_rows: of the matrix.
        first: for each row the first one that is the same, shape (n,).
        without_token: ids that the tokenizer does not have; None if there is no tokenizer.
        untrained: shape (n,), bool; None where that cannot be told.
    """

    num_rows: int
    first: Tensor
    without_token: Tensor | None
    untrained: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, names: Names | None) -> "NamedRows":
        """Those of a matrix, shape (n, d)."""
        first = copies(matrix)
        if names is None:
            return cls(len(matrix), first, None, None)
        ids = range(len(matrix))
        without = torch.tensor([i for i in ids if i not in names.texts], dtype=torch.int64)
        unused = torch.tensor([i for i in ids if i not in names.texts or i in names.unreachable], dtype=torch.int64)
        return cls(len(matrix), first, without, untrained_rows(matrix, unused))

    @property
    def num_copies(self) -> Tensor:
        """How many rows are the same as each row, itself counted, shape (n,)."""
        return self.first.bincount(minlength=self.num_rows)[self.first]

    def counts(self) -> dict[str, float]:
        """How many rows are of each kind; NaN where that is unknown."""
        without, untrained = self.without_token, self.untrained
        return {
            "duplicate_rows": float((self.num_copies > 1).sum()),
            "rows_without_token": torch.nan if without is None else float(len(without)),
            "untrained_rows": torch.nan if untrained is None else float(untrained.sum()),
        }

    def trained(self) -> Tensor:
        """Ids of the rows that a token uses and that do not look untrained."""
        kept = torch.ones(self.num_rows, dtype=torch.bool)
        if self.without_token is not None:
            kept[self.without_token] = False
        return (kept if self.untrained is None else kept & ~self.untrained).nonzero().flatten()

    def table(self, names: Names | None) -> pd.DataFrame:
        """A row for each: token_id, token, same_as (the first of its copies, or -1), without_token and untrained."""
        is_copy = self.num_copies > 1
        without, untrained = (torch.zeros(self.num_rows, dtype=torch.bool) for _ in range(2))
        if self.without_token is not None:
            without[self.without_token] = True
        if self.untrained is not None:
            untrained = self.untrained
        ids = (is_copy | without | untrained).nonzero().flatten()
        texts = {} if names is None else names.texts
        columns = {"same_as": self.first.where(is_copy, -1), "without_token": without, "untrained": untrained}
        table = pd.DataFrame({"token_id": ids.numpy(), **{key: each[ids].numpy() for key, each in columns.items()}})
        return table.assign(token=[texts.get(i, "") for i in ids.tolist()])


def described(layer: str, dim: int, values: pd.Series, table: pd.DataFrame) -> str:
    """A line about the rows of a matrix that are to be known by name.

    Args:
        layer: the name of the matrix.
        dim: d.
        values: of the matrix, by metric.
        table: see `NamedRows.table`.
    """
    without, untrained, copied = table[table.without_token], table[table.untrained], table[table.same_as >= 0]
    parts = [f"{short(values['n'])} rows of {dim} measured"]
    if len(without):
        parts.append(f"{len(without)} without a token ({_ranges(without.token_id)})")
    if len(copied):
        groups = [" = ".join(_named(rows)) for _, rows in copied.groupby("same_as")]
        parts.append(f"{len(copied)} equal to another one ({'; '.join(groups[:3])})")
    if len(untrained):
        parts.append(f"{len(untrained)} look untrained ({', '.join(_named(untrained))})")
    if values["untrained_rows"] != values["untrained_rows"]:
        parts.append("untrained rows cannot be told from the others")
    return f"  {layer}: {'; '.join(parts)}"


def _named(rows: pd.DataFrame) -> Sequence[str]:
    named = [f"{row.token_id} {row.token!r}" if row.token else str(row.token_id) for row in rows.itertuples()]
    return named if len(named) <= _MOST else [*named[:_MOST], f"{len(named) - _MOST} more"]


def _ranges(ids: Iterable[int]) -> str:
    """Numbers in ascending order, those in a row as a range.

    >>> _ranges([3, 7, 8, 9])
    '3, 7–9'
    """
    runs = [[i for _, i in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return listed([f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], _MOST)
