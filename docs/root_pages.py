"""Pages of the site that are files of the repository's root: README.md and CHANGELOG.md, with their
links as they are from here.
"""

import re
from pathlib import Path
from typing import Any

SOURCES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
_PICTURE = re.compile(
    r'<picture>.*?<img alt="(?P<text>[^"]*)" src="docs/(?P<path>[^"]*)">.*?</picture>', re.DOTALL
)
_ELSEWHERE = re.compile(r"\[(?P<text>[^]]*)\]\((?!\w+:|#|docs/|CHANGELOG\.md)[^)\s]+\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The text of a page; mkdocs calls this for each. Links to what the site does not have are
    their text.
    """
    if page.file.src_uri not in SOURCES:
        return markdown
    source = Path(__file__).parents[1] / SOURCES[page.file.src_uri]
    text = _PICTURE.sub(r"![\g<text>](docs/\g<path>)", source.read_text(encoding="utf-8"))
    text = _ELSEWHERE.sub(r"\g<text>", text)
    return text.replace("](docs/", "](").replace("](CHANGELOG.md", "](changelog.md")
