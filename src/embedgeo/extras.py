"""Optional packages: the modules of each extra, and the error where one is missing."""

from importlib.util import find_spec

EXTRA_MODULES = {
    "accelerate": ("accelerate", "transformers"),
    "datasets": ("datasets",),
    "ray": ("ray",),
    "report": ("jinja2", "matplotlib", "pandas", "PIL", "pyarrow", "rich", "safetensors", "scipy"),
    "sweep": (
        "filelock",
        "huggingface_hub",
        "pandas",
        "pyarrow",
        "rich",
        "safetensors",
        "sentencex",
        "tokenizers",
        "transformers",
    ),
}
"""Modules that are imported of an extra, beside `COMMAND_MODULES`."""

COMMAND_MODULES = ("docstring_parser", "jsonargparse", "safetensors", "yaml")
"""Modules that every command imports."""

_PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}
"""Names that pip knows of modules that have another one."""


def require_extra(extra: str, purpose: str, *modules: str) -> None:
    """Raise ImportError, with the command that installs them, if packages are missing; none is
    imported.

    The extra is one of this package, as ``report``, or several, as ``report,sweep``, whose modules
    are the default.
    """
    wanted = modules or [module for each in extra.split(",") for module in EXTRA_MODULES[each]]
    missing = [
        _PACKAGES.get(module, module)
        for module in dict.fromkeys(wanted)
        if not _is_installed(module)
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{purpose} needs {', '.join(missing)}, which {verb} not installed: pip install "
            f"'embedgeo[{extra}]'"
        )


def _is_installed(module: str) -> bool:
    spec = find_spec(module)
    # a folder of that name is none, such as one of data sets
    return spec is not None and spec.origin is not None
