"""Draw the picture of Q, M, V_W and V_B in docs/numbers.md: rows of three token types in a plane.

python docs/moments_picture.py docs/images/moments.png
"""

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from embedgeo.drawing import style

COLOURS = {"M": "#0072b2", "V_B": "#e69f00", "V_W": "#009e73"}  # as in the report
TYPES = {"the": (1.6, 3.4), "model": (4.0, 4.4), "of": (4.4, 2.0)}
ROWS, SPREAD = 40, 0.32


def draw() -> Figure:
    """Rows, means of the token types and mean of all, with the distances whose squares are M, V_B and V_W."""
    random = np.random.default_rng(3)
    rows = {token: mean + SPREAD * random.standard_normal((ROWS, 2)) for token, mean in TYPES.items()}
    every = np.concatenate(list(rows.values()))
    center = every.mean(0)
    means = {token: x.mean(0) for token, x in rows.items()}
    Q, M = (every**2).sum(1).mean(), (center**2).sum()
    V_B = np.mean([((mean - center) ** 2).sum() for mean in means.values()])
    V_W = np.mean([((x - means[token]) ** 2).sum(1).mean() for token, x in rows.items()])
    figure = Figure(figsize=(7.2, 4.1), layout="constrained")
    ax = figure.subplots()
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 2}
    ax.annotate("", center, (0, 0), arrowprops={**arrow, "color": COLOURS["M"]})
    for token, x in rows.items():
        mean = means[token]
        ax.plot(*x.T, ".", color="#999999", markersize=4, zorder=1)
        ax.plot(*zip(mean, x[int(((x - mean) ** 2).sum(1).argmax())], strict=True), color=COLOURS["V_W"], linewidth=1.6)
        ax.annotate("", mean, center, arrowprops={**arrow, "color": COLOURS["V_B"]})
        ax.plot(*mean, "o", color="white", markeredgecolor="black", markersize=7, zorder=4)
        ax.text(mean[0], x[:, 1].max() + 0.15, f"“{token}”", ha="center", va="bottom", style="italic")
    ax.plot(0, 0, "k+", markersize=11)
    ax.text(0.2, -0.1, "origin", va="top")
    ax.plot(*center, "s", color="black", markersize=7, zorder=4)
    ax.text(center[0] + 0.2, center[1] + 0.05, "mean of all rows", va="center")
    texts = (
        (f"Q = mean of ‖x‖² = {Q:.1f}", "black"),
        (f"M = ‖mean‖² = {M:.1f}\nall rows from the origin", COLOURS["M"]),
        (f"V_B = {V_B:.1f}\nmeans of the token types from the mean", COLOURS["V_B"]),
        (f"V_W = {V_W:.1f}\noccurrences from the mean of their type", COLOURS["V_W"]),
        ("Q = M + V\nV = V_W + V_B", "black"),
    )
    for line, (text, colour) in enumerate(texts):
        ax.text(5.9, 5.4 - 1.05 * line, text, va="top", color=colour, weight="bold", linespacing=1.4)
    ax.set(aspect="equal", xlim=(-0.3, 9.6), ylim=(-0.5, 5.6))
    ax.axis("off")
    return figure


if __name__ == "__main__":
    with style(), mpl.rc_context({"font.size": 10}):
        draw().savefig(Path(sys.argv[1]), dpi=200)
