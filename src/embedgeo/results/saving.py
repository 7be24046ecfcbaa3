"""The folder of a sweep, written by hand: one checkpoint after the other."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from embedgeo.results.files import file_name
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd


def checkpoint_name(model: Any, step: Any) -> str:
    """Name of a checkpoint that stands in the names of its files."""
    if not isinstance(model, str) or not model:
        raise ValueError(f"model must be a name, such as the repository's; got {model!r}.")
    if step is not None and not (type(step) is int and step >= 0):
        raise ValueError(
            f"step must be an int, of optimizer steps, 0 or more, or None for none; got {step!r}."
        )
    name = model if step is None else f"{model}--step{step}"
    return file_name(name.replace("/", "--"))


def write_checkpoint(
    folder: str | PathLike[str],
    settings: Mapping[str, Any],
    name: str,
    model: str,
    step: int | None,
    records: Sequence[Record],
    tables: "Mapping[str, pd.DataFrame]",
    facts: Mapping[str, str],
    samples: Mapping[str, LayerSample] | None,
) -> None:
    """Write the results of a model into a new folder, or beside other models' and steps' of the
    same settings.
    """
    from embedgeo.results.folder import SweepFolder
    from embedgeo.results.parquet import to_frame

    out = SweepFolder(folder)
    out.open(settings, {})
    revision = "main" if step is None else f"step{step}"
    if name in out.done():
        before = out.read(name).iloc[0]
        # ``a/b`` and ``a--b`` share a name
        if (before["model"], before["revision"]) != (model, revision):
            raise ValueError(
                f"a folder holds one checkpoint of a name; {name} in {out.path} is "
                f"{before['revision']} of {before['model']}. Give another model, or another folder."
            )
        warnings.warn(
            f"save replaces {name}, which {out.path} has already. To keep both, give another "
            f"model, step or folder.",
            stacklevel=3,
        )
    origin = {
        "model": model,
        "revision": revision,
        "step": step or 0,
        "commit": "",
        "series": model,
    }
    frame = to_frame(records, **origin, weights_sha256="", duplicate_of=None)
    out.write(name, frame, tables, facts, samples)
    out.rebuild()
