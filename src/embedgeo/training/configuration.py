"""A monitor's probe, and how many of its rows are compared: what was given, also in a configuration file."""

from collections.abc import Iterable, Iterator
from typing import Any

from embedgeo.functional.alignment import NEIGHBORS

NUM_ROWS = 1024
"""Rows of a layer that are compared, where their number is not given."""


def instantiated(value: Any) -> Any:
    """The value with each dict of a ``class_path`` and its ``init_args`` replaced by an instance, from the inside out.

    A command line made by `lightning.pytorch.cli.LightningCLI` leaves these dicts to the monitor, because jsonargparse
    would not pass arguments on to a data set inside a ``torch.utils.data.DataLoader``.

    >>> instantiated({"class_path": "fractions.Fraction", "init_args": {"numerator": 3}})
    Fraction(3, 1)
    """
    if isinstance(value, list):
        return [instantiated(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: instantiated(item) for key, item in value.items()}
    if "class_path" not in items:
        return items
    from lightning.pytorch.cli import instantiate_class  # needs jsonargparse, as what has read the file

    return instantiate_class((), items)


def probe_batches(probe: Iterable[Any] | dict[str, Any] | None, window: int) -> Iterable[Any] | None:
    """The batches of a probe; None if there is none.

    Raises:
        TypeError: they can be iterated over only once.
        ValueError: there is a window of several steps, too.
    """
    batches: Iterable[Any] | None = instantiated(probe) if isinstance(probe, dict) else probe
    if isinstance(batches, Iterator):
        raise TypeError("probe must be iterable more than once, as a DataLoader is; got an iterator.")
    if window > 1 and batches is not None:
        raise ValueError(f"window combines training batches and must be 1 when a probe is given; got {window}.")
    return batches


def drift_rows(drift: bool | int, *, has_probe: bool) -> int:
    """The number of rows that are compared, given that or True; 0 for False.

    Raises:
        ValueError: they are fewer than a row with its neighbours, or there is no probe.
    """
    if not isinstance(drift, int) or (not isinstance(drift, bool) and drift < NEIGHBORS + 2):
        raise ValueError(f"drift must be True, False, or a number of rows, {NEIGHBORS + 2} or more; got {drift!r}.")
    if drift and not has_probe:
        raise ValueError(
            f"drift compares the same rows at every measurement and needs a probe; got drift={drift!r} without one. "
            "Give probe=, fixed held-out batches, or leave drift out."
        )
    return NUM_ROWS if drift is True else int(drift)
