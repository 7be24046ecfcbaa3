"""Figures that answer: pointing, choosing, scales, zoom, the address and the keyboard, in a page
opened from a file.
"""

import re

import pytest

from embedgeo.report import write_report
from tests.browser.page import faults
from tests.report.synthetic import layer_names, make_sweep

pytestmark = pytest.mark.slow

STEPS = (0, 1, 4, 16, 64, 256, 1024)
METRICS = ("n", "Q", "M_over_Q", "anisotropy", "V_W_over_V_unbiased")
SHOW = """
const host = document.querySelector(`[data-plot="${arguments[0]}"]`);
host.scrollIntoView({ block: "center" });
const over = [...host.querySelectorAll(".u-over")];
const boxes = over.map(each => each.getBoundingClientRect());
return boxes.length && boxes.map(box => [box.left, box.top, box.width, box.height]);
"""
READOUT = 'return document.querySelector(`[data-plot="${arguments[0]}"] .readout`).textContent'
CHOOSE = """
const form = document.getElementById("view");
const fields = [...form.querySelectorAll(`[name=${arguments[0]}]`)];
const field = fields.find(each => each.type !== "checkbox" || each.value === arguments[1]);
if (field.type === "checkbox") field.checked = !field.checked; else field.value = arguments[1];
field.dispatchEvent(new Event("change", { bubbles: true }));
"""
LEGEND = 'return document.querySelector(`[data-plot="${arguments[0]}"] .legend`).innerText'
PIXELS = """
const canvas = document.querySelector(`[data-plot="${arguments[0]}"] canvas`);
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const [r, g, b] = arguments[1];
let count = 0;
for (let i = 0; i < data.length; i += 4)
  count += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] > 200;
return count;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    return write_report([make_sweep(folder, STEPS, 3, metrics=METRICS, stderr=0.05)])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    metrics = ("n", "M_over_Q")
    sweeps = [
        make_sweep(folder / "one", STEPS, 2, metrics=metrics, stderr=0.05),
        make_sweep(folder / "two", STEPS[:5], 3, metrics=metrics),
    ]
    return write_report(sweeps, folder / "report")


@pytest.fixture(scope="module")
def wide(browser):
    browser.resize(1300, 900)
    return browser


def opened(browser, page, address=""):
    """Open the page anew: a change of the address alone would load nothing."""
    browser.open("about:blank")
    browser.open(page.as_uri() + address)


def shown(browser, name):
    """The boxes of a figure's axes in the window, once it is drawn."""
    return browser.wait(SHOW, name)


def address(browser):
    return browser.run("return location.hash")


def test_pointing_names_layer_step_value_and_error(wide, page):
    opened(wide, page)
    ((left, top, width, height),) = shown(wide, "M_over_Q-dynamics")
    wide.point(left + width - 1, top + height / 2)
    found = re.fullmatch(
        r"(.+), step 1,024: ([\d.]+) ± ([\d.]+)", wide.run(READOUT, "M_over_Q-dynamics")
    )
    assert found, wide.run(READOUT, "M_over_Q-dynamics")
    layers = [*layer_names(3), "mean over blocks", "Gaussian rows"]
    assert found[1] in layers
    assert float(found[3]) == pytest.approx(0.05 * float(found[2]), rel=0.1)
    shown(wide, "M_over_Q-profile")
    ((left, top, width, height),) = shown(wide, "M_over_Q-profile")
    wide.point(left + width - 1, top + 1)
    assert re.match(
        r"step [\dk,]+, final_norm: 0\.\d+ ± 0\.0\d+", wide.run(READOUT, "M_over_Q-profile")
    )
    wide.point(1, 1)
    assert wide.run(READOUT, "M_over_Q-profile") == ""


