"""Give pictures of few colours a version for dark pages: greys swap their lightness, colours keep
their hue.

Colours of a heatmap keep the order of their lightness, too.

    python docs/dark.py docs/images/*.png

The scripts that make the pictures do so themselves.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image

# what was white, as the site's dark pages have it, and what was black
_GROUND, _INK = (30, 33, 41), (240, 240, 240)
_FULL = 0.13  # chroma of a colour that is none of the greys between a line and its ground
_GREY = 0.0025  # chroma of a grey, at most
_NEAR = 0.02  # distance from the colour map within which a colour is one of it
_LEAST = 0.01  # of a picture that coloured ones of the map fill

# Oklab: Björn Ottosson, "A perceptual color space for image processing", 2020
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def dark(image: Image.Image) -> Image.Image:
    """A picture with a palette, with the colours for dark pages."""
    ground, ink, *colours = _lab(np.array([*_GROUND, *_INK, *(image.getpalette() or ())]))
    lightness, hues = np.split(np.array(colours), [1], axis=1)
    chroma = np.linalg.norm(hues, axis=1, keepdims=True)
    grey = lightness * ground + (1 - lightness) * ink
    bright = np.insert(hues, 0, 0.5 + 0.4 * lightness[:, 0], axis=1)
    share = (chroma / _FULL).clip(max=1) ** 2
    mapped = _of_map(np.array(colours))
    areas = np.array(image.histogram()[: len(colours)]) / np.prod(image.size)
    if areas[mapped & (chroma[:, 0] > _GREY)].sum() > _LEAST:
        share[mapped] = 1
    lab = (1 - share) * (grey + np.insert(hues, 0, 0, axis=1)) + share * bright
    linear = ((lab @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T).clip(0, 1)
    rgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    other = image.copy()
    other.putpalette((rgb * 255).round().astype(int).ravel().tolist())
    return other


def _of_map(colours: np.ndarray) -> np.ndarray:
    """Tell the colours that heatmaps, and points by their number, have."""
    of_map = _lab(255 * colormaps["cividis"](np.arange(256))[:, :3])
    return np.linalg.norm(colours[:, None] - of_map, axis=2).min(axis=1) < _NEAR


def _lab(levels: np.ndarray) -> np.ndarray:
    """Oklab of colours of three levels each."""
    rgb = levels.reshape(-1, 3) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _TO_CONES.T) @ _TO_LAB.T


def save(image: Image.Image, path: Path) -> None:
    """Write a PNG of few colours, which is small, and beside it the one for dark pages."""
    few = (
        image if image.mode == "P" else image.convert("RGB").quantize(192, dither=Image.Dither.NONE)
    )
    few.save(path, optimize=True)
    dark(few).save(path.with_stem(f"{path.stem}-dark"), optimize=True)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        if not path.stem.endswith("-dark"):
            with Image.open(path) as image:
                save(image, path)
