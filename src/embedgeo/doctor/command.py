"""The command ``embedgeo doctor``."""

import sys
from pathlib import Path
from typing import Any

from torch import nn

from embedgeo.checkpoints.naming import import_named
from embedgeo.doctor import DoctorSettings
from embedgeo.doctor.models import configured, made, pretrained
from embedgeo.results.wording import reason
from embedgeo.sweep import SweepSettings
from embedgeo.sweep.quiet import quiet
from embedgeo.training.description import Description
from embedgeo.training.lightning import GeometryMonitor

_SIZES = {"batch_size": 8, "seq_len": 512}
_OPTIONS = ("metrics", "rows", "window", "jackknife", "max_state_bytes")


def run_doctor(settings: DoctorSettings) -> None:
    """Describe what the monitors of a configuration, or one of the given options, would do on a model.

    Raises:
        ValueError: a monitor could not start on the model, or there is no such model.
        OSError: a file cannot be read.
    """
    with quiet():
        model, monitors, sizes = _found(settings)
        options = {name: given for name in _OPTIONS if (given := getattr(settings, name)) is not None}
        if settings.layers is not None:
            options["layers"] = SweepSettings("", layers=settings.layers).layer_patterns
        if settings.metrics not in (None, "auto"):
            options["metrics"] = _function(str(settings.metrics))
        for name, default in _SIZES.items():
            given = getattr(settings, name)
            sizes[name] = sizes.get(name, default) if given is None else given
        texts = []
        for asked in monitors or [{}]:
            description = _described({**asked, **options}, model, sizes)
            if not description.layers:
                raise ValueError(description.warnings[0])
            texts.append(str(description))
    print("\n\n".join(texts))
    sys.stdout.flush()


def _described(arguments: dict[str, Any], model: nn.Module, sizes: dict[str, int]) -> Description:
    try:
        return GeometryMonitor(**arguments).describe(model, **sizes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of the arguments in a file, or of a function that they name
        raise ValueError(f"a GeometryMonitor of these options cannot start on this model ({reason(error)}).") from error


def _found(settings: DoctorSettings) -> tuple[nn.Module, list[dict[str, Any]], dict[str, int]]:
    """The model; the arguments of the monitors in a configuration; and the sizes of its batches."""
    source = settings.model_or_config
    path = Path(source).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return configured(path, settings.model_class)
    is_name = "/" not in source and (":" in source or "." in source) and not path.exists()
    model = made(source) if is_name else pretrained(source, trust_remote_code=settings.trust_remote_code)
    return model, [], {}


def _function(name: str) -> Any:
    try:
        return import_named(name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            "metrics must be auto, or name a function of a layer's width as package.function, in a module that can be "
            f"imported; got {name!r} ({reason(error)})."
        ) from error
