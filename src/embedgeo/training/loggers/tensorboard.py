"""TensorBoard: a page of charts, text and images, in the event files themselves."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import TensorBoardLogger

from embedgeo.results.events import custom_scalars_layout
from embedgeo.results.schema import StepRecord
from embedgeo.training.loggers.base import Adapter, Charts, Picture, is_instance

_layouts: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The charts of all monitors that write to a ``SummaryWriter``: TensorBoard keeps only the last layout."""


class TensorBoard(Adapter):
    """Writes by a ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._has_charts = False

    def write_charts(self, charts: Charts, history: Sequence[StepRecord]) -> None:
        """Write the layout of the custom-scalars page, once."""
        if self._has_charts:
            return
        layout = custom_scalars_layout(charts.metrics, charts.tag_start + charts.prefix)
        every = _layouts.setdefault(self._writer, {})
        every |= {category.removeprefix(charts.tag_start): each for category, each in layout.items()}
        self._writer.add_custom_scalars(every)
        self._has_charts = True

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write it for the text page."""
        self._writer.add_text(tag, markdown, step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write the PNG as it is: `SummaryWriter.add_image` would decode, resize and encode it again."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        png, width, height = picture
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def adapter(logger: Any) -> Adapter | None:
    """Of Lightning's logger, a ``SummaryWriter``, or the callback of the Hugging Face Trainer where it has one."""
    if isinstance(logger, TensorBoardLogger):
        return TensorBoard(logger.experiment)
    if is_instance(logger, "torch.utils.tensorboard.writer", "SummaryWriter"):
        return TensorBoard(logger)
    if is_instance(logger, "transformers.integrations.integration_utils", "TensorBoardCallback") and logger.tb_writer:
        return TensorBoard(logger.tb_writer)
    return None
