"""The built site, as a browser shows it."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.blocks import PAGES, ROOT

PLACES = [
    page.removeprefix("docs/").removesuffix(".md") + ".html"
    for page in PAGES
    if page.startswith("docs/")
]
SEEN = ["index.html", "how-to/metric.html", "reference/monitors.html", "definitions.html"]
_FAULTS = Path(ROOT, "tests", "browser", "faults.js").read_text()
_EMPTY_HEADS = """
return [...document.querySelectorAll("thead")].filter(e => !e.innerText.trim() && e.offsetHeight).length;
"""
_PICTURES = """
const shown = [...document.querySelectorAll("article img")].filter(image => image.offsetWidth);
return shown.map(image => image.src.split("/").pop());
"""
_LINKED = """
return [...document.querySelectorAll("script[src], link[href], img[src], iframe[src]")].map(e => e.src || e.href);
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def url(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def opened(browser, page):
    """Open a page for the first time."""
    browser.open(page)
    browser.run("localStorage.clear()")
    browser.open(page)
    browser.wait(
        "return document.readyState === 'complete' && "
        "document.querySelector('[data-md-component=search]')"
    )


def module_of(file):
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_and_styles_load_nothing_from_elsewhere(site):
    loads = re.compile(r"<(?:script|img|iframe|source|link rel=.stylesheet)[^>]*=.(?:https?:)?//")
    for file in site.rglob("*.html"):
        assert not loads.search(file.read_text()), file
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(?:https?:)?//", styles)
    assert "@import" not in styles


def test_formulas_are_set_and_one_that_cannot_be_is_an_error(site):
    shown = module_of(Path(ROOT, "docs", "shown.py"))
    where = {
        "page": SimpleNamespace(file=SimpleNamespace(src_uri="x.md")),
        "config": SimpleNamespace(docs_dir=Path(ROOT, "docs")),
    }
    text = r'<span class="arithmatex">\({}\)</span>'.format
    content = shown.on_page_content(text(r"-\lVert x \rVert^2 &lt; \frac{1}{2}"), **where)
    assert "<mfrac>" in content
    assert "\\" not in content
    assert "<mo>&#x0003C;</mo>" in content
    assert content.count('<mo stretchy="false">&#x02016;</mo>') == 2
    for unknown in (r"\unheardof x", "a &amp; b"):
        with pytest.raises(ValueError, match=re.escape(r"x.md: no MathML is known for a part of")):
            shown.on_page_content(text(unknown), **where)
    for file in site.rglob("*.html"):
        assert not re.search(r'class="arithmatex">(?!<math)', file.read_text()), file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_of_page_is_legible_and_without_an_error(browser, url, scheme):
    browser.prefer(scheme)
    end = "" if scheme == "light" else "-dark"
    for page in SEEN:
        opened(browser, url + page)
        shown = {"light": "default", "dark": "slate"}[scheme]
        browser.wait("return document.body.dataset.mdColorScheme === arguments[0]", shown)
        if page == "index.html":
            names = [f"{name}{end}.png#only-{scheme}" for name in ("story", "page")]
            assert browser.run(_PICTURES) == names
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        red = int(ground.removeprefix("rgb(").removeprefix("rgba(").partition(",")[0])
        assert red > 240 if scheme == "light" else red < 60
        wrong = ("contrast", "did not load", "has no alt", "leads to #", "is there twice")
        found = browser.run(_FAULTS)
        assert [fault for fault in found if any(words in fault for words in wrong)] == []
        assert browser.run(_EMPTY_HEADS) == 0
        assert [text for level, text in browser.console() if level in ("SEVERE", "WARNING")] == []
        loaded = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        own = url, "data:", "blob:"
        names = browser.run(loaded) + browser.run(_LINKED)
        assert [name for name in names if not name.startswith(own)] == []
    browser.prefer("light")


def test_every_page_is_in_the_site_and_its_search(site):
    assert [place for place in PLACES if not (site / place).exists()] == []
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert set(PLACES) <= {document["location"].partition("#")[0] for document in documents}


def test_the_reference_has_every_public_name(site):
    import embedgeo

    reference = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    assert [name for name in embedgeo.__all__ if f'.{name}"' not in reference] == []
