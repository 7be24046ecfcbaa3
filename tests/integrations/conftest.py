"""A fixture of other tests, and what loggers leave to the garbage collector, which may find it in
any test.
"""

from tests.browser.conftest import browser

__all__ = ["browser"]


def pytest_configure(config):
    # sockets, event loops; wandb's images, tables
    for left in ("unclosed ", "Implicitly cleaning up"):
        config.addinivalue_line("filterwarnings", f"ignore:{left}:ResourceWarning")
