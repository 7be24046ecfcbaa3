"""Draw the picture of Q, M, V, V_W and V_B: rows of three token types in a plane.

python docs/moments_picture.py docs/images/moments.png
"""

import io
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from dark import save
from matplotlib.figure import Figure
from PIL import Image

from embedgeo.drawing import style

COLOURS = {"M": "#0072b2", "V_B": "#e69f00", "V_W": "#009e73"}  # as in the report
TYPES = {"the": (1.6, 3.4), "model": (4.0, 4.4), "of": (4.4, 2.0)}
ROWS, SPREAD = 40, 0.32
ROW = {"linewidth": 1.2, "linestyle": (0, (3, 2)), "color": "#555555", "zorder": 2}


def draw() -> Figure:
    """Rows, means of the token types and mean of all, with the distances whose squares are M, V_B
    and V_W.
    """
    random = np.random.default_rng(3)
    rows = {
        token: mean + SPREAD * random.standard_normal((ROWS, 2)) for token, mean in TYPES.items()
    }
    every = np.concatenate(list(rows.values()))
    center = every.mean(0)
    means = {token: x.mean(0) for token, x in rows.items()}
    Q, M, V = (every**2).sum(1).mean(), (center**2).sum(), ((every - center) ** 2).sum(1).mean()
    V_B = np.mean([((mean - center) ** 2).sum() for mean in means.values()])
    V_W = np.mean([((x - means[token]) ** 2).sum(1).mean() for token, x in rows.items()])
    figure = Figure(figsize=(9.4, 3.9), layout="constrained")
    ax = figure.subplots()
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 2}
    ax.annotate("", center, (0, 0), arrowprops={**arrow, "color": COLOURS["M"]})
    for token, x in rows.items():
        mean = means[token]
        far = x[int(x[:, 0].argmax() if token == "of" else ((x - mean) ** 2).sum(1).argmax())]
        ax.plot(*x.T, ".", color="#999999", markersize=4, zorder=1)
        ax.plot(*zip(mean, far, strict=True), color=COLOURS["V_W"], linewidth=1.8)
        ax.annotate("", mean, center, arrowprops={**arrow, "color": COLOURS["V_B"]})
        ax.plot(*mean, "o", color="white", markeredgecolor="black", markersize=7, zorder=4)
        ax.text(
            mean[0], x[:, 1].max() + 0.15, f"“{token}”", ha="center", va="bottom", style="italic"
        )
        if token == "of":
            ax.plot(*far, ".", color="black", markersize=8, zorder=4)
            ax.text(far[0] + 0.15, far[1], "a row x", va="center")
            for start in ((0, 0), center):
                ax.plot(*zip(start, far, strict=True), **ROW)
    names = {
        "Q": (2.9, 0.95),
        "M": (1.35, 1.75),
        "V": (4.85, 2.62),
        "V_B": (2.2, 3.55),
        "V_W": (1.65, 4.05),
    }
    for name, place in names.items():
        ax.text(*place, name, va="center", color=COLOURS.get(name, "black"), weight="bold")
    ax.plot(0, 0, "k+", markersize=11)
    ax.text(0.2, -0.1, "origin", va="top")
    ax.plot(*center, "s", color="black", markersize=7, zorder=4)
    ax.text(center[0] + 0.2, center[1] + 0.05, "mean of all rows", va="center")
    lines = (
        ("Q", f"{Q:.1f}", "from the origin to a row", "black"),
        ("M", f"{M:.1f}", "from the origin to the mean of all rows", COLOURS["M"]),
        ("V", f"{V:.1f}", "from the mean of all rows to a row", "black"),
        ("V_B", f"{V_B:.1f}", "from the mean of all rows to that of a token", COLOURS["V_B"]),
        ("V_W", f"{V_W:.1f}", "from the mean of a token to its rows: context", COLOURS["V_W"]),
    )
    ax.text(6.2, 5.1, "means of squared distances", va="center")
    for i, (name, value, text, colour) in enumerate(lines):
        y = 4.4 - 0.7 * i
        ax.text(6.2, y, name, va="center", color=colour, weight="bold")
        ax.text(7.55, y, value, va="center", ha="right", color=colour, weight="bold")
        ax.text(7.75, y, text, va="center")
    ax.text(6.2, 0.6, "Q = M + V        V = V_B + V_W", va="center", weight="bold")
    ax.set(aspect="equal", xlim=(-0.3, 13.3), ylim=(-0.5, 5.4))
    ax.axis("off")
    return figure


if __name__ == "__main__":
    buffer = io.BytesIO()
    with style(), mpl.rc_context({"font.size": 11}):
        draw().savefig(buffer, dpi=170)
    save(Image.open(buffer), Path(sys.argv[1]))
