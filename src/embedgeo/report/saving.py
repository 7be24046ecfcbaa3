"""Pictures of figures as files."""

import io
from functools import lru_cache
from pathlib import Path
from threading import get_ident

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from PIL import Image

from embedgeo.report.drawing import DPI, FigureData


@lru_cache(maxsize=8)
def _renderer(width: int, height: int, dpi: float, thread: int) -> RendererAgg:
    """What figures of one size are drawn with: it remembers the extents of texts, most of which are in many of them."""
    return RendererAgg(width, height, dpi)


def png(figure: Figure, dpi: float = DPI) -> tuple[bytes, int, int]:
    """The picture as a PNG of at most 256 colours, its width and height."""
    figure.set_dpi(dpi)
    width, height = (int(side) for side in figure.canvas.get_width_height(physical=True))
    renderer = _renderer(width, height, dpi, get_ident())
    renderer.clear()
    figure.draw(renderer)
    image = Image.fromarray(np.asarray(renderer.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)  # ten times as fast as the default
    image.putpalette([255 if level == 254 else level for level in image.getpalette() or ()])  # white stays white
    image.save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height


def save(data: FigureData, folder: Path) -> bytes:
    """Write PNG, SVG and CSV; the same numbers give the same bytes. Returns the PNG."""
    data.numbers.to_csv(folder / f"{data.name}.csv", lineterminator="\n")
    data.figure.savefig(folder / f"{data.name}.svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    picture, *_ = png(data.figure)
    (folder / f"{data.name}.png").write_bytes(picture)
    return picture
