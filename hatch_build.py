"""Metadata that has the repository's address: the project's URLs, and the README's links and
picture for PyPI.

The address is known to the repository's owner alone, whose release gives it in the environment
variable ``EMBEDGEO_REPOSITORY`` (``https://…``, without a slash at the end). GitHub's Actions are
not asked for it: those of another project, which install embedgeo from git, would give their own.
Where there is none, as on a clone, the package has no URLs, and the README's relative links are
their text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``, but not from an sdist, whose metadata has both already."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what `pyproject.toml` calls dynamic."""
        if "readme" in metadata:
            return
        repository, version = os.environ.get("EMBEDGEO_REPOSITORY", ""), metadata["version"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_pypi(text, repository, f"v{version}"),
        }
        if repository:
            files = f"{repository}/blob/v{version}"
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def for_pypi(text: str, repository: str, tag: str) -> str:
    """A README whose relative links and pictures lead into the repository at a tag, or without it
    are left out.
    """
    there = r"(?!\w+:|#)(?P<path>[^)\s\"]+)"
    picture = re.compile(rf"!\[(?P<text>[^]]*)\]\({there}\)")
    link = re.compile(rf"\[(?P<text>[^]]*)\]\({there}\)")
    if not repository:
        text = re.sub(r"<picture>.*?</picture>|<img\b[^>]*>", "", text, flags=re.DOTALL)
        return re.sub(r"\n{3,}", "\n\n", link.sub(r"\g<text>", picture.sub("", text)))
    text = picture.sub(rf"![\g<text>]({repository}/raw/{tag}/\g<path>)", text)
    text = re.sub(rf'\b(src|srcset)="{there}"', rf'\1="{repository}/raw/{tag}/\g<path>"', text)
    return link.sub(rf"[\g<text>]({repository}/blob/{tag}/\g<path>)", text)