def test_the_keyboard_moves_along_lines_and_between_them(wide, page):
    opened(wide, page)
    shown(wide, "M_over_Q-dynamics")
    wide.run(
        "document.querySelector('[data-plot=M_over_Q-dynamics] .plot').focus({ focusVisible: true "
        "})"
    )
    assert wide.run(READOUT, "M_over_Q-dynamics").startswith("mean over blocks, step 1,024: ")
    wide.press("Home", "ArrowRight", "ArrowRight")
    assert wide.run(READOUT, "M_over_Q-dynamics").startswith("mean over blocks, step 4: ")
    wide.press("ArrowUp")
    above = wide.run(READOUT, "M_over_Q-dynamics")
    assert re.match(r"(block\.0\d|final_norm), step 4: ", above)
    assert (
        wide.run(
            "return document.activeElement.querySelector('.readout').getAttribute('aria-live')"
        )
        == "polite"
    )
    wide.press("+")
    low, high = map(float, re.search(r"&step=([\d.]+)\.\.([\d.]+)", address(wide)).groups())
    assert 0 <= low < 4 < high < 1024
    assert wide.run(READOUT, "M_over_Q-dynamics") == above
    wide.press("Escape")
    assert address(wide) == ""


def test_layers_go_on_and_off_in_all_figures_and_the_address_keeps_it(wide, page):
    opened(wide, page, "#metrics")
    violet = (68, 1, 84)  # of the first layer
    shown(wide, "M_over_Q-dynamics")
    assert wide.run(PIXELS, "M_over_Q-dynamics", violet)
    wide.run(CHOOSE, "layer", "embed")
    assert address(wide) == "#metrics&without-layer=embed"
    for name in ("M_over_Q-dynamics", "anisotropy-dynamics", "Q-dynamics"):
        shown(wide, name)
        assert wide.run(LEGEND, name).startswith("block.00")
        assert not wide.run(PIXELS, name, violet)
    wide.run("[...document.querySelectorAll('#view [name=none]')][0].click()")
    wide.run(CHOOSE, "layer", "embed")
    assert address(wide) == "#metrics&only-layer=embed"
    opened(wide, page, "#metrics&only-layer=embed")
    shown(wide, "Q-dynamics")
    assert wide.run("return document.querySelector('[data-count=layer]').textContent") == "1 of 5"
    wide.run("document.querySelector('a[href=\"#flags\"]').click()")
    assert (
        wide.wait("return location.hash.startsWith('#flags&') && location.hash")
        == "#flags&only-layer=embed"
    )


def test_dragging_zooms_all_figures_over_steps(wide, page):
    opened(wide, page)
    ((left, top, width, height),) = shown(wide, "M_over_Q-dynamics")
    wide.point(left + 0.3 * width, top + 20, to=(left + 0.7 * width, top + 40))
    low, high = map(int, re.fullmatch(r"#&step=(\d+)\.\.(\d+)", address(wide)).groups())
    assert (low, high) == pytest.approx((7.0, 127.0), rel=0.15)  # 1025 ** 0.3 - 1, 1025 ** 0.7 - 1
    assert wide.run("return document.querySelectorAll('.dot:not([hidden])').length") == 0
    assert wide.run("return +document.querySelector('#view [name=from]').value") == low
    ((left, top, width, height),) = shown(wide, "anisotropy-dynamics")
    wide.point(left + 1, top + height / 2)
    assert ", step 16: " in wide.run(READOUT, "anisotropy-dynamics")
    wide.run(CHOOSE, "from", "0")
    wide.run(CHOOSE, "to", "1024")
    assert address(wide) == ""


def test_nothing_is_wrong_with_figures_that_answer(browser, both):
    opened(browser, both)
    names = ("dynamics-small", "compared-dynamics-small", "compared-profiles")
    for scheme, width in (("light", 1300), ("dark", 420)):
        browser.prefer(scheme)
        browser.emulate(width, 900)
        assert faults(browser) == []
        for name in names:
            there = "return !!document.querySelector(`[data-plot='${arguments[0]}']`)"
            if browser.run(there, f"M_over_Q-{name}"):
                shown(browser, f"M_over_Q-{name}")
        assert faults(browser) == []
        assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    browser.prefer("light")
    browser.emulate(1300, 900)
