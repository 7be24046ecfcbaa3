"""Geometry over the checkpoints of training runs: the commands ``embedgeo sweep`` and ``embedgeo check``.

The command line imports this; what the commands need is imported when they run.
"""

from embedgeo.sweep.settings import SweepSettings

__all__ = ["SweepSettings", "check", "sweep"]


def sweep(settings: SweepSettings) -> int:
    """Measure the geometry of every checkpoint of a training run on the same text.

    The results go into a folder: ``checkpoints/<name>.parquet``, ``metrics.csv`` and ``tensorboard/``. Killed at any
    moment and started again, a sweep goes on where it was.

    Args:
        settings: what to measure, and how.

    Returns:
        Exit status: 0 all done, 3 some checkpoints failed; the next run tries only these.

    Raises:
        ValueError: settings that do not fit each other, the model or the folder.
        OSError: the folder cannot be written, or the source cannot be listed.
    """
    from embedgeo.sweep.command import run_sweep

    return run_sweep(settings)


def check(model: str | list[str], steps: str | int | list[int] = "all", revisions: str = "*") -> int:
    """Compare the weights of checkpoints by their hashes, which the Hub lists without a download.

    Args:
        model: as in ``sweep``.
        steps: as in ``sweep``.
        revisions: as in ``sweep``.

    Returns:
        Exit status: 0 all different, 1 some have the same weights, or share a file of them, 3 some cannot be read.
    """
    from embedgeo.sweep.command import run_check

    return run_check(model, steps, revisions)
