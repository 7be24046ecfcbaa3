"""A sweep with its settings as keywords."""

from typing import Any

import embedgeo.sweep
from embedgeo.studies import commands
from embedgeo.studies.commands import AblationParts


def sweep(model: str | list[str], **options: Any) -> int:
    return embedgeo.sweep.sweep(embedgeo.sweep.SweepSettings(model, **options))


def ablate(model: str | list[str], parts: AblationParts = "ablation", **options: Any) -> int:
    return commands.ablate(
        commands.AblationSettings(parts), embedgeo.sweep.SweepSettings(model, **options)
    )
