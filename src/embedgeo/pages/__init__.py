"""Pictures and explanations for TensorBoard, beside the scalars, while a model trains."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedgeo.glossary import in_order, term
from embedgeo.pages.pixels import heatmap
from embedgeo.records import AT_A_GLANCE, Record

_SHARES = ("M", "V", "V_W_unbiased", "V_B_unbiased")
_KEPT = (*AT_A_GLANCE, *_SHARES)
_MOST_STEPS = 512


class Pages:
    """The monitor's images and text in TensorBoard.

    Written are, for each metric to look at first, a heatmap (layer against step) at every measurement, and a profile
    (value against relative depth, a line a step); the shares of M, V_W and V_B in the embeddings' size at each layer;
    and, once, what each number means. Profiles and shares take matplotlib some 50 ms each: they are written at the
    first, second, fourth, eighth … measurement and the last, which keeps the slider below each image within the ten
    positions that TensorBoard shows, too. No more than 512 steps are kept to be drawn: then those that lie
    closest together, relative to their size, are thinned out.

    Args:
        prefix: of the tags.
        start: how many records the history holds already, of other runs.
    """

    def __init__(self, prefix: str = "geometry", start: int = 0) -> None:
        self.prefix = prefix
        self._layers: dict[str, int] = {}
        self._measured: dict[int, NDArray[np.float64]] = {}  # by step: shape (metrics, layers)
        self._num_read, self._count = start, 0

    def write(self, writers: Sequence[Any], history: Sequence[Record], *, last: bool = False) -> None:
        """Draw what has come to the history since the last call.

        Args:
            writers: TensorBoard's ``SummaryWriter`` objects.
            history: the monitor's.
            last: there will be no more: draw what has not been drawn of it yet.
        """
        fresh, self._num_read = history[self._num_read :], len(history)
        if not writers:
            return
        if fresh:
            if not self._measured:
                text = "\n".join(_explanation({record["metric"] for record in fresh}))
                for writer in writers:
                    writer.add_text(f"{self.prefix}/what the numbers mean", text, fresh[-1]["step"])
            self._add(fresh)
        is_due = self._count & (self._count - 1) == 0
        if self._measured and (fresh or last):
            pictures = dict(self._heatmaps()) if fresh else {}
            if is_due != last:  # the last one is drawn already where it was due
                pictures.update(self._figures())
            step = max(self._measured)
            for writer in writers:
                for tag, (png, width, height) in pictures.items():
                    _add_image(writer, tag, png, width, height, step)

    def _add(self, records: Iterable[Record]) -> None:
        steps = set()
        for record in records:
            steps.add(step := record["step"])
            if record["metric"] not in _KEPT:
                continue
            layer = self._layers.setdefault(record["layer"], len(self._layers))
            at = self._measured.get(step, np.empty((len(_KEPT), 0)))
            if layer >= at.shape[1]:
                more = np.full((len(_KEPT), len(self._layers) - at.shape[1]), np.nan)
                at = self._measured[step] = np.concatenate((at, more), axis=1)
            at[_KEPT.index(record["metric"]), layer] = record["value"]
        self._count += len(steps)
        while len(self._measured) > _MOST_STEPS:
            kept = np.array(sorted(self._measured))
            crowded = ((kept[2:] - kept[:-2]) / (1 + kept[1:-1])).argmin()
            del self._measured[int(kept[1 + crowded])]

    def _values(self, metric: str) -> tuple[list[int], NDArray[np.float64]]:
        """Steps, and values of shape (steps, layers)."""
        steps = sorted(self._measured)
        values = np.full((len(steps), len(self._layers)), np.nan)
        for row, step in zip(values, steps, strict=True):
            at = self._measured[step][_KEPT.index(metric)]
            row[: len(at)] = at
        return steps, values

    def _drawn(self) -> Iterator[tuple[str, list[int], NDArray[np.float64]]]:
        for metric in AT_A_GLANCE:
            steps, values = self._values(metric)
            if np.isfinite(values).any():
                yield metric, steps, values

    def _heatmaps(self) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
        for metric, steps, values in self._drawn():
            yield f"{self.prefix}.heatmap/{metric}", heatmap(term(metric), steps, list(self._layers), values)

    def _figures(self) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
        from embedgeo.pages import figures  # imports matplotlib

        layers = list(self._layers)
        for metric, steps, values in self._drawn():
            yield f"{self.prefix}.profile/{metric}", figures.profile(term(metric), steps, layers, values)
        parts = {metric: self._values(metric)[1][-1] for metric in _SHARES}
        if np.isfinite(parts["M"]).any():
            yield f"{self.prefix}.shares/M, V_W, V_B", figures.shares(max(self._measured), layers, parts)


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
