"""Eigenvalues λ₁ ≥ λ₂ ≥ … of scatter matrices; ranks, shares and the decay of a spectrum, from its eigenvalues alone.

Sources: Roy & Vetterli 2007 for the effective rank; Garrido et al. 2023 (arXiv 2210.02885) for RankMe; Li et al. 2025
(arXiv 2509.23024) for the rank of eigenvalues; Agrawal et al. 2022 (arXiv 2202.05808) for α-ReQ, whose fit is that of
Stringer et al. 2019; Rudman et al. 2022 for IsoScore.
"""

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio

ALPHA_WINDOW = (11, 99)
"""The first and the last of the eigenvalues that α-ReQ is fitted to, counted from 1."""

_FEWEST = 3


def scatter_eigenvalues(s: Tensor, n: Tensor, largest: Tensor | None = None) -> Tensor:
    """Eigenvalues of the scatter matrix of n rows, in descending order, at least 0; NaN if it is not finite.

    They are 0 from the n-th on, and where they are only rounding beside the largest (d ε λ₁): roots of many of these
    would add up.

    Args:
        s: shape (d, d).
        n: scalar.
        largest: what rounding is measured by; default: λ₁.
    """
    if not bool(s.isfinite().all()):
        return s.diagonal() * torch.nan
    values = torch.linalg.eigvalsh(s).flip(0)
    rounding = len(s) * torch.finfo(s.dtype).eps * (values[0] if largest is None else largest).clamp(min=0)
    is_spanned = torch.arange(len(s), device=s.device) < n - 1
    return torch.where(is_spanned & (values > rounding), values, 0)


def uncentred_eigenvalues(s: Tensor, n: Tensor, mean: Tensor, largest: Tensor) -> Tensor:
    """Eigenvalues of Σ x xᵀ = S + n μμᵀ, likewise, given the scatter of n rows, their mean, and the λ₁ of S.

    A reflection puts the mean on the first axis, so that one entry of the matrix is large: where the mean is long, the
    small eigenvalues would else drown in its rounding.
    """
    length = torch.linalg.vector_norm(mean)
    normal = mean.clone()
    normal[0] += torch.copysign(length, mean[0])
    normal /= torch.linalg.vector_norm(normal).clamp(min=torch.finfo(s.dtype).tiny)
    reflected = s - 2 * torch.outer(normal, normal @ s)
    reflected -= 2 * torch.outer(reflected @ normal, normal)
    reflected[0, 0] += n * length.square()
    return scatter_eigenvalues(reflected, n + 1, largest)


def full_spectrum_values(eigenvalues: Tensor, alpha_window: tuple[int, int] = ALPHA_WINDOW) -> dict[str, Tensor]:
    """What `spectrum_values` adds with ``full``, apart from RankMe, from the eigenvalues of the scatter.

    The steps of Rudman et al. 2022 reduce to IsoScore = (k - 1) / (d - 1), with k the participation ratio.

    Args:
        eigenvalues: of the centred rows, shape (d,), in descending order.
        alpha_window: see `power_law`.
    """
    dim, total = len(eigenvalues), eigenvalues.sum()
    participation = ratio(total, torch.linalg.vector_norm(eigenvalues)).square()
    rest = eigenvalues[5:]
    alpha, r2 = power_law(eigenvalues, alpha_window)
    return {
        "effective_rank": entropy_rank(eigenvalues.sqrt()),
        "effective_rank_eigenvalues": entropy_rank(eigenvalues),
        "isoscore": (participation - 1) / (dim - 1) if dim > 1 else total * torch.nan,
        "top1_share": ratio(eigenvalues[0], total),
        "top5_share": ratio(eigenvalues[:5].sum(), total),
        "anisotropy_without_top5": ratio(rest[0], rest.sum()) if len(rest) else total * torch.nan,
        "alpha_req": alpha,
        "alpha_req_r2": r2,
    }


def entropy_rank(values: Tensor) -> Tensor:
    """exp(-Σ p log p), p = values / Σ values: how many equal values have that entropy; NaN where all are 0.

    Of singular values it is the effective rank of Roy & Vetterli 2007, and RankMe where rows were not centred, without
    the 1e-7 that Garrido et al. 2023 add to each p so that its logarithm is finite: here 0 log 0 is 0.

    Args:
        values: shape (k,), at least 0.

    >>> round(entropy_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])).item(), 6)
    3.0
    """
    return torch.special.entr(ratio(values, values.sum())).sum().exp()


def power_law(eigenvalues: Tensor, window: tuple[int, int] = ALPHA_WINDOW) -> tuple[Tensor, Tensor]:
    """The exponent α of λᵢ ∝ i^-α, and the R² of its fit.

    Least squares of log λᵢ on -log i with an intercept and weights 1/i, which make up for how dense log i gets; R² has
    the same weights. Eigenvalues of the window that are 0 are left out; of fewer than three both are NaN, and R² is
    where all λᵢ are equal.

    Args:
        eigenvalues: shape (d,), in descending order.
        window: the first and the last i, both of them fitted, counted from 1.

    >>> alpha, r2 = power_law(torch.arange(1, 201, dtype=torch.float64) ** -0.7)
    >>> round(alpha.item(), 6), round(r2.item(), 6)
    (0.7, 1.0)
    """
    i = torch.arange(1, len(eigenvalues) + 1, dtype=eigenvalues.dtype, device=eigenvalues.device)
    used = (i >= window[0]) & (i <= window[1]) & (eigenvalues > 0)
    weights = ratio(used / i, (used / i).sum())
    x, y = -i.log(), torch.where(used, eigenvalues, 1).log()
    x, y = (values - torch.dot(weights, values) for values in (x, y))
    xx, xy, yy = (torch.dot(weights, product) for product in (x * x, x * y, y * y))
    enough = used.sum() >= _FEWEST
    return torch.where(enough, ratio(xy, xx), torch.nan), torch.where(enough, ratio(xy.square(), xx * yy), torch.nan)
