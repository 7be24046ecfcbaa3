"""How Q, M and V of the token types vary, and depend on each other and on frequency.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), figures 4 (C.V. of Q, V on M) and 17 (slopes on frequency).
"""

import math

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio, variance_values, without_rounding
from embedgeo.functional.tokens import TokenTable

REGRESSION_COUNT_RANGE = (10, 100_000)
"""Fewest and most occurrences of the token types that `type_regressions` are taken over, unless told otherwise."""


def type_values(types: TokenTable) -> dict[str, Tensor]:
    """``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,)."""
    values = variance_values(types.n, types.mean, types.m2)
    return {key: values[key] for key in ("n", "Q", "M", "V")}


def type_regressions(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values over token types: the spread of Q, and regressions of V on M, and of Q, M and V on frequency.

    Args:
        values: ``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,): see `type_values`.

    Returns:
        ``token_types_regressed``, the number of token types; ``Q_t_cv``, the coefficient of variation of Q, NaN for
        none; ``V_on_M_slope`` and ``V_on_M_r2`` of the least-squares line of V on M; ``Q_freq_slope``, ``Q_freq_r2``
        and the same of M and V, of log10(1 + value) on log10(n), NaN for fewer than two distinct abscissae.
    """
    log_n = values["n"].log10()
    lines = {"V_on_M": (values["M"], values["V"])}
    lines |= {f"{key}_freq": (log_n, values[key].log1p() / math.log(10)) for key in "QMV"}
    fitted = {name: least_squares(x, y) for name, (x, y) in lines.items()}
    return {
        "token_types_regressed": log_n.new_tensor(log_n.numel()),
        "Q_t_cv": coefficient_of_variation(values["Q"]),
        **{f"{name}_slope": slope for name, (slope, _) in fitted.items()},
        **{f"{name}_r2": r2 for name, (_, r2) in fitted.items()},
    }


def coefficient_of_variation(x: Tensor) -> Tensor:
    """Standard deviation (n, not n - 1, below) over mean of the values of ``x``; NaN if there are none."""
    return ratio(x.std(correction=0), x.mean()) if x.numel() else x.new_tensor(torch.nan)


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R² of the least-squares line of ``y`` on ``x``, both of shape (n,).

    The slope is NaN where ``x`` does not vary, R² where ``x`` or ``y`` does not.

    >>> least_squares(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 5.0]))
    (tensor(2.), tensor(1.))
    """
    if x.numel() == 0:
        return x.new_tensor(torch.nan), x.new_tensor(torch.nan)
    n, dx, dy = x.new_tensor(x.numel()), x - x.mean(), y - y.mean()
    xx, yy = without_rounding(dx @ dx, n, x.mean()), without_rounding(dy @ dy, n, y.mean())
    xy = dx @ dy
    return ratio(xy, xx), ratio(xy.square(), xx * yy)
