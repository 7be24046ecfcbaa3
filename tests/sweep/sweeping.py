"""A sweep with its settings as keywords."""

from typing import Any

import embedgeo.sweep


def sweep(model: str | list[str], **options: Any) -> int:
    return embedgeo.sweep.sweep(embedgeo.sweep.SweepSettings(model, **options))
