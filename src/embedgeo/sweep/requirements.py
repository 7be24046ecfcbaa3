"""What the options of a sweep must be. Imported by the command line: nothing heavy may be imported here."""

from math import inf
from typing import TYPE_CHECKING, Any

from embedgeo.extras import require_extra

if TYPE_CHECKING:
    from embedgeo.sweep.settings import SweepSettings


def require_text_options(settings: "SweepSettings") -> None:
    """Raise ValueError unless the options about texts can be had, and go together."""
    if not 0 < settings.sample <= 1:
        raise ValueError(f"sample must be a share above 0 and at most 1, such as 0.01; got {settings.sample}.")
    fewest, most = settings.min_words, settings.max_words
    if fewest < 0 or most < 0 or fewest > most > 0:
        raise ValueError(f"min_words must be at most max_words, and neither below 0; got {fewest} and {most}.")
    if settings.unit == "sequence" and (fewest or most):
        raise ValueError("min_words and max_words are about texts; unit is 'sequence'. Take another unit.")


def require_ray_options(settings: "SweepSettings") -> None:
    """Raise ValueError unless the options about a Ray cluster can be had, and go together."""
    if settings.on is None and (settings.ray_address or settings.workers != 1 or settings.resources):
        raise ValueError("ray_address, workers and resources say where to measure on Ray; give on=ray with them.")
    if settings.workers < 1:
        raise ValueError(f"workers must be at least 1; got {settings.workers}.")
    given: Any = settings.resources or {}
    if not all(isinstance(number, int | float) and 0 <= number < inf for number in given.values()):
        raise ValueError(f'resources must be numbers from 0 up, as {{"GPU": 1}}; got {given!r}.')
    apart = {
        name: value for name, value in (settings.trainer or {}).items() if name in ("devices", "num_nodes", "strategy")
    }
    if settings.on == "ray" and any(value not in (1, "auto") for value in apart.values()):
        raise ValueError(f"a worker on Ray is one process with one device; got trainer options {apart!r}.")


def require_metric_options(settings: "SweepSettings") -> None:
    """Raise ValueError unless the options about metrics can be had, and go together."""
    lo_hi: Any = settings.count_range
    whole = isinstance(lo_hi, list | tuple) and all(type(each) is int for each in lo_hi)
    if not whole or (lo_hi and not (len(lo_hi) == 2 and 1 <= lo_hi[0] <= lo_hi[1])):
        raise ValueError(f"count_range must be LO,HI with 1 <= LO <= HI occurrences; got {lo_hi!r}.")
    if settings.rows in ("mean", "max") and (lo_hi or settings.token_tables):
        raise ValueError(
            f'count_range and token_tables need token types; rows="{settings.rows}" has none. Take other rows.'
        )
    if not 0 < settings.discard_fraction < 1:
        raise ValueError(f"discard_fraction must be between 0 and 1, both excluded; got {settings.discard_fraction}.")
    if settings.id_batches < 1:
        raise ValueError(f"id_batches must be at least 1 sample; got {settings.id_batches}.")
    if not 1 <= settings.max_state_bytes < inf:
        raise ValueError(f"max_state_bytes must be a positive number of bytes a layer; got {settings.max_state_bytes}.")
    if settings.anisotropy_batch < 0 or settings.anisotropy_batch == 1:
        raise ValueError(f"anisotropy_batch must be 2 rows or more, or 0 for none; got {settings.anisotropy_batch}.")


def require_device_map(settings: "SweepSettings") -> None:
    """Raise ValueError unless ``device_map`` can be had, and go together."""
    got, precision = settings.device_map, str((settings.trainer or {}).get("precision"))
    if not got or not (got == "auto" or isinstance(got, dict)):
        raise ValueError(f"device_map must be auto, or a mapping of modules to devices; got {got!r}.")
    if settings.model_class is not None:
        raise ValueError(f"device_map must be left out with a model_class, here {settings.model_class}: see trainer.")
    if precision.endswith("-true"):
        raise ValueError(f"device_map needs a dtype in place of trainer.precision {precision}. Give dtype.")
    require_extra("accelerate", "device_map")
