"""Pictures of what metrics have computed, made by pyplot as torchmetrics makes them."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.plot import plot_single_or_multi_val

from embedgeo.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, Tensor]
"""What ``compute`` or ``forward`` of a metric has returned."""

_COLOUR = "#0072b2"
_FAR = 5
"""The scale is logarithmic where a value is farther from zero."""

_LINEAR = 0.01
"""On a logarithmic scale values nearer to zero are on a linear one."""


class KeyMetric(CompositionalMetric):
    """One value of a metric, by its key: ``metric[key]``."""

    def __init__(self, metric: Metric, key: str) -> None:
        super().__init__(itemgetter(key), metric, None)
        self.key = key

    def __repr__(self) -> str:
        return f"{self.metric_a!r}[{self.key!r}]"

    def plot(
        self, val: "Tensor | Values | Sequence[Tensor | Values] | None" = None, ax: "Axes | None" = None
    ) -> tuple[Any, Any]:
        """Draw the value, or one after the other.

        Args:
            val: what ``compute`` or ``forward`` of this or of the whole metric has returned, or a list of these;
                default: ``compute()`` now.
            ax: axes to draw into; default: those of a new figure.

        Returns:
            The figure and its axes.
        """
        require_extra("report", "plot", "matplotlib")
        given = self.compute() if val is None else val
        values = [self._of_key(each) for each in given] if isinstance(given, Sequence) else self._of_key(given)
        drawn: Any
        _, drawn = plot_single_or_multi_val(values, ax=ax, name=self.key)
        return drawn.figure, drawn

    def _of_key(self, value: "Tensor | Values") -> Tensor:
        return value[self.key] if isinstance(value, Mapping) else value


def plot_values(values: Values | Sequence[Values], ax: "Axes | None", chosen: Sequence[str]) -> tuple[Any, Any]:
    """Draw values by key: a row for each, on one scale; of several, one after the other, a panel for each key.

    Args:
        values: see `GeometryMetric.plot`.
        ax: axes to draw into.
        chosen: the keys that are drawn into given axes; all where there are none of these.

    Returns:
        The figure, and its axes or array of axes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no values.
    """
    require_extra("report", "plot", "matplotlib")
    series = [values] if isinstance(values, Mapping) else list(values)
    keys = list(dict.fromkeys(key for each in series for key in each))
    if not keys:
        raise ValueError("val must be what compute() or forward() has returned, or a list of these; got none.")
    if ax is not None:
        keys = [key for key in keys if key in chosen] or keys
    curves = {key: [float(each.get(key, math.nan)) for each in series] for key in keys}
    if isinstance(values, Mapping):
        return _rows({key: value for key, (value,) in curves.items()}, ax)
    return _panels(curves) if ax is None else _lines(curves, ax)


def _rows(values: Mapping[str, float], ax: "Axes | None") -> tuple[Any, Any]:
    """A row for each key, with the value as a point and as a number."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 0.9 + 0.24 * len(values)), layout="constrained")
    at = range(len(values))
    finite = [value if math.isfinite(value) else math.nan for value in values.values()]
    ax.hlines(at, 0, finite, color=_COLOUR, lw=1, alpha=0.5)
    ax.plot(finite, at, ls="", marker="o", ms=5, color=_COLOUR)
    ax.axvline(0, color="grey", lw=0.8)
    known = [value for value in finite if math.isfinite(value)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if max(-low, high) > _FAR:
        ax.set_xscale("symlog", linthresh=_LINEAR, linscale=0.3)
        powers = [10.0**k for k in range(0, 308, 2)]
        ax.set_xticks([0, *(x for power in powers for x in (-power, power) if low <= x <= high)])
        ax.set_xlim(3 * low or -_LINEAR, 100 * high or _LINEAR)  # with room for the numbers
    else:
        span = (high - low) or 1
        ax.set_xlim(low - 0.05 * span, high + 0.25 * span)
    for y, value in enumerate(finite):
        text, x = ("–", 0) if math.isnan(value) else (f"{value:.4g}", max(value, 0))
        ax.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set_yticks(at, list(values), fontsize="small", parse_math=False)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.spines[["top", "right"]].set_visible(False)
    return ax.figure, ax


def _panels(curves: Mapping[str, Sequence[float]]) -> tuple[Any, Any]:
    """A panel for each key, each with a scale of its own."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    ncols = min(4, len(curves))
    nrows = math.ceil(len(curves) / ncols)
    size = (2.7 * ncols, 0.4 + 1.7 * nrows)
    figure, axes = plt.subplots(nrows, ncols, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for ax, (key, values) in zip(axes.flat, curves.items(), strict=False):
        ax.plot(values, marker="o", ms=3.5, color=_COLOUR)
        ax.set_title(key, fontsize="small", parse_math=False)
        ax.tick_params(labelsize="small")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for ax in axes.flat[len(curves) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("Step", fontsize="small")
    return figure, axes


def _lines(curves: Mapping[str, Sequence[float]], ax: "Axes") -> tuple[Any, Any]:
    """A line for each key in the same axes."""
    from matplotlib.ticker import MaxNLocator

    for key, values in curves.items():
        ax.plot(values, marker="o", ms=4, label=key)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlabel("Step")
    ax.legend(fontsize="small", frameon=False)
    return ax.figure, ax
