"""A sweep with its settings as keywords: run here, or as arguments of the command."""

from pathlib import Path

from embedgeo.sweep import SweepSettings, sweep as swept


def sweep(model, **options):
    """Paths may be given for strings."""
    given = {"model": model, **options}
    return swept(
        SweepSettings(**{k: str(v) if isinstance(v, Path) else v for k, v in given.items()})
    )


def command(model, options):
    named = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    return ["sweep", "--model", model, *named]
