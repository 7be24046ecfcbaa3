"""A monitor's probe from a configuration file."""

from typing import Any


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
