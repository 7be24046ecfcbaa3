"""The command ``embedgeo demo``, which imports what it needs when it runs."""

from embedgeo.demo.settings import DemoSettings
from embedgeo.extras import require_extra

__all__ = ["DemoSettings", "demo"]


def demo(settings: DemoSettings) -> None:
    """Train a small language model on Python's documentation and watch its geometry.

    Takes about two minutes on two cores, and needs neither a network nor a GPU.
    """
    require_extra("report,sweep", "embedgeo demo")
    from embedgeo.demo.run import run_demo

    run_demo(settings)
