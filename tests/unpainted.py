"""Figures that are made, but not painted, which takes most of the time of a report."""

from contextlib import contextmanager
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.text import Text


def write_texts(figure, path, **_):
    path.write_text("\n".join(text.get_text() for text in figure.findobj(Text)))


@contextmanager
def unpainted(*, is_drawn=False):
    """In place of a PNG there is a word, in place of an SVG its texts.

    With ``is_drawn``, figures are drawn nevertheless, in few pixels, for what may fail then.
    """

    def png(figure, *_):
        if is_drawn:
            figure.set_dpi(20)
            figure.canvas.draw()
        return b"a picture", 1, 1

    with (
        mock.patch("embedgeo.drawing.png", png),
        mock.patch.object(Figure, "savefig", write_texts),
    ):
        yield
