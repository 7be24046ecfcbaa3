"""Uniform sampling without replacement from a stream of rows: of those with the smallest keys.

A key is a uniform random number that depends only on the seed and on the number of the row: how
many are before it in one process. Of R streams, one process would see batch b of stream r as batch
b R + r. So neither batches nor ranks matter, and of streams of one length, such as those of layers,
equal numbers are drawn.

A stream does not see the batches of others, and takes them to have as many rows as its own: that is
right where all batches but the last have one size. Once its own differ, its rows get numbers that
no other stream has. `Sample.reduction` knows all sizes; there a stream that has left out no row
gives all of them their right keys.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks, State, Tensors
from embedgeo.functional.precision import sent
from embedgeo.functional.rows import Rows

_STREAM_BITS = 40
_IN_STREAM = (1 << _STREAM_BITS) - 1
ONE_RANK = Ranks(0, 1)
_COLUMNS = "rows", "keys", "labels", "positions"  # with an entry for each row of a sample


@dataclass(eq=False)
class Sample(State):
    """A uniform sample of the rows of one or more streams.

    A metric holds it on the CPU, for a device may not have room for those of all layers.

    Attributes:
        rows: shape (m, d), in no particular order; in float32 until float64 rows are seen.
        keys: shape (m,), int64 of 53 bits.
        labels: shape (m, 3), int64, the `row_labels`.
        positions: shape (m,), int64, stream · 2⁴⁰ + position of the rows in it; of all
            ranks their numbers.
        seen: number of rows of the streams, those that were left out among them, scalar int64.
        batches: shape (B,), int64, number of streams · 2⁴⁰ + rows of each batch of one stream of
            several; else empty.
        size: how many rows are drawn at most.
        seed: of the keys.
    """

    rows: Tensor
    keys: Tensor
    labels: Tensor
    positions: Tensor
    seen: Tensor
    batches: Tensor
    size: int
    seed: int = 0

    on_host = True

    @classmethod
    def empty(
        cls,
        dim: int,
        size: int,
        *,
        seed: int = 0,
    ) -> "Sample":
        """The sample of no rows."""
        require_seed(seed)
        none = torch.zeros(0, dtype=torch.int64)
        return cls(
            torch.zeros(0, dim),
            none,
            none.new_zeros(0, 3),
            none,
            torch.tensor(0),
            none,
            size,
            seed,
        )

    def extend(self, rows: Rows, ranks: Ranks = ONE_RANK) -> "Sample":
        """The sample once the next batch has been seen, of the stream that has the number of the
        rank.

        Args:
            rows: of the batch.
            ranks: each of them has a stream. Rows of one stream are numbered in turn, of several as
                the module says.
        """
        count = rows.num_kept
        batches = self.batches
        if ranks.num_ranks > 1:
            size = batches.new_full((1,), (ranks.num_ranks << _STREAM_BITS) + count)
            batches = torch.cat((batches, size))
        number = self._next_number(batches, *ranks)
        start = stream_position(ranks.rank, int(self.seen))
        keys, positions = _of_batch(int(number), start, count, self.seed)
        if rows.numbers is not None:
            keys = keys[rows.numbers]
            positions = positions[rows.numbers]
        batch = replace(
            self,
            rows=rows.embeddings,
            keys=keys,
            labels=rows.ids.once("labels", lambda: row_labels(rows)),
            positions=positions,
            seen=self.seen.new_full((), count),
        )
        return replace(self._with(batch), batches=batches)

    def _with(self, other: "Sample") -> "Sample":
        """The sample of the rows that both were drawn from; only the rows that are in it are
        copied.
        """
        parts = [self.rows, other.rows]
        columns = {name: getattr(other, name) for name in ("keys", "labels", "positions")}
        if len(self.keys):
            columns = {
                name: torch.cat((getattr(self, name), column)) for name, column in columns.items()
            }
        if len(columns["keys"]) > self.size and len(other.keys):
            drawn = self._drawn(columns["keys"])
            columns = {name: column[drawn] for name, column in columns.items()}
            parts = self._drawn_rows(other.rows, drawn)
        dtype = torch.promote_types(
            torch.promote_types(self.rows.dtype, other.rows.dtype), torch.float32
        )
        return replace(
            self,
            rows=torch.cat([part.to(self.rows.device, dtype) for part in parts]),
            **columns,
            seen=self.seen + other.seen,
        )

    def merge(self, other: "Sample") -> "Sample":
        """The sample of a stream that goes on with the rows of another one, which are counted from
        0 there.

        Where the other sample has left out no row, and neither is of one stream of several, its
        rows get the keys that they have in the whole stream. Otherwise they keep their keys, or get
        others of the same law where both have keys of one seed.
        """
        batches = torch.cat((self.batches, other.batches))
        if not int(self.seen) or not int(other.seen):
            return replace(self._with(other), batches=batches)
        keys = other.keys
        if not len(batches) and bool(other._is_whole()):
            keys = _keys(self.seen + other.positions, self.seed)
        elif bool(torch.isin(keys, self.keys).any()):
            keys = other._other_keys(int(_keys(self.seen, self.seed)))
        shifted = replace(other, keys=keys, positions=other.positions + int(self.seen))
        return replace(self._with(shifted), batches=batches)

    def _other_keys(self, seed: int) -> Tensor:
        """The smallest of as many keys of another seed as rows were seen, in random order."""
        every = _keys(torch.arange(int(self.seen), device=self.keys.device), seed)
        smallest = every.topk(len(self.keys), largest=False).values
        return smallest[_keys(self.keys, seed).argsort()]

    def _is_whole(self) -> Tensor:
        """Whether no row of the streams was left out."""
        return (self.seen == len(self.keys)) | (len(self.keys) < self.size)

    def _drawn_rows(self, others: Tensor, drawn: Tensor) -> list[Tensor]:
        """The rows at these indices, ascending, among those of the sample and the ``others`` after
        them.
        """
        num_held = len(self.keys)
        num_own = int((drawn < num_held).sum())
        places = drawn[:num_own], drawn[num_own:] - num_held
        pairs = zip((self.rows, others), places, strict=True)
        return [rows.index_select(0, sent(each, rows.device)) for rows, each in pairs]

    def on(self, device: torch.device) -> "Sample":
        """The sample with its rows on a device, to compute with them."""
        return replace(self, rows=self.rows.to(device))

    def select(self, chosen: Tensor) -> "Sample":
        """The sample with only the rows at these indices, in their order."""
        held = {name: getattr(self, name) for name in _COLUMNS}
        return replace(
            self,
            **{name: each.index_select(0, chosen.to(each.device)) for name, each in held.items()},
        )

    def types_and_sequences(self) -> tuple[Tensor | None, Tensor | None]:
        """The token types and sequences of the rows; None of those that none has.

        A row that has none has one of its own, below 0. Sequences are told by the place of their
        first row.
        """
        _, types, distances = self.labels.unbind(1)
        own = -1 - self.positions
        has_types = not len(types) or bool((types >= 0).any())
        return (
            types.where(types >= 0, own) if has_types else None,
            (self.positions - distances).where(distances >= 0, own)
            if bool((distances >= 0).any())
            else None,
        )

    def num_bytes(self, num_rows: int, num_types: int) -> int:
        """Bytes of the rows that are drawn, in one process."""
        columns = [getattr(self, name) for name in _COLUMNS]
        of_row = sum(each.itemsize * each.shape[1:].numel() for each in columns)
        return self.seen.nbytes + min(num_rows, self.size) * of_row

    def reduction(self, ranks: Ranks) -> "_Drawing":
        """Ranks draw from the rows of all of them."""
        return _Drawing(self, ranks)

    def _next_number(self, batches: Tensor, stream: int, num_streams: int) -> Tensor:
        """Number of the first row of the next batch, the last one of these ``batches``."""
        if num_streams == 1 and not len(batches):
            return stream_position(stream, self.seen)
        own_number = stream_position(stream + 1, self.seen)
        if num_streams == 1:  # the rows so far are of one stream of several
            return own_number
        whole = batches[0]
        last = batches[-1]
        size = whole & _IN_STREAM
        are_even = (
            (batches[:-1] == whole).all()
            & (last <= whole)
            & (last >> _STREAM_BITS == whole >> _STREAM_BITS)
        )
        num_before = len(batches) - 1
        is_known = are_even & (num_before * size == self.seen)
        return torch.where(is_known, (num_before * num_streams + stream) * size, own_number)

    def _numbered(self, sizes: Tensor) -> "Sample":
        """The sample with numbers as positions, and keys that follow these where no row was left
        out.
        """
        numbers = row_numbers(self.positions, sizes)
        keys = torch.where(self._is_whole(), _keys(numbers, self.seed), self.keys)
        return replace(self, keys=keys, positions=numbers)

    def _drawn(self, keys: Tensor) -> Tensor:
        """Indices, ascending, of the rows with the smallest keys."""
        smallest = keys.topk(min(self.size, len(keys)), largest=False, sorted=False)
        return smallest.indices.sort().values


class _Drawing:
    """The `Reduction` of a `Sample`: the sizes of all batches tell the rows' numbers and so their
    keys; the keys of all rows tell which are drawn; these travel.
    """

    def __init__(self, sample: Sample, ranks: Ranks) -> None:
        self._sample = sample
        self._ranks = ranks

    def maxima(self) -> Tensors:
        """Number of batches, and marks of batches that are not all known and of float64 rows."""
        sample = self._sample
        sizes = sample.batches & _IN_STREAM
        is_of_all = sample.batches >> _STREAM_BITS == self._ranks.num_ranks
        is_known = is_of_all.all() & (sizes.sum() == sample.seen)
        is_double = sizes.new_tensor(sample.rows.dtype == torch.float64)
        facts = (sizes.new_tensor(len(sizes)), (~is_known).long(), is_double)
        return {"facts": torch.stack(facts).double()}

    def counts(self, maxima: Tensors) -> Tensors:
        """Sizes of batches, and the number of rows of each rank's sample."""
        most, is_unknown, is_double = map(int, maxima["facts"].tolist())
        self._is_known = not is_unknown
        self._is_double = bool(is_double)
        sizes = (self._sample.batches & _IN_STREAM).double()
        return {
            "sizes": self._ranks.placed(torch.cat((sizes, sizes.new_zeros(most - len(sizes))))),
            "lengths": self._ranks.placed(sizes.new_tensor(len(self._sample.keys))),
        }

    def sums(self, counts: Tensors) -> Tensors:
        """The keys of all rows."""
        if self._is_known:
            self._sample = self._sample._numbered(counts["sizes"].long())
        self._lengths = counts["lengths"].long()
        return {"keys": self._ranks.placed(self._sample.keys, self._lengths.tolist())}

    def squares(self, sums: Tensors) -> Tensors:
        """The rows that are drawn, those of each rank at their places."""
        ends = self._lengths.cumsum(0)
        drawn = self._sample._drawn(sums["keys"])
        rank = torch.searchsorted(ends, drawn, right=True)
        own = self._sample.select(
            drawn[rank == self._ranks.rank] - (ends - self._lengths)[self._ranks.rank]
        )
        own = replace(own, rows=own.rows.to(torch.float64 if self._is_double else torch.float32))
        lengths = rank.bincount(minlength=self._ranks.num_ranks).tolist()
        placed = {name: self._ranks.placed(getattr(own, name), lengths) for name in _COLUMNS}
        return {"seen": own.seen, **placed}

    def result(self, squares: Tensors) -> Sample:
        """The sample of the rows of all ranks, in the order in which they are drawn."""
        states: dict[str, Any] = {**squares, "batches": self._sample.batches[:0]}
        drawn = replace(self._sample, **states)
        return drawn.select(drawn.keys.argsort(stable=True))


