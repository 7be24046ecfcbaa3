"""The built site, as a browser shows it."""

import functools
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

SEEN = ["", "how-to/metric/", "reference/monitors/", "definitions/"]
_FAULTS = Path(ROOT, "tests", "browser", "faults.js").read_text(encoding="utf-8")
_EMPTY_HEADS = """
return [...document.querySelectorAll("thead")].filter(e => !e.innerText.trim() && e.offsetHeight).length;
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
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
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
    browser.wait("return document.readyState === 'complete' && document.querySelector('[data-md-component=search]')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_of_page_is_legible_and_without_an_error(browser, url, scheme):
    browser.prefer(scheme)
    grounds = set()
    for page in SEEN:
        opened(browser, url + page)
        shown = {"light": "default", "dark": "slate"}[scheme]
        browser.wait("return document.body.dataset.mdColorScheme === arguments[0]", shown)
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
        wrong = ("contrast", "did not load", "has no alt", "leads to #", "is there twice")
        assert [fault for fault in browser.run(_FAULTS) if any(words in fault for words in wrong)] == []
        assert browser.run(_EMPTY_HEADS) == 0
        assert [text for level, text in browser.console() if level in ("SEVERE", "WARNING")] == []
        fetched = browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [name for name in fetched + browser.run(_LINKED) if not name.startswith((url, "data:", "blob:"))] == []
    (ground,) = grounds
    red = int(ground.removeprefix("rgb(").removeprefix("rgba(").partition(",")[0])
    assert red > 240 if scheme == "light" else red < 60
    browser.prefer("light")


def test_the_search_finds_what_is_asked_for(browser, url):
    opened(browser, url)
    type_in = """
        const field = document.querySelector("[data-md-component=search-query]");
        field.focus();
        field.value = arguments[0];
        field.dispatchEvent(new Event("input", { bubbles: true }));
        field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    """
    results = "[...document.querySelectorAll('.md-search-result__link')]"
    links = f"return {results}.map(a => [a.pathname, a.innerText])"
    browser.wait(f"{type_in} return {results}.length", "TwoNN")
    found = browser.run(links)
    assert any("twonn" in text.lower() for _, text in found), found
    assert any("/definitions/" in path for path, _ in found), found
    browser.run(type_in, "StepMonitor")
    browser.wait(
        "return [...document.querySelectorAll('.md-search-result__link')].some(a => /StepMonitor/.test(a.innerText))"
    )
    assert any("/reference/monitors/" in path for path, _ in browser.run(links))
    assert [text for level, text in browser.console() if level in ("SEVERE", "WARNING")] == []


def test_the_scheme_can_be_changed_by_hand(browser, url):
    browser.prefer("light")
    opened(browser, url)
    browser.run("document.querySelector('label[for=__palette_1]').click()")
    assert browser.wait("return document.body.dataset.mdColorScheme === 'slate'")
    browser.run("document.querySelector('label[for=__palette_0]').click()")
    assert browser.wait("return document.body.dataset.mdColorScheme === 'default'")


@pytest.mark.parametrize("page", [*SEEN, "training/"])
def test_pages_fit_a_narrow_screen(browser, url, page):
    browser.emulate(420, 900)
    opened(browser, url + page)
    assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_every_page_is_in_the_site_and_its_search(site):
    pages = [page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")]
    places = {"" if page == "index" else f"{page}/" for page in pages}
    assert [place for place in places if not (site / place / "index.html").exists()] == []
    documents = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert places <= {document["location"].partition("#")[0] for document in documents}


def test_the_reference_has_every_public_name(site):
    import embedgeo

    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("index.html"))
    assert [name for name in embedgeo.__all__ if f'.{name}"' not in reference] == []
