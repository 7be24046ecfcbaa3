"""The pictures of the documentation, and their versions for dark pages."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from tests.docs.blocks import ROOT

DOCS = Path(ROOT, "docs")
LIGHT = [path for path in sorted(DOCS.glob("images/*.png")) if not path.stem.endswith("-dark")]


@pytest.fixture(scope="module")
def dark():
    spec = importlib.util.spec_from_file_location("dark", DOCS / "dark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dark


def levels(image):
    return np.asarray(image.convert("RGB"), dtype=int)


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_every_picture_has_its_dark_version(path, dark):
    with Image.open(path) as light, Image.open(path.with_stem(f"{path.stem}-dark")) as other:
        assert np.array_equal(levels(dark(light)), levels(other))


def test_greys_swap_their_lightness_and_colours_stay_bright_and_keep_their_hue(dark):
    image = Image.new("P", (4, 1))
    image.putpalette([255, 255, 255, 0, 0, 0, 230, 159, 0, 0, 114, 178])
    image.putdata([0, 1, 2, 3])
    white, black, orange, blue = levels(dark(image))[0]
    assert white.tolist() == pytest.approx([30, 33, 41], abs=1)
    assert black.tolist() == pytest.approx([240, 240, 240], abs=1)
    assert orange.argmin() == 2
    assert orange[0] > orange[1] > 120
    assert blue.argmax() == 2
    assert blue[2] > blue[1] > blue[0]
    assert blue[2] > 180


def test_colours_of_a_heatmap_keep_their_order_and_stand_out_from_the_ground(dark):
    image = Image.new("P", (256, 1))
    image.putpalette(
        (255 * colormaps["cividis"](np.arange(256))[:, :3]).round().astype(int).ravel().tolist()
    )
    image.putdata(list(range(256)))
    lightness = levels(dark(image))[0] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) > -1).all()  # levels are rounded
    assert (np.diff(lightness[::8]) > 0).all()
    assert lightness[0] > 70
    assert lightness[-1] > 200
