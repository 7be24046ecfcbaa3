"""Neural collapse of the rows before one token: their spread about their mean, and the alignment of
that mean.

Sources: Papyan, Han & Donoho 2020; Galanti, György & Hutter 2022 (arXiv 2112.15121); Wu & Papyan
2024 (arXiv 2405.17767), for language models, whose classes are the tokens that follow.
"""

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio, without_rounding
from embedgeo.functional.precision import row_norms, sent
from embedgeo.functional.rows import BatchIds, RowIds, Rows
from embedgeo.functional.tokens import (
    TokenTable,
    unbiased_split,
    variance_split,
    within_variance,
)


def labelled_by_next(rows: Rows) -> Rows | None:
    """The rows that have a next token, with it as their token type; None where there are no token
    ids.

    It is at the next position of the sequence, counted or not; a row has none that no counted one
    follows.
    """
    if rows.ids.token_ids is None:
        return None
    places, labels = rows.ids.once("labelled by next", lambda: _labels(rows.ids))
    places = rows.ids.once(
        ("places before next", rows.embeddings.device), lambda: sent(places, rows.embeddings.device)
    )
    return Rows(rows.embeddings.index_select(0, places), labels)


def _labels(ids: RowIds) -> tuple[Tensor, RowIds]:
    """Places of the rows that have a next token, and their ids, with it as their type."""
    batch = ids.batch
    if batch.token_ids is None or ids.sequence_ids is None or batch.sequence_ids is None:
        none = torch.zeros(0, dtype=torch.int64)
        return none, RowIds.of(BatchIds(none, None))
    following = _next_places(batch.sequence_ids, batch.kept)
    following = following if ids.kept is None else following[ids.kept]
    places = (following >= 0).nonzero().flatten()
    return places, RowIds.of(BatchIds(batch.token_ids[following[places]], ids.sequence_ids[places]))


def _next_places(sequence_ids: Tensor, kept: Tensor | None) -> Tensor:
    """The place of the next row of each row's sequence, counted or not, or -1 where no row that
    counts follows.
    """
    order = sequence_ids.argsort(stable=True)
    sequences, sequence = sequence_ids[order].unique_consecutive(return_inverse=True)
    place = torch.arange(len(order), device=order.device)
    is_counted = (
        torch.ones_like(place) if kept is None else torch.zeros_like(place).index_fill(0, kept, 1)
    )
    counted = torch.where(is_counted[order] > 0, place, -1)
    last = torch.full_like(sequences, -1).scatter_reduce(0, sequence, counted, "amax")
    has_next = (place < last[sequence]).nonzero().flatten()
    return torch.full_like(place, -1).index_copy(0, order[has_next], order[has_next + 1])


def collapse_values(types: TokenTable, num_sequences: Tensor) -> dict[str, Tensor]:
    """``nc1`` and ``nc1_unbiased``: the variance within classes over that between them, tr Σ_W / tr
    Σ_B.

    The first is of exactly the rows seen, each class weighted by its rows; the second of the
    estimates of `unbiased_split`, NaN where that of V_B is not positive. (Papyan et al.'s tr(Σ_W
    Σ_B⁺) / C is unstable for more classes than dimensions.)
    """
    split, (n, _, m2) = variance_split(types), types.pooled()
    unbiased = unbiased_split(n, ratio(m2, n), within_variance(types, num_sequences))
    between = unbiased["V_B_unbiased"]
    return {
        "nc1": ratio(split["V_W"], split["V_B"]),
        "nc1_unbiased": torch.where(
            between > 0, ratio(unbiased["V_W_unbiased"], between), torch.nan
        ),
    }


def class_distance_values(types: TokenTable) -> dict[str, Tensor]:
    """The class-distance normalized variance, (σ_s² + σ_t²) / (2 ‖μ_s - μ_t‖²): mean over the pairs
    of types s ≠ t.

    ``cdnv`` has sample variances, and not what noise adds to the squared distance of two means,
    σ_s² / n_s + σ_t² / n_t: of the pairs for which more than as much again is left, whose share is
    ``cdnv_pairs``, for inverses of what is near 0 by chance would outweigh all others. All types
    have two or more rows.
    """
    n, m2 = types.n, types.m2
    norm = types.norms()
    left, right = torch.triu_indices(len(n), len(n), 1, device=n.device)
    # from differences: of equal means products leave their rounding
    squares = torch.pdist(types.mean).square()
    squares = without_rounding(
        squares, torch.ones_like(squares), torch.maximum(norm[left], norm[right])
    )

    def mean_ratio(variance: Tensor, distances: Tensor, is_pair: Tensor) -> Tensor:
        each = torch.where(is_pair, (variance[left] + variance[right]) / (2 * distances), 0)
        return ratio(each.sum(), is_pair.sum())

    sample = m2 / (n - 1)
    noise = (sample / n)[left] + (sample / n)[right]
    is_told_apart = squares > 2 * noise
    return {
        "cdnv": mean_ratio(sample, squares - noise, is_told_apart),
        "cdnv_plugin": mean_ratio(m2 / n, squares, squares > 0),
        "cdnv_pairs": torch.where(
            noise.isfinite().all(), is_told_apart.to(n.dtype).mean(), torch.nan
        ),
    }


def alignment_values(types: TokenTable, unembedding: Tensor | None) -> dict[str, Tensor]:
    """Cosines of each type's mean, less the mean of the types' rows, with its row of the output
    embedding, (V, d).

    Their mean over types is Wu & Papyan's NC3; a small sample standard deviation uniform duality,
    UNC3.
    """
    mean, device = types.mean, types.mean.device
    cosines = mean.new_zeros(0)
    if unembedding is not None and unembedding.ndim == 2 and unembedding.shape[1] == mean.shape[1]:
        known = ((types.token_ids >= 0) & (types.token_ids < len(unembedding))).nonzero().flatten()
        rows = unembedding[sent(types.token_ids[known], unembedding.device)]
        rows = rows.to(mean)
        means = mean.index_select(0, sent(known, device)) - types.center()
        norms = row_norms(means) * row_norms(rows)
        cosines = ((means * rows).sum(1) / norms)[norms > 0]
    mean_of_all = cosines.mean()  # NaN of none
    return {
        "unembedding_alignment": mean_of_all,
        "unembedding_alignment_std": cosines.std() if len(cosines) > 1 else mean_of_all * torch.nan,
    }
