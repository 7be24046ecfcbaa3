"""Headless Chromium, driven over the W3C WebDriver protocol: plain HTTP to the chromedriver beside
it.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
MISSING = " and ".join(
    name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None
)

_FLAGS = [
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing outside of this machine
    "--force-device-scale-factor=1",
    "--window-size=1400,1000",
]


class Browser:
    """A browser with one window; a context manager."""

    def __init__(self, profile):
        self.profile = profile

    def __enter__(self):
        self.driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            started = next(
                found
                for line in self.driver.stdout
                if (found := re.search(r"successfully on port (\d+)", line))
            )
            self.url = f"http://127.0.0.1:{started[1]}/session"
            options = {
                "binary": CHROMIUM,
                "args": [*_FLAGS, f"--user-data-dir={self.profile}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self._call("", {"capabilities": {"alwaysMatch": wanted}})
            self.url += f"/{session['sessionId']}"
            # a headless window need not have the focus
            self._devtools("Emulation.setFocusEmulationEnabled", enabled=True)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        try:
            self._call("", method="DELETE")
        finally:
            self._stop()

    def _stop(self):
        self.driver.terminate()
        self.driver.wait(20)
        self.driver.stdout.close()

    def open(self, page):
        """A URL or a file. The console of the page before is forgotten."""
        self.console()
        self._call("/url", {"url": page.as_uri() if isinstance(page, Path) else page})

    def run(self, script, *arguments):
        """What the body of a JavaScript function returns."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script, *arguments):
        """The first result of the script that is true."""
        end = time.monotonic() + 30
        while not (result := self.run(script, *arguments)):
            if time.monotonic() > end:
                raise TimeoutError(f"not within 30 s: {script}")
            time.sleep(0.1)
        return result

    def console(self):
        """Messages since the last call, as (level, text)."""
        return [
            (entry["level"], entry["message"])
            for entry in self._call("/se/log", {"type": "browser"})
        ]

    def _devtools(self, command, **params):
        self._call("/goog/cdp/execute", {"cmd": command, "params": params})

    def resize(self, width, height):
        self._call("/window/rect", {"width": width, "height": height})

    def emulate(self, width, height):
        """Show pages as on a screen of this size, also where no window can be so small."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme):
        """Prefer the colour scheme "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", features=features)

    def point(self, x, y, *, to=None):
        """Move the mouse to a point of the window, and, with the button down, from there to
        another.
        """
        self._mouse("mouseMoved", x, y)
        if to is not None:
            self._mouse("mousePressed", x, y, button="left", clickCount=1)
            self._mouse("mouseMoved", *to, button="left", buttons=1)
            self._mouse("mouseReleased", *to, button="left", clickCount=1)

    def _mouse(self, kind, x, y, **others):
        self._devtools("Input.dispatchMouseEvent", type=kind, x=x, y=y, **others)

    def press(self, *keys):
        """Press keys one after the other, by their names in JavaScript."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self._devtools("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self._devtools("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _call(self, path, body=None, *, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            reason = json.load(error)["value"]
            raise RuntimeError(
                f"{method} {path}: {reason['error']}: {reason['message'][:500]}"
            ) from None
