"""A heatmap of layers against steps, drawn pixel by pixel: a picture takes a few milliseconds."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps, get_data_path
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from embedgeo.report.axes import StepAxis, colour_range
from embedgeo.results.glossary import Term
from embedgeo.results.layer_names import layer_label, layer_ticks
from embedgeo.results.wording import short

WIDTH = 720
"""Pixels: twice what TensorBoard gives to an image until one clicks on it, and letters as large as that needs."""

_LEFT, _TOP, _RIGHT, _BOTTOM, _BAR = 142, 74, 146, 74, 24
_BLACK, _WHITE, _UNDEFINED, _FIRST, _COLOURS = 0, 15, 16, 17, 239
"""Of the palette: from black to white, so that letters drawn on white have smooth edges; grey; the colour map."""

_FONT_SIZE = 20


def heatmap(
    term: Term, steps: Sequence[int], layers: Sequence[str], values: NDArray[np.float64]
) -> tuple[bytes, int, int]:
    """Draw values of shape (steps, layers), the first layer at the bottom; what is not finite is grey.

    The colours span the values of the blocks; other layers may lie beyond, at the ends that then say ≥ or ≤.

    Returns:
        The PNG, its width and height.
    """
    row = max(3, min(44, 480 // len(layers)))
    wide, high = WIDTH - _LEFT - _RIGHT, row * len(layers)
    axis = StepAxis(steps)
    places = axis.place(steps)
    edges = (places[1:] + places[:-1]) / 2  # between columns, so that each is around its step
    columns = np.searchsorted(edges, (np.arange(wide) + 0.5) / wide)
    low, top, beyond = colour_range(layers, values)
    is_log = term.is_logarithmic(np.array([low, top]))
    clipped = values.clip(low, top)
    scaled, ends = (np.log10(clipped), np.log10([low, top])) if is_log else (clipped, np.array([low, top]))
    middle = 10 ** ends.mean() if is_log else ends.mean()
    shade = np.nan_to_num((scaled - ends[0]) / (np.ptp(ends) or 1))
    cells = np.where(np.isfinite(values), _FIRST + np.rint(shade * (_COLOURS - 1)), _UNDEFINED).astype(np.uint8)

    pixels = np.full((_TOP + high + _BOTTOM, WIDTH), _WHITE, dtype=np.uint8)
    pixels[_TOP : _TOP + high, _LEFT : _LEFT + wide] = cells[columns].T[::-1].repeat(row, axis=0)
    bar = slice(WIDTH - _RIGHT + 16, WIDTH - _RIGHT + 16 + _BAR)
    pixels[_TOP : _TOP + high, bar] = _FIRST + np.linspace(_COLOURS - 1, 0, high).round().astype(np.uint8)[:, None]
    image = Image.fromarray(pixels)
    image.putpalette(_palette())
    draw = ImageDraw.Draw(image)
    draw.fontmode = "L"

    def text(x: float, y: float, words: str, anchor: str, size: int = _FONT_SIZE) -> None:
        draw.text((round(x), round(y)), words, fill=_BLACK, font=_font(size), anchor=anchor)

    text(8, 20, term.name, "lm", size=_FONT_SIZE + 4)
    text(8, 50, term.unit + (" (log colours)" if is_log else ""), "lm")
    for i in layer_ticks(layers, max(2, high // (_FONT_SIZE + 2))):
        label = layer_label(layers[i])
        text(_LEFT - 10, _TOP + high - (i + 0.5) * row, f"block {label}" if label.isdecimal() else label, "rm")
    for step, place in zip(axis.ticks(), axis.place(axis.ticks()), strict=True):
        x = _LEFT + place * (wide - 1)
        draw.line((x, _TOP + high, x, _TOP + high + 6), fill=_BLACK)
        text(x, _TOP + high + 11, short(step), "mt")
    text(_LEFT + wide / 2, _TOP + high + 42, axis.label, "mt")
    above, below = "≥" * (beyond in ("max", "both")), "≤" * (beyond in ("min", "both"))
    for value, y in (
        (above + short(top), _TOP),
        (short(middle), _TOP + high / 2),
        (below + short(low), _TOP + high - 1),
    ):
        text(bar.stop + 6, y, value, "lm")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


@cache
def _palette() -> bytes:
    colours = colormaps["cividis"](np.linspace(0, 1, _COLOURS))[:, :3]
    greys = np.append(np.linspace(0, 1, _WHITE + 1), 0.82)[:, None].repeat(3, axis=1)
    return (np.vstack((greys, colours)) * 255).round().astype(np.uint8).tobytes()
