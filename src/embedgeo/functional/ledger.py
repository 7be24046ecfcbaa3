"""Moments of rows that are sums of several streams, such as a block's input and its writes, exactly
divided up.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Found
from embedgeo.functional.moments import column, merged, moment_reductions, ratio, row_chunks
from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.tokens import TokenTable, within_weights

ROUNDING = "rounding"
"""Name of the stream that is what the rounding of the model's dtype leaves."""


class StreamMoments(NamedTuple):
    """Moments of K streams of the same rows, and of each two of them together.

    Attributes:
        n: number of rows, scalar.
        mean: mean row of each stream, shape (K, d).
        m2: squared deviations from it, summed over rows, shape (K, d).
        scatter: Σ_i (x_ik − mean_k) · (x_il − mean_l) over rows i, shape (K, K).
        cosine: cosines of the rows of each stream and of the first one, summed, shape (K,); 0 where
            one is zero.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    scatter: Tensor
    cosine: Tensor

    @classmethod
    def empty(cls, num_streams: int, dim: int) -> "StreamMoments":
        """The moments of no rows."""
        n = torch.zeros((), dtype=torch.float64)
        rows = n.new_zeros(num_streams, dim)
        return cls(n, rows, rows, n.new_zeros(num_streams, num_streams), rows[:, 0])

    def merge(self, other: "StreamMoments") -> "StreamMoments":
        """The moments of the rows of both."""
        return merged((self, other))

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """The means of all ranks, then squares about them."""
        reduced = moment_reductions(phase, found, self.n, self.mean, self.m2)
        if phase == 1:
            reduced["cosine"] = self.cosine
        if phase == 2:
            shift = self.mean - found["mean"]
            reduced["scatter"] = self.scatter + column(self.n, shift) * (shift @ shift.mT)
        return reduced

    def of_ranks(self, found: Found) -> "StreamMoments":
        """The moments of the rows of all ranks."""
        return StreamMoments(*(found[name] for name in self._fields))


def stream_moments(x: Tensor) -> StreamMoments:
    """Moments of the rows of K streams, ``x`` of shape (n, K, d), of any floating dtype."""
    num_streams, dim = x.shape[1:]
    moments = StreamMoments.empty(num_streams, dim)
    moments = StreamMoments(*(state.to(x.device, accumulator_dtype(x.device)) for state in moments))
    for chunk in row_chunks(x.flatten(1)):
        rows = x[chunk].to(moments.mean.dtype)
        mean = rows.mean(0)
        directions = torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)
        cosine = (directions * directions[:, :1]).sum((0, 2))
        centred = rows - mean
        by_stream = centred.transpose(0, 1).flatten(1)
        n, m2 = rows.new_full((), len(rows)), centred.square().sum(0)
        moments = moments.merge(StreamMoments(n, mean, m2, by_stream @ by_stream.mT, cosine))
    return moments


def within_products(types: TokenTable, num_sequences: Tensor) -> tuple[Tensor, Tensor]:
    """The variance within token types of a sum of K streams, as products of each two of them, shape
    (K, K).

    Args:
        types: the token table of streams.
        num_sequences: number of sequences that its rows came from, scalar.

    Returns:
        Those of the plug-in V_W, of exactly the rows seen, and those of the unbiased one, of the
        same weights as `within_variance`; NaN where no token type has a pair.
    """
    n = types.n.sum()
    weights = within_weights(types.n, types.sequences, types.sequence_n2, num_sequences)
    pairs = column(types.n, types.m2) * types.m2 - torch.where(
        num_sequences <= 1, 0, types.sequence_m2
    )
    return ratio(types.m2.sum(0), n), ratio((column(weights, pairs) * pairs).sum(0), n)


def divided(name: str, products: Tensor, streams: Sequence[str]) -> dict[str, Tensor]:
    """A quadratic form of a sum of streams, and what each stream and each two of them have of it.

    Args:
        name: of the form: Q, M, V, V_W or V_W_unbiased.
        products: the form's bilinear one of each two streams, shape (K, K).
        streams: their names. All that involves `ROUNDING`, where it is among them, is one part.

    Returns:
        ``name``, the form of the sum; ``{name}_from_{stream}``; ``{name}_from_{stream}_{other}``,
        twice the product; the same with ``share`` in place of ``from``, divided by the form, NaN
        where that is 0. The parts of a stream that is zero in all rows, whose product with itself
        is 0, are left out. Parts add up to the whole. And ``{name}_by_{stream}``, the share of a
        stream with half of each product that it has with another one, the rounding among them;
        these add up to 1.

    >>> parts = divided("Q", torch.tensor([[4.0, 1.0], [1.0, 2.0]]), ("stream", "mlp"))
    >>> {key: value.item() for key, value in parts.items() if "from" in key}
    {'Q_from_stream': 4.0, 'Q_from_mlp': 2.0, 'Q_from_stream_mlp': 2.0}
    """
    whole = products.sum()
    plain = [k for k, stream in enumerate(streams) if stream != ROUNDING]
    parts = {streams[k]: products[k, k] for k in plain}
    parts |= {
        f"{streams[k]}_{streams[other]}": 2 * products[k, other]
        for k, other in combinations(plain, 2)
    }
    if ROUNDING in streams:
        rounding = products[streams.index(ROUNDING)]
        parts[ROUNDING] = 2 * rounding.sum() - rounding[streams.index(ROUNDING)]
    return {
        name: whole,
        **{f"{name}_from_{part}": value for part, value in parts.items()},
        **{f"{name}_share_{part}": ratio(value, whole) for part, value in parts.items()},
        **{
            f"{name}_by_{stream}": ratio(each.sum(), whole)
            for stream, each in zip(streams, products, strict=True)
        },
    }
