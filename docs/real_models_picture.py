"""Draw the pictures of real-models.md from docs/findings/real-models.csv.

One has the headlines through the blocks of each model, with and without first positions, massive
rows and the largest coordinate; the other slope and R² of V on M beside what the paper prints.

python docs/real_models_picture.py docs/images
"""

import io
import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from dark import save
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from embedgeo.drawing import style

TABLE = Path(__file__).parent / "findings" / "real-models.csv"
MODELS = {
    "gemma": "Gemma 3 270M, decoder",
    "mpnet": "all-mpnet-base-v2, encoder",
    "minilm": "all-MiniLM-L6-v2, encoder",
}
ROWS = {
    "V_W_over_V_unbiased": "V_W / V (unbiased)",
    "M_over_Q": "M / Q",
    "anisotropy": "anisotropy",
    "mean_cosine": "mean cosine",
    "intrinsic_dimension_between": "dimension between tokens",
}
LINES = {
    "_with_first": {"color": "#d55e00", "label": "all rows", "ls": (0, (4, 1.5))},
    "": {"color": "#0072b2", "label": "without first positions"},
    "_without_massive": {
        "color": "#009e73",
        "label": "without first positions and massive rows",
        "ls": (0, (1, 1.2)),
        "lw": 2.2,
    },
    "_without_top_dim": {
        "color": "#cc79a7",
        "label": "without first positions and the largest coordinate",
        "ls": (0, (5, 1.5, 1, 1.5)),
    },
}
REGRESSIONS = {
    "V_on_M_slope": (
        "slope of V on M over token types",
        {-1: "paper:\nencoders", -0.2: "paper:\nGPT-2"},
    ),
    "V_on_M_r2": ("its R²", {1: "paper:\nencoders", 0.5: "paper:\nGPT-2"}),
}
"""Titles, and the extremes that Yamagiwa & Shimodaira print in section 5.2."""


def of_model(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The input and the blocks of a model, by the number of blocks passed."""
    rows = table[(table["model"] == name) & (table["layer"] != "final_norm")]
    return rows.set_index("layer_index").sort_index()


def draw_depth(table: pd.DataFrame) -> Figure:
    """The headlines of the table: a row each, a column for each model."""
    figure = Figure(figsize=(9.4, 10.4), layout="constrained")
    axes = figure.subplots(len(ROWS), len(MODELS), sharex="col", sharey="row")
    for column, (name, title) in enumerate(MODELS.items()):
        rows = of_model(table, name)
        for ax, (metric, text) in zip(axes[:, column], ROWS.items(), strict=True):
            for suffix, look in LINES.items():
                if metric + suffix in rows:  # no massive row: nothing is left out
                    ax.plot(rows[metric + suffix].fillna(rows[metric]), marker="o", ms=3, **look)
            if column == 0:
                ax.set_ylabel(text)
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel("blocks passed")
        axes[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes[:, 0]:
        ax.set_ylim(bottom=0)  # of the whole row
    handles, labels = axes[2, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def draw_regressions(table: pd.DataFrame) -> Figure:
    """Slope and R² of V on M against relative depth, beside what the paper prints."""
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    axes = figure.subplots(1, len(REGRESSIONS))
    colours = dict(zip(MODELS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
    for ax, (metric, (title, printed)) in zip(axes, REGRESSIONS.items(), strict=True):
        for name, of in MODELS.items():
            rows = of_model(table, name)
            look = {"marker": "o", "ms": 3, "color": colours[name], "label": of}
            ax.plot(rows.index / rows.index.max(), rows[metric], **look)
        for value, whose in printed.items():
            ax.axhline(value, color="#555555", ls=(0, (4, 2)), lw=1.2, zorder=1)
            place = {"transform": ax.get_yaxis_transform(), "va": "center", "color": "#555555"}
            ax.text(1.01, value, whose, **place)
        ax.set(title=title, xlabel="share of the blocks passed")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    found = pd.read_csv(TABLE)
    for name, draw in {
        "real-models-depth": draw_depth,
        "real-models-slope": draw_regressions,
    }.items():
        drawn = io.BytesIO()
        with style(), mpl.rc_context({"font.size": 10}):
            draw(found).savefig(drawn, dpi=130)
        save(Image.open(drawn), Path(sys.argv[1]) / f"{name}.png")
