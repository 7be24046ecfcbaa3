import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings

# The same examples every time in the ordinary run; `--hypothesis-profile=fuzz` draws new and many more ones for the
# tests that do not fix their number.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)


@pytest.fixture
def unpainted() -> Iterator[None]:
    """Figures are made, but not painted, which takes most of the time of a report."""
    from matplotlib.figure import Figure

    def write_nothing(figure: Figure, path: Path, **options: object) -> None:
        path.write_text("")

    with (
        mock.patch("embedgeo.drawing.png", return_value=(b"a picture", 1, 1)),
        mock.patch.object(Figure, "savefig", write_nothing),
    ):
        yield
