"""The pictures of the documentation have versions for dark pages."""

from pathlib import Path

import numpy as np
from PIL import Image

from docs.dark import dark as dark_version
from tests.docs.blocks import ROOT


def test_every_picture_has_its_dark_version():
    images = Path(ROOT, "docs/images").glob("*.png")
    pictures = [path for path in images if not path.stem.endswith("-dark")]
    assert pictures
    for path in pictures:
        with Image.open(path) as light, Image.open(path.with_stem(f"{path.stem}-dark")) as dark:
            assert np.array_equal(dark_version(light).convert("RGB"), dark.convert("RGB")), path