def row_labels(rows: Rows) -> Tensor:
    """Group and type of each row, and its distance from the first row of its sequence, shape
    (n, 3); the last two are -1 where there is none.
    """
    ids = rows.ids
    numbers = rows.numbers
    numbers = torch.arange(rows.num_kept, device="cpu") if numbers is None else numbers
    groups = ids.sequence_ids if ids.groups is None else ids.groups
    none = torch.full_like(numbers, -1)
    first = ids.first_places
    return torch.stack(
        (
            torch.zeros_like(numbers) if groups is None else groups,
            none if ids.token_ids is None else ids.token_ids.clamp(min=-1),
            none if first is None else numbers - numbers[first],
        ),
        dim=1,
    )


def require_seed(seed: int) -> None:
    """Raise ValueError unless a seed is an integer of 63 bits."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be an integer from 0 up, less than 2**63; got {seed!r}.")


@lru_cache(maxsize=4)  # samples of all layers draw from the same rows
def _of_batch(number: int, start: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys of the next rows, of which ``number`` is the first one's, and positions, of which
    ``start`` is.
    """
    places = torch.arange(count, device="cpu")
    return _keys(number + places, seed), start + places


def row_keys(start: int, count: int, *, seed: int) -> Tensor:
    """SplitMix64 keys (Steele, Lea & Flood 2014) of the rows from ``start`` on, shape (count,),
    float64 in [0, 1).
    """
    return _keys(start + torch.arange(count, device="cpu"), seed).double() * 2.0**-53


