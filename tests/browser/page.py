"""What an automated check finds wrong with a page that is to stand by itself."""

from pathlib import Path

_OPEN_ALL = """
for (const details of document.querySelectorAll("details")) details.open = true;
const loaded = [...document.images].map(image => { image.loading = "eager"; return image.decode(); });
return Promise.allSettled(loaded).then(() => true);
"""
_SCRIPT = Path(__file__).with_name("faults.js").read_text()


def faults(browser, page=None):
    """List what readers of a file, and of all that is folded up in it, would miss, and errors on
    the console; without a file, of the page that is open.
    """
    if page is not None:
        browser.open(page)
    browser.run(_OPEN_ALL)
    found = browser.run(_SCRIPT)
    return found + [
        f"console: {text}" for level, text in browser.console() if level in ("SEVERE", "WARNING")
    ]
