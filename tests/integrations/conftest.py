"""Fixtures of the sweeps' tests."""

from tests.sweep.conftest import hub, options, text

__all__ = ["hub", "options", "text"]
