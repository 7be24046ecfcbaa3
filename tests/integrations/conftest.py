"""Fixtures of other tests, and what loggers leave to the garbage collector, which may find it in any test."""

from tests.browser.conftest import browser
from tests.sweep.conftest import hub, options, text

__all__ = ["browser", "hub", "options", "text"]


def pytest_configure(config):
    for left in ("unclosed ", "Implicitly cleaning up"):  # sockets, event loops; wandb's images, tables
        config.addinivalue_line("filterwarnings", f"ignore:{left}:ResourceWarning")
