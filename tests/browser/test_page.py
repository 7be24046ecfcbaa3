"""The check of pages finds what it is there for."""

import pytest

from tests.browser.page import faults

pytestmark = pytest.mark.slow


PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
GOOD = f"""<h1>Title</h1><p>Text, <a href="#there">a link</a>.</p><h2 id="there">Part</h2><h3>Small part</h3>
<h2>More</h2>
<img src="{PIXEL}" alt="A dot"><button>Press</button><label>Number <input></label>
<table><tr><th>a</th></tr><tr><td>1</td></tr></table><svg role="img" aria-label="A line" width="9" height="9"></svg>
<div style="overflow-x: auto; width: 50px" tabindex="0"><div style="width: 500px">wide</div></div>
<p style="background: #333; color: #ddd">light on dark</p>
<details><summary>More</summary><img loading="lazy" src="{PIXEL}" alt="A dot"></details>
<h2 style="color: #8a8a8a; font-size: 30px">large letters may be paler</h2>"""
BAD = {
    "an image without alt": (f'<img src="{PIXEL}">', "has no alt"),
    "an image that is broken": (
        '<img src="data:image/png;base64,AAAA" alt="A dot">',
        "did not load",
    ),
    "a drawing without a name": ('<svg width="9" height="9"></svg>', "<svg> has no name"),
    "a heading that skips a level": ("<h4>Deep</h4>", '"Deep" is of level 4 after level 2'),
    "a button without a name": ("<button></button>", "<button> has no name"),
    "a table without headers": ("<table><tr><td>1</td></tr></table>", "no header cells"),
    "a link to nowhere": ('<a href="#nowhere">x</a>', "leads to #nowhere"),
    "one id twice": ('<p id="there">x</p>', 'id "there" is there twice'),
    "another order of the tab key": (
        '<button tabindex="3">x</button>',
        "changes the order of the tab key",
    ),
    "what only a mouse can press": ('<span onclick="1">x</span>', "not reached by keyboard"),
    "an invisible focus": ('<button style="outline: none">x</button>', "does not show the focus"),
    "a region that only a mouse can scroll": (
        '<div style="overflow: auto; width: 50px"><div style="width: 500px">wide</div></div>',
        "scrolls, but cannot be reached",
    ),
    "pale letters": ('<p style="color: #999">pale</p>', '<p> "pale" has a contrast of 2.85'),
    "an error in a script": ('<script>throw new Error("broken")</script>', "console: "),
    "a picture from elsewhere": (
        '<img src="http://127.0.0.1:9/x.png" alt="A dot">',
        "is fetched from elsewhere",
    ),
}


def write(folder, body):
    page = folder / "page.html"
    head = '<title>Test</title><meta charset="utf-8">'
    page.write_text(
        f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>'
    )
    return page


def test_a_good_page_has_no_faults(browser, tmp_path):
    assert faults(browser, write(tmp_path, GOOD)) == []


def test_every_fault_is_found(browser, tmp_path):
    found = faults(browser, write(tmp_path, GOOD + "".join(body for body, _ in BAD.values())))
    for cause, (_, expected) in BAD.items():
        assert any(expected in fault for fault in found), (cause, found)
