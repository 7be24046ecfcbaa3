"""How the site shows formulas: as MathML, which needs no script and no font; and pictures: with
their dark versions.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'(?<=class="arithmatex">)(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])(?=</)', re.DOTALL
)
# bars of a norm, as high as what they enclose after \left alone; a slash; a minus after a bracket
# or =
_AS_IN_TEX = {
    r"<mo>(?=&#x02016;</mo>)": '<mo stretchy="false">',
    r"<mo>(?=&#x0002F;</mo>)": '<mo lspace="0" rspace="0">',
    r"(?<=(?:28|3D);</mo>)<mo>(?=&#x02212;</mo>)": '<mo form="prefix">',
}
_PICTURE = re.compile(r'<img (?P<others>[^>]*?)src="(?P<path>[^"]*)\.png"(?P<more>[^>]*)>')


def on_page_content(content: str, *, page: Any, config: Any, **_: object) -> str:
    """The page's HTML; mkdocs calls this for each page. A formula that cannot be set raises
    ``ValueError``.
    """
    images = Path(config.docs_dir, "images")

    def mathml(found: re.Match[str]) -> str:
        formula = html.unescape(found["inline"] or found["block"]).strip()
        element = convert(
            formula.replace("{aligned}", "{align*}"),
            display="block" if found["block"] else "inline",
        )
        if re.search(r"\\|>&(?:amp;|#x00026;)?<", element):
            raise ValueError(f"{page.file.src_uri}: no MathML is known for a part of {formula}")
        for operator, instead in _AS_IN_TEX.items():
            element = re.sub(operator, instead, element)
        return element

    def both(found: re.Match[str]) -> str:
        if not images.joinpath(f"{Path(found['path']).name}-dark.png").exists():
            return found[0]
        sources = (f"{found['path']}.png#only-light", f"{found['path']}-dark.png#only-dark")
        return "".join(
            f'<img {found["others"]}src="{source}"{found["more"]}>' for source in sources
        )

    return _PICTURE.sub(both, _FORMULA.sub(mathml, content))
