import pytest

from tests.browser.chromium import MISSING, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if MISSING:
        pytest.skip(
            f"needs a browser, and {MISSING} was not found: apt-get install chromium "
            f"chromium-driver"
        )
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