def stream_position(stream: int, place: Any) -> Any:
    """`Sample.positions` of the row at a place of a stream."""
    return (stream << _STREAM_BITS) + place


def row_numbers(positions: Tensor, sizes: Tensor) -> Tensor:
    """Numbers of rows among those of all streams, from 0, in the order in which one process would
    see their batches.

    ``sizes`` are those of each stream's batches, shape (R, B), the last ones 0 where a stream has
    fewer; of R streams, stream r has the batches r, r + R, ….
    """
    in_turn = sizes.T.flatten()
    before = (in_turn.cumsum(0) - in_turn).view(sizes.T.shape).T  # rows before each batch
    streams = torch.arange(len(sizes), device=sizes.device) << _STREAM_BITS
    ends = sizes.cumsum(1) + streams[:, None]
    batch = torch.searchsorted(ends.flatten(), positions, right=True)
    return positions + (before - ends + sizes).flatten()[batch]


def _keys(numbers: Tensor, seed: int) -> Tensor:
    # The seed is mixed once more than the number: it must neither shift the sequence nor be
    # interchangeable with it.
    z = _mix(numbers) + _mix(_mix(torch.full((), seed, device=numbers.device)))
    return _shift(_mix(z), 11)


def _mix(z: Tensor) -> Tensor:
    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (that of int64 is arithmetic and repeats the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample_batches(sample: Sample, batch_size: int) -> list[Sample]:
    """Random whole batches of ``batch_size`` of the rows, or a smaller one if there are fewer
    rows; in random order.
    """
    order = sample.keys.argsort()
    whole = len(sample.keys) // batch_size * batch_size
    return [sample.select(batch) for batch in order[: whole or None].split(batch_size)]
