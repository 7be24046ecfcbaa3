"""What is named by the place it is imported from."""

import os
import sys
from importlib import import_module
from typing import Any


def import_named(name: str) -> Any:
    """Import ``package.module.name``; modules in the working directory are found, too.

    Raises:
        Exception, SystemExit: there is nothing of this name, or its module fails or exits when it is imported.

    >>> import_named("fractions.Fraction")(3)
    Fraction(3, 1)
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, attribute = name.rpartition(".")
    return getattr(import_module(module_name), attribute)
