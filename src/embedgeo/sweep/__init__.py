"""Geometry over the checkpoints of training runs: the commands ``sweep`` and ``check``.

The command line imports this module; the commands import what they need when they run.
"""

import os
from collections.abc import Sequence

from embedgeo.extras import require_extra
from embedgeo.sweep.settings import SweepSettings as SweepSettings

_RAY_OPTIONS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # half a minute for each, where something else answers
    # what it prints about workers that die: a sweep has lines of its own
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}


def sweep(settings: SweepSettings) -> int:
    """Measure the geometry of every checkpoint of a training run on the same text.

    The results are written to a folder: ``checkpoints/<name>.parquet``, ``metrics.csv`` and
    ``tensorboard/``. A sweep that is interrupted, at any moment, and started again continues where
    it was.

    Args:
        settings: the options of the sweep.

    Returns:
        Exit status: 0 if all are done, 3 if some checkpoints failed, which the next run tries
        again.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: settings that do not fit each other, the model or the folder.
        OSError: the folder cannot be written, or the checkpoints cannot be listed.
    """
    require_extra("sweep", "embedgeo sweep")
    require_sources(settings.models, settings.tokenizer)
    for path in settings.texts:
        if not path.startswith("hf://datasets/") and not os.path.exists(os.path.expanduser(path)):
            raise ValueError(
                f"text must be files that exist; got {path!r}. A dataset is hf://datasets/NAME."
            )
    if settings.tokens is not None and not os.path.isfile(os.path.expanduser(settings.tokens)):
        raise ValueError(f"tokens must be a file that exists; got {settings.tokens!r}.")
    if settings.on == "ray":
        require_extra("ray", "embedgeo sweep --on ray")
        for name, value in _RAY_OPTIONS.items():
            os.environ.setdefault(name, value)  # Ray reads them when it is imported

    from embedgeo.sweep.run import run_sweep

    return run_sweep(settings)


def check(
    model: str | list[str],
    steps: str | int | list[int] = "all",
    revisions: str = "*",
) -> int:
    """Compare weights by the hashes that the Hub lists, without downloading them.

    Args:
        model: as for ``sweep``.
        steps: as for ``sweep``.
        revisions: as for ``sweep``.

    Returns:
        Exit status: 0 if all differ, 1 if some have the same weights or share a weight file, 3 if
        some cannot be read.
    """
    require_extra("sweep", "embedgeo check")
    require_sources([model] if isinstance(model, str) else model)

    from embedgeo.sweep.run import run_check

    return run_check(model, steps, revisions)


def require_sources(models: Sequence[str], tokenizer: str | None = None) -> None:
    """Refuse paths that do not exist before the command is imported, which takes seconds."""
    from embedgeo.checkpoints.sources import require_source

    for model in models:
        require_source("model", model)
    if tokenizer:
        require_source("tokenizer", tokenizer)
