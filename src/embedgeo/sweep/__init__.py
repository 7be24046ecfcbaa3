"""Geometry over the checkpoints of training runs: the commands ``sweep``, ``check`` and ``drift``
of ``embedgeo``.

The command line imports this module; the commands import what they need when they run.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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
    if settings.removed_directions and not (settings.after_processing or settings.ablate):
        raise ValueError(
            "removed_directions are those of after_processing and of ablate; neither is asked for."
        )
    if settings.on == "ray":
        require_extra("ray", "embedgeo sweep --on ray")
        for name, value in _RAY_OPTIONS.items():
            os.environ.setdefault(name, value)  # Ray reads them when it is imported

    with without_garbage_collection():
        from embedgeo.sweep.run import run_sweep

    return run_sweep(settings)


def ablate(settings: SweepSettings) -> int:
    """Measure what the loss needs of each layer's output, over the checkpoints of a training run.

    It is a sweep that also replaces the output of one layer after the other by what lacks its
    offset, its top directions, its largest coordinates, its context or its tokens
    (`embedgeo.ablation`), and writes the change of the loss beside the geometry: ``embedgeo sweep
    --ablate true``.

    Args:
        settings: the options of the sweep.

    Returns:
        As ``sweep`` does, which also tells what is raised.
    """
    return sweep(replace(settings, ablate=True))


def check(
    model: str | list[str],
    steps: str | int | list[int] = "all",
    revisions: str = "*",
    lineage: bool = False,
) -> int:
    """Compare the weights of checkpoints by the hashes that the Hub lists, without downloading
    them.

    Args:
        model: as for ``sweep``.
        steps: as for ``sweep``.
        revisions: as for ``sweep``.
        lineage: also read the start of a few matrices of each checkpoint, of the files' bytes alone
            (some 2 MB), and print how far they are from those of the first checkpoint and of the
            one before; find tensors that are the same in some checkpoints, jumps, and weights that
            do not descend from those before.

    Returns:
        Exit status: 0 if all differ, 1 if some have the same weights, share a weight file, or do
        not belong to one run, 3 if some cannot be read.
    """
    require_extra("sweep", "embedgeo check")
    require_sources([model] if isinstance(model, str) else model)

    with without_garbage_collection():
        from embedgeo.sweep.run import run_check

    return run_check(model, steps, revisions, lineage)


def drift(folder: Path, rows: int = 1024) -> None:
    """Compare the same rows over the checkpoints of a sweep and through the layers, from its saved
    samples.

    ``embedgeo sweep --save-samples true`` and ``Geometry.save(…, save_samples=True)`` save them.
    Each checkpoint is compared with the one before and the first one, and each layer with the one
    below, in ``drift/<name>.parquet``: the report, ``metrics.csv`` and ``tensorboard/`` have these
    records with the others. ``cka.parquet`` has the similarity of steps with steps at some layers,
    and of layers with layers at some steps. What was interrupted goes on where it was; what is
    there already, of the same samples, is not computed again.

    Args:
        folder: of the sweep.
        rows: how many of the saved rows are compared; the adjusted linearity takes more than there
            are coordinates.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: there are no saved samples, a file is damaged, or ``rows`` is less than 4.
        OSError: the folder is not there, or cannot be written.
    """
    require_extra("report", "embedgeo drift", "pandas", "pyarrow", "rich", "safetensors")
    if rows < 4:
        raise ValueError(f"rows must be at least 4, or no similarity is defined; got {rows}.")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"drift takes the folder of a sweep; {folder} is none.")
    with without_garbage_collection():
        from embedgeo.sweep.comparison import Comparison

    comparison = Comparison(Path(folder), rows)
    comparison.write()
    if comparison.fewest_rows < rows:
        print(
            f"compared down to {comparison.fewest_rows} rows instead of {rows}: no more were "
            f"saved, or are in both"
        )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context for imports, in which garbage collection finds next to nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def require_sources(models: Sequence[str], tokenizer: str | None = None) -> None:
    """Refuse paths that do not exist before the command is imported, which takes seconds."""
    from embedgeo.checkpoints.sources import require_source

    for model in models:
        require_source("model", model)
    if tokenizer:
        require_source("tokenizer", tokenizer)
