"""What TensorBoard shows of a monitor beside its scalars: charts, images and a text."""

from collections.abc import Iterable, Sequence
from typing import Any

from embedgeo.report.live import TensorBoardPictures
from embedgeo.results.events import custom_scalars_layout
from embedgeo.results.schema import StepRecord


class TensorBoardPage:
    """The charts, images and text of one monitor in one run.

    Args:
        prefix: the monitor's.
        num_earlier: how many records of other runs its history holds already.
        tag_start: what the trainer puts in front of the tags of scalars.
    """

    def __init__(self, prefix: str, num_earlier: int, tag_start: str = "") -> None:
        self._prefix = prefix
        self._num_earlier = num_earlier
        self._tag_start = tag_start
        self._metrics: list[str] = []
        self._pictures = TensorBoardPictures(prefix, num_earlier)

    def write(
        self, writers: Sequence[Any], history: Sequence[StepRecord], pages: Iterable["TensorBoardPage"], *, last: bool
    ) -> None:
        """Write what is new; called after each measurement and once more after the last one.

        Args:
            writers: TensorBoard's ``SummaryWriter`` objects; None of them, nothing is written.
            history: the monitor's.
            pages: those of all monitors of the run: TensorBoard keeps only the last layout of charts.
            last: whether there will be no more measurements.
        """
        if not self._metrics:
            self._metrics = list(dict.fromkeys(record["metric"] for record in history[self._num_earlier :]))
            layout = {category: charts for page in pages for category, charts in page._charts()}
            for writer in writers if self._metrics else []:
                writer.add_custom_scalars(layout)
        self._pictures.write(writers, history, last=last)

    def _charts(self) -> Iterable[tuple[str, dict[str, list[Any]]]]:
        """The monitor's categories of charts; none before its first measurement."""
        layout = custom_scalars_layout(self._metrics, self._tag_start + self._prefix)
        return ((category.removeprefix(self._tag_start), charts) for category, charts in layout.items())
