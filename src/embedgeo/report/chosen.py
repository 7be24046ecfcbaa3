"""Figures of single token types: chosen ones in the plane, and words by how many tokens they are made of."""

import numpy as np

from embedgeo.report.axes import ACCENT, RUNS, short
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.runs import Run
from embedgeo.report.tokens import some_layers
from embedgeo.results.wording import number

CONFOUNDED = (
    "Rows are words here, a token type is a word, and |T_w| is how many tokens it is made of. A word's row is the mean "
    "over its tokens, which has a smaller norm than they have: Q, M and V of words of several tokens are smaller for "
    "that reason alone, and rare words have more tokens. Compare words of the same |T_w|; an effect of frequency over "
    "all words may be one of |T_w|."
)
"""What has to be known of words: Yamagiwa & Shimodaira (2025), Appendix J."""

_CLASSES = ("= 1", "= 2", "= 3", "≥ 4")
_COLOURS = (RUNS[0], RUNS[5], RUNS[2], ACCENT)
_LEAST = 2
"""Occurrences of a word: a single one has no variance."""


def has_words(run: Run) -> bool:
    """Whether the token types are words, some of them of several tokens."""
    return any("num_tokens" in table and bool((table["num_tokens"] > 1).any()) for table in run.tokens.values())


def words(run: Run, layer: str) -> FigureData:
    """Q, M and V of the words against log frequency, and V against M, coloured by their number of tokens."""
    step, table = max(run.tokens.items())
    at = table[(table["layer"] == layer) & (table["n"] >= _LEAST) & table["num_tokens"].notna()]
    at = at.set_index("token_id")[["n", "Q", "M", "V", "num_tokens"]]
    at["log10 n"] = np.log10(at["n"].to_numpy())
    sizes = at["num_tokens"].round().clip(1, len(_CLASSES))
    figure, axes = new_figure(
        run.titled(f"Words by their number of tokens |T_w| at {layer}", step),
        f"a point a word with n ≥ {_LEAST} occurrences; squared embedding units",
        panels=4,
    )
    for ax, (x, y) in zip(axes, (("log10 n", "Q"), ("log10 n", "M"), ("log10 n", "V"), ("M", "V")), strict=True):
        for size, (name, colour) in enumerate(zip(_CLASSES, _COLOURS, strict=True), 1):
            of_size = at[sizes == size]
            ax.scatter(of_size[x], of_size[y], s=7, color=colour, alpha=0.6, lw=0, rasterized=True)
            ax.scatter([], [], s=25, color=colour, label=f"|T_w| {name}")
        ax.set_xlabel("log10 n, occurrences" if x != "M" else "M of the word")
        ax.set_ylabel(f"{y} of the word")
        ax.locator_params(nbins=5)
        ax.xaxis.set_major_formatter(short)
        ax.yaxis.set_major_formatter(short)
    legend(figure, axes[0])
    medians = at.groupby(sizes)["Q"].agg(["median", "size"])
    text = ", ".join(
        f"{number(median)} at |T_w| {_CLASSES[int(size) - 1]} ({count:,} words)"
        for size, median, count in medians.itertuples()
    )
    alt = f"Q, M and V of words against log frequency, and V against M, at {layer}, coloured by number of tokens."
    return FigureData(f"words-{layer}", figure, at, alt, f"Median Q: {text or 'no words'}.")


def projection(run: Run) -> FigureData:
    """Means of chosen tokens in the plane of their two directions of largest variance, with the origin."""
    step, table = max(run.projections.items())
    layers = some_layers(run, table)
    figure, axes = new_figure(
        run.titled("Means of chosen tokens", step),
        "embedding units along the two directions of largest variance; × is the origin; frequent tokens are larger",
        panels=len(layers),
    )
    for ax, layer in zip(axes, layers, strict=True):
        at = table[table["layer"] == layer]
        tokens, origin = at[at["token_id"] >= 0], at[at["token_id"] < 0]
        size = 6 + 60 * np.sqrt(tokens["n"] / tokens["n"].max())
        ax.scatter(tokens["pc1"], tokens["pc2"], s=size, color=RUNS[0], alpha=0.45, lw=0)
        ax.plot(origin["pc1"], origin["pc2"], ls="", marker="x", ms=10, mew=2.2, color=ACCENT)
        for token in tokens.nlargest(8, "n").itertuples():
            label = repr(str(token.token))[1:-1].replace(" ", "␣")
            ax.annotate(label, (token.pc1, token.pc2), (4, 4), textcoords="offset points", fontsize=7.5)
        ax.set_title(layer, fontsize=8.8)
        ax.set_xlabel("first direction")
    axes[0].set_ylabel("second direction")
    numbers = table[table["layer"].isin(layers)].set_index(["layer", "token_id"]).drop(columns="layer_index")
    text = f"{numbers.groupby('layer').size().max() - 1} tokens at {', '.join(layers)}; the most frequent are named."
    alt = "Means of chosen tokens in the plane of their two directions of largest variance, with the origin."
    return FigureData("tokens-projection", figure, numbers, alt, text)
