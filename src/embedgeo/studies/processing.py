"""Figures of after-processing, for a report."""

from collections.abc import Iterator

import pandas as pd

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number
from embedgeo.glossary import term
from embedgeo.metrics.processing import is_processed
from embedgeo.report.figures import with_errors
from embedgeo.report.runs import Run


def processing_figures(run: Run) -> Iterator[FigureData]:
    """Anisotropy and mean cosine at the last step, before and after each after-processing, if there
    was any.
    """
    if not any(map(is_processed, run.metrics)):
        return
    figure, axes = draw.new_figure(run.titled("After-processing", run.steps[-1]), panels=2)
    values: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    colours = {"as it is": "black"}
    for ax, metric in zip(reversed(axes), ("mean_cosine", "anisotropy"), strict=True):
        keys = [key for key in run.metrics if is_processed(key) and key.startswith(f"{metric}_")]
        for key in ([metric] if metric in run.values else []) + keys:
            values[key] = run.table(key).iloc[-1].reindex(run.axis)
            errors[key] = run.table(key, run.errors).iloc[-1].reindex(run.axis)
            name = (
                term(key).name.removeprefix(f"{term(metric).name}, ")
                if key != metric
                else "as it is"
            )
            colour = colours.setdefault(name, draw.RUNS[(len(colours) - 1) % len(draw.RUNS)])
            ax.plot(values[key].to_numpy(), color=colour, marker="o", ms=3, lw=1.6, label=name)
            draw.band(ax, values[key], errors[key], colour)
        draw.layer_axis(ax, run.axis)
        ax.set_ylabel(term(metric).name)
    draw.legend(axes[-1])
    numbers = with_errors(pd.DataFrame(values), pd.DataFrame(errors))[0].drop("", errors="ignore")
    means = run.means(numbers[[*values]].T)
    text = "; ".join(
        f"{term(str(key)).name} {' and '.join(map(number, row))}" for key, row in means.iterrows()
    )
    alt = "Anisotropy and mean cosine against layer, before and after each after-processing."
    yield FigureData(
        "after-processing",
        figure,
        numbers,
        alt,
        f"{' and '.join(run.blocks).capitalize()}: {text}.",
    )
