"""MLflow."""

from embedgeo.training.loggers.base import Adapter


def adapter(logger: object) -> Adapter | None:
    """The adapter of a logger of MLflow."""
    return None
