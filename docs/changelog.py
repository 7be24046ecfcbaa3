"""The site's page of changes is CHANGELOG.md, with its links as they are from here."""

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The text of a page; mkdocs calls this for each."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (
        Path(__file__)
        .parents[1]
        .joinpath("CHANGELOG.md")
        .read_text(encoding="utf-8")
        .replace("](docs/", "](")
    )
