"""Which token types are shown, out of all frequencies."""

import torch
from torch import Tensor

from embedgeo.functional import REGRESSION_COUNT_RANGE
from embedgeo.functional.sampling import row_keys

NUM_BINS = 10  # ranges of frequencies


def types_by_frequency(n: Tensor, may_be_shown: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """Choose token types over all frequencies, as figure 1 of Yamagiwa & Shimodaira 2025 shows
    them.

    The types that occur 10 to 100,000 times are put into ten bins of equal width in log n, from the
    least to the most frequent of them. T_r being those in bin r that may be shown, N_r = 2 + ⌊√(4
    |T_r| / max |T_r|)⌋ of them are drawn at random, or all if they are fewer. (Appendix A. The
    authors have since said that the figure was made with 2 + ⌊4 √(|T_r| / max |T_r|)⌋: at most six
    instead of four.)

    Args:
        n: occurrences of each token type, shape (T,).
        may_be_shown: of each, shape (T,), bool; the paper's are those of at least three characters.
            Default: all.
        seed: of the draw, which depends on it, the counts and the order of the types alone.

    Returns:
        Indices of the types, by descending n, int64; none where no type occurs so often.

    >>> types_by_frequency(torch.tensor([5, 10, 10, 10, 10, 10, 10, 1000, 200_000])).shape
    torch.Size([5])
    """
    least, most = REGRESSION_COUNT_RANGE
    counts = n.to(torch.float64)
    counted = ((counts >= least) & (counts <= most)).nonzero().flatten()
    if not len(counted):
        return counted
    logs = counts[counted].log10()
    edges = torch.linspace(
        float(logs.min()), float(logs.max()), NUM_BINS + 1, dtype=logs.dtype, device=logs.device
    )
    bins = torch.bucketize(logs, edges[1:-1], right=True)
    if may_be_shown is not None:
        kept = may_be_shown[counted]
        counted, bins = counted[kept], bins[kept]
    sizes = bins.bincount(minlength=NUM_BINS)
    wanted = 2 + (4 * sizes / sizes.max().clamp(min=1)).sqrt().floor().to(torch.int64)
    drawn = row_keys(0, len(n), seed=seed, device=n.device)[counted].argsort()
    drawn = drawn[bins[drawn].argsort(stable=True)]  # bin after bin, each in a random order
    rank = torch.arange(len(drawn), device=n.device) - (sizes.cumsum(0) - sizes)[bins[drawn]]
    chosen = counted[drawn[rank < wanted[bins[drawn]]]]
    return chosen[counts[chosen].argsort(descending=True, stable=True)]
