"""The pictures of the documentation have versions for dark pages."""

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

from tests.docs.blocks import ROOT

DOCS = Path(ROOT, "docs")


def test_every_picture_has_its_dark_version():
    spec = importlib.util.spec_from_file_location("dark", DOCS / "dark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pictures = [path for path in DOCS.glob("images/*.png") if not path.stem.endswith("-dark")]
    assert pictures
    for path in pictures:
        with Image.open(path) as light, Image.open(path.with_stem(f"{path.stem}-dark")) as dark:
            assert np.array_equal(module.dark(light).convert("RGB"), dark.convert("RGB")), path
