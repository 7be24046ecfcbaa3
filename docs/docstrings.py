"""How the site shows docstrings: lines of a doctest, and what follows ``Example::``, as code."""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


class Code(griffe.Extension):
    """Fences the code in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```python\n{_dedented(found[1])}\n```\n", text
            )


def _dedented(code: str) -> str:
    return re.sub("^    ", "", code.rstrip(), flags=re.MULTILINE)
