"""A report without its paint, and what its page is made of."""

from html.parser import HTMLParser

import pandas as pd

from embedgeo.report import write_report
from tests.unpainted import unpainted


class Page(HTMLParser):
    """Tags with their attributes, the text on one line but for scripts, and names of figures."""

    def __init__(self, path):
        super().__init__()
        self.folder = path.parent
        self.html = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._said: list[str] = []
        self.feed(self.html)
        self.text = " ".join("".join(self._said).split())
        self.lines = [" ".join(said.split()) for said in self._said if said.strip()]
        self.figures = {file.stem for file in (self.folder / "figures").glob("*.csv")}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self._said.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def numbers(self, figure, index=None):
        """What lies beside a figure."""
        return pd.read_csv(self.folder / "figures" / f"{figure}.csv", index_col=index)


def report(*folders, out=None, **options):
    """Write a report of folders, of which nothing is painted."""
    with unpainted():
        return Page(write_report([*folders], out, **options))
