"""Pictures and explanations for TensorBoard, beside the scalars, while a model trains."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from embedgeo.results.events import AT_A_GLANCE
from embedgeo.results.glossary import in_order, term
from embedgeo.results.schema import StepRecord

if TYPE_CHECKING:
    from embedgeo.report.runs import Run

_SHARES = ("M", "V", "V_W_unbiased", "V_B_unbiased")
Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""

_KEPT = (*AT_A_GLANCE, *_SHARES)
_MOST_STEPS = 512


class Pages:
    """The monitor's images and text in TensorBoard.

    Written are, for each metric to look at first, a heatmap (layer against step) at every measurement, and the report's
    profile (value against layer, a line a step); the shares of M, V_W and V_B in the embeddings' size at each layer;
    and, once, what each number means. The report's figures take matplotlib some 80 ms each, a heatmap of pixels less
    than 10: they are written at the first, second, fourth, eighth … measurement and the last, which keeps the slider
    below each image within the ten positions that TensorBoard shows, too. No more than 512 steps are kept to be drawn:
    then those that lie closest together, relative to their size, are thinned out.

    Args:
        prefix: of the tags.
        start: how many records the history holds already, of other runs.
    """

    def __init__(self, prefix: str = "geometry", start: int = 0) -> None:
        self.prefix = prefix
        self._layers: dict[str, None] = {}
        self._values = pd.DataFrame()  # a column a metric; the index is (step, layer)
        self._num_read, self._count = start, 0

    def write(self, writers: Sequence[Any], history: Sequence[StepRecord], *, last: bool = False) -> None:
        """Draw what has come to the history since the last call.

        Args:
            writers: TensorBoard's ``SummaryWriter`` objects.
            history: the monitor's.
            last: there will be no more: draw what has not been drawn of it yet.
        """
        from embedgeo.report.runs import Run

        fresh, self._num_read = history[self._num_read :], len(history)
        if not writers:
            return
        if fresh:
            if not self._count:
                text = "\n".join(_explanation({record["metric"] for record in fresh}))
                for writer in writers:
                    writer.add_text(f"{self.prefix}/what the numbers mean", text, fresh[-1]["step"])
            self._add(fresh)
        is_due = self._count & (self._count - 1) == 0
        if not self._values.empty and (fresh or last):
            run = Run("", list(self._layers), self._values, model=pd.DataFrame(), checkpoints=pd.DataFrame())
            pictures = dict(_heatmaps(run, self.prefix)) if fresh else {}
            if is_due != last:  # the last one is drawn already where it was due
                pictures.update(_figures(run, self.prefix))
            for writer in writers:
                for tag, image in pictures.items():
                    _add_image(writer, tag, *image, run.steps[-1])

    def _add(self, fresh: Sequence[StepRecord]) -> None:
        from embedgeo.report.runs import wide

        records = pd.DataFrame(fresh)
        self._count += records["step"].nunique()
        records = records[records["metric"].isin(_KEPT)]
        self._layers |= dict.fromkeys(records["layer"])
        values = wide(records, ["step", "layer"]).replace([np.inf, -np.inf], np.nan)
        values = pd.concat([self._values, values]) if len(self._values) else values
        values = values.groupby(level=["step", "layer"]).last() if values.index.has_duplicates else values.sort_index()
        kept = values.index.unique("step").to_numpy()
        while len(kept) > _MOST_STEPS:
            kept = np.delete(kept, 1 + ((kept[2:] - kept[:-2]) / (1 + kept[1:-1])).argmin())
        self._values = values.loc[kept].dropna(axis="columns", how="all")


def _heatmaps(run: "Run", prefix: str) -> Iterator[tuple[str, Picture]]:
    from embedgeo.report.pixels import heatmap

    for metric in AT_A_GLANCE:
        if metric in run.values:
            values = run.table(metric).to_numpy()
            yield f"{prefix}.heatmap/{metric}", heatmap(term(metric), run.steps, run.layers, values)


def _figures(run: "Run", prefix: str) -> Iterator[tuple[str, Picture]]:
    from PIL.Image import Quantize

    from embedgeo.report import figures, shares
    from embedgeo.report.drawing import png, style

    if not run.depth:
        return
    with style():
        for metric in AT_A_GLANCE:
            if metric in run.values:
                figure = figures.profile(run, run.values * np.nan, metric).figure
                yield f"{prefix}.profile/{metric}", png(figure, Quantize.FASTOCTREE)
        if shares.has_shares(run):
            yield f"{prefix}.shares/M, V_W, V_B", png(shares.shares_by_layer(run).figure, Quantize.FASTOCTREE)


def _explanation(metrics: set[str]) -> Iterator[str]:
    """A text in Markdown."""
    yield "| number | is | unit or estimator | how to read it |"
    yield "|---|---|---|---|"
    for metric in in_order(metrics):
        named = term(metric)
        row = (metric, named.name, named.unit, named.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
    yield (
        "Layers: `embed` is what enters the first block, `block.00` … are the blocks' outputs, `mean` is the mean over "
        "blocks. The step is the number of optimizer steps that the weights have taken. Values that are undefined (too "
        "few rows, rows that do not vary) are missing in the charts and grey in the heatmaps."
    )


def _add_image(writer: Any, tag: str, png: bytes, width: int, height: int, step: int) -> None:
    """`SummaryWriter.add_image` would decode, resize and encode the picture again."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
