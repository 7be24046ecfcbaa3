"""All moments of groups of rows at once: see `embedgeo.functional.moments` for what they are."""

from collections.abc import Callable

import torch
from torch import Tensor

from embedgeo.functional.moments import Moments, reciprocal_norm, row_chunks
from embedgeo.functional.precision import state_device


def grouped_row_moments(x: Tensor, group: Tensor, num_groups: int) -> Moments:
    """Moments of the rows of ``x`` that belong to each group; on the CPU where the rows' device has no float64.

    Args:
        x: shape (n, d), any floating dtype.
        group: shape (n,), int64 in [0, num_groups).
        num_groups: how many groups there are.
    """
    dtype = torch.float64
    x, group = x.to(state_device(x.device)), group.to(state_device(x.device))

    def per_group(rows_of: Callable[[slice], Tensor], width: tuple[int, ...]) -> Tensor:
        sums = torch.zeros((num_groups, *width), dtype=dtype, device=x.device)
        for chunk in row_chunks(x):
            sums.index_add_(0, group[chunk], rows_of(chunk))
        return sums

    def rows(chunk: slice) -> Tensor:
        return x[chunk].to(dtype)

    wide = (x.shape[1],)
    norm = torch.zeros(x.shape[0], dtype=dtype, device=x.device)
    for chunk in row_chunks(x):
        norm[chunk] = torch.linalg.vector_norm(rows(chunk), dim=1)
    n = per_group(lambda c: torch.ones_like(norm[c]), ())
    divisor = n.clamp(min=1)
    mean = per_group(rows, wide) / divisor[:, None]
    norm_mean = per_group(lambda c: norm[c], ()) / divisor
    return Moments(
        n=n,
        mean=mean,
        m2=per_group(lambda c: (rows(c) - mean[group[c]]).square_(), wide),
        norm_mean=norm_mean,
        norm_m2=per_group(lambda c: (norm[c] - norm_mean[group[c]]).square_(), ()),
        norm_max=torch.zeros_like(n).scatter_reduce_(0, group, norm, "amax"),
        direction_n=per_group(lambda c: (norm[c] > 0).to(dtype), ()),
        direction_sum=per_group(lambda c: rows(c) * reciprocal_norm(norm[c])[:, None], wide),
    )
