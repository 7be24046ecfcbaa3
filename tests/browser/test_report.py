"""The report, as a browser shows it from a file."""

import pytest

from embedgeo.report import write_report
from tests.browser.page import faults
from tests.report.synthetic import everything

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report([everything(tmp_path_factory.mktemp("report") / "sweep")])


SCROLLED = "return document.documentElement.scrollWidth - window.innerWidth"
GLANCE = """
return [...document.querySelectorAll('.glance img'), document.querySelector('.key')].map(e => {
  const box = e.getBoundingClientRect(); return [box.top, box.bottom]; })
"""
WIDTHS = """
return [...document.images].map(i => i.clientWidth);
"""


@pytest.fixture(scope="module")
def opened(browser, page):
    """The browser, with the page."""
    browser.open(page)
    return browser


def test_small_figures_in_a_row_and_how_to_read_them_are_on_the_first_screen(opened):
    opened.emulate(1300, 900)
    boxes, height = opened.run(GLANCE), opened.run("return window.innerHeight")
    assert all(0 < top < bottom < height for top, bottom in boxes), (boxes, height)
    *small, key = boxes
    assert len({round(top) for top, _ in small}) == 1
    assert key[0] > max(bottom for _, bottom in small)  # below all of them
    assert opened.run(SCROLLED) <= 0


def test_nothing_is_wrong_with_the_page_in_light_and_dark(opened):
    for scheme in ("light", "dark"):
        opened.prefer(scheme)
        assert faults(opened) == []
        ground = opened.run("return getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(18, 18, 18)" if scheme == "dark" else "rgb(255, 255, 255)")
        inverted = opened.run("return getComputedStyle(document.images[0]).filter")
        assert inverted == ("invert(0.93) hue-rotate(180deg)" if scheme == "dark" else "none")
    opened.prefer("light")
    assert opened.run("return document.images.length") >= 5


def test_on_a_narrow_screen_figures_fit_and_tables_show_that_they_scroll(
    opened,
):
    opened.emulate(420, 900)
    opened.wait(
        "return [...document.images].every(i => { i.loading = 'eager'; return i.complete; })"
    )
    assert opened.run(SCROLLED) <= 0
    assert 0 < max(opened.run(WIDTHS)) <= 420
    table = "[...document.querySelectorAll('.table')].find(t => t.scrollWidth > t.clientWidth)"
    assert "gradient" in opened.run(f"return getComputedStyle({table}).backgroundImage")
    opened.emulate(1300, 900)
