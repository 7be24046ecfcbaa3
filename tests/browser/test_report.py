"""The report, as a browser shows it from a file."""

import pytest

from embedgeo.report import write_report
from tests.browser.page import faults
from tests.report.synthetic import OF_BATCHES, OF_TYPES, make_models, make_sweep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    sweep = make_sweep(
        tmp_path_factory.mktemp("report") / "sweep",
        duplicates={1: 0},
        losses={64: 30.0},
        changes={(512, "block.01", "n_nonfinite"): 7.0},
        metrics=(
            "n",
            "n_nonfinite",
            "Q",
            "M",
            "V",
            "anisotropy",
            "anisotropy_null",
            "mean_cosine",
            "intrinsic_dimension",
            "V_W_unbiased",
            "V_B_unbiased",
        ),
        tokens=True,
        stderr=0.03,
    )
    return write_report([sweep])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    metrics = ("n", "M", "anisotropy", "intrinsic_dimension", *OF_TYPES, *OF_BATCHES)
    make_models(
        folder,
        {"lab/bert": 2, "lab/roberta": 3, "lab/gpt": 2},
        metrics=metrics,
        groups={"lab/gpt": "decoder"},
    )
    return write_report([folder])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wrong_with_the_page(browser, page, scheme):
    browser.prefer(scheme)
    assert faults(browser, page) == []
    ground = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(18, 18, 18)" if scheme == "dark" else "rgb(255, 255, 255)")
    inverted = browser.run("return getComputedStyle(document.images[0]).filter")
    assert inverted == ("invert(0.93) hue-rotate(180deg)" if scheme == "dark" else "none")
    browser.prefer("light")
    assert browser.run("return document.images.length") >= 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wrong_with_the_page_of_final_models(browser, models, scheme):
    browser.prefer(scheme)
    assert faults(browser, models) == []
    browser.prefer("light")
    assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert " step" not in browser.run("return document.body.innerText")


def test_the_flags_can_be_seen(browser, page):
    browser.open(page)
    text = browser.run("return document.body.innerText")
    for words in ("Duplicate checkpoints.", "Loss outliers.", "Non-finite rows."):
        assert words in text
    for words in (
        "step1: weights of step0",
        "step64: 30 nats per token",
        "block.01: 7 rows at most, at step 512",
    ):
        assert words in text


@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_fits_into_the_window(browser, page, width):
    browser.resize(width, 900)
    browser.open(page)
    assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_a_wide_figure_keeps_its_letters_on_a_narrow_screen(browser, page):
    browser.resize(500, 900)  # the narrowest that a window can be
    browser.open(page)
    browser.wait(
        "return [...document.images].every(i => { i.loading = 'eager'; return i.complete; })"
    )
    shown = browser.run(
        "return [...document.images].map(i => [i.clientWidth, i.width, +i.getAttribute('width')])"
    )
    wide = [widths for widths in shown if widths[2] > 500]
    assert wide
    assert all(len(set(widths)) == 1 for widths in wide)


def test_small_figures_in_a_row_and_how_to_read_them_are_on_the_first_screen(browser, page):
    browser.resize(1300, 900)
    browser.open(page)
    boxes = browser.run(
        "return [...document.querySelectorAll('.glance img'), "
        "document.querySelector('.key')].map(e => {"
        " const box = e.getBoundingClientRect(); return [box.top, box.bottom]; })"
    )
    height = browser.run("return window.innerHeight")
    assert all(0 < top < bottom < height for top, bottom in boxes), (boxes, height)
    *small, key = boxes
    assert len({round(top) for top, _ in small}) == 1
    assert key[0] > max(bottom for _, bottom in small)  # below all of them


def test_figures_fit_a_narrow_screen_and_tables_show_that_they_scroll(browser, page):
    browser.emulate(420, 900)
    browser.open(page)
    widths = browser.run(
        "return [...document.images].filter(i => +i.getAttribute('width') < 500).map(i => "
        "i.clientWidth)"
    )
    assert widths
    assert max(widths) <= 420
    table = "[...document.querySelectorAll('.table')].find(t => t.scrollWidth > t.clientWidth)"
    assert "gradient" in browser.run(f"return getComputedStyle({table}).backgroundImage")


def test_metrics_of_one_figure_stand_side_by_side(browser, tmp_path):
    page = write_report([make_sweep(tmp_path, (0,), 2, metrics=("Q", "M", "M_over_V"))])
    tops = (
        "return [...document.querySelectorAll('.single img')].map(i => "
        "Math.round(i.getBoundingClientRect().top))"
    )
    browser.emulate(1300, 900)
    browser.open(page)
    first, second, third = browser.run(tops)
    assert first == second == third
    browser.emulate(420, 900)
    browser.open(page)
    first, second, third = browser.run(tops)
    assert first < second < third
