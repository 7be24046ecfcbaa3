"""The folder of a sweep: its layout, one Parquet file per checkpoint, and what is rebuilt from
these files.
"""

import json
import os
import platform
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from embedgeo.formatting import listed, write_csv
from embedgeo.glossary import DEFINITIONS
from embedgeo.layer_names import blocks_by_side
from embedgeo.results.events import EVENTS, write_events
from embedgeo.results.files import (
    digest,
    file_name,
    remove_leftovers,
    replacing,
    require_writable,
)
from embedgeo.results.parquet import (
    RECORD_COLUMNS,
    SCHEMA,
    TABLES,
    MonitoredRun,
    is_history,
    monitored_runs,
    read_metadata,
    read_records,
    read_table,
    to_records,
    today,
    write_parquet,
)
from embedgeo.results.records import Deviations, block_means, is_of_model, shared_files
from embedgeo.results.samples import LayerSample, sample_file, write_sample

_PACKAGES = ("embedgeo", "huggingface_hub", "lightning", "torch", "torchmetrics", "transformers")
_PARQUET = "[!.]*.parquet"
_TEXT = "[!.]*.txt"
_DERIVED = "derived_from"  # in the metadata of what is made of records
_KINDS = "tables"  # in the metadata of records: other files in the folder are not ours
_OWN_EVENTS = re.compile(rf"{re.escape(EVENTS)}\d{{12,}}\.(?P<name>.+)")


def drift_file(folder: Path, name: str) -> Path:
    """Path of the records of a checkpoint that need its saved sample and those of others."""
    return folder / "drift" / f"{name}.parquet"


class SweepFolder:
    """The results of a sweep on disk, complete at every moment; `open` makes the folder.

    - ``checkpoints/<name>.parquet``: the records of a checkpoint. Once the file exists, the
      checkpoint is done, unless it has failed since, with other weights.
    - ``<kind>/<name>.parquet``, where asked for: its tables, see `TABLES`. They are written before
      the records; so is ``samples/<name>.safetensors``, where asked for.
    - ``drift/<name>.parquet``: what ``embedgeo drift`` has found in the samples. They carry the
      digests of the records beside which it was found, and count as long as these are the same.
    - ``metrics.csv`` and ``tensorboard/<run>/``: the values, rebuilt from the records alone.
    - ``failed/<name>.txt``: why a checkpoint failed.
    - ``manifest.json``: the settings of the sweep.

    Several processes may write into one folder, each its own checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.failed = self.path / "failed"
        self.tensorboard = self.path / "tensorboard"
        self._manifest = dict[str, Any]()  # as it was read; it does not change

    def open(self, settings: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
        """Make the folder, with further ``entries`` in its manifest, or go on with one made with
        these settings.
        """
        manifest = self.require_settings(settings)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.checkpoints):
                require_writable(folder)
            inside = (*self.path.glob("[!.]*/"), *self.tensorboard.glob("[!.]*/"))
            remove_leftovers(self.path, *inside)
            if not manifest:
                manifest = {
                    "asked": dict(settings),
                    "date": today(),
                    "definitions": DEFINITIONS,
                    "versions": {"python": platform.python_version(), **versions()},
                    **entries,
                }
                with replacing(self.path / "manifest.json", keep=True) as temporary:
                    temporary.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise OSError(
                f"{self.path} must be a folder that can be written; it is not ({error})."
            ) from error
        self.require_settings(settings)  # another process may have made it meanwhile

    def require_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the folder is new, or was made with these settings, and write nothing.

        Returns the content of its ``manifest.json``, which is empty where there is none yet.
        """
        manifest = self.manifest()
        if not manifest:
            if self.done():
                raise ValueError(
                    f"a sweep folder holds results of one setting; {self.path} does not say which, "
                    "for its manifest.json is gone. Give another out."
                )
            inside = self.path.iterdir() if self.path.is_dir() else ()
            if any(not path.name.startswith(".") and path != self.checkpoints for path in inside):
                raise ValueError(
                    f"{self.path} must be a new folder or that of a sweep; it holds something else."
                )
            return manifest
        now = json.loads(json.dumps(dict(settings)))
        before = dict(manifest["asked"])
        before["definitions"], now["definitions"] = manifest.get("definitions", 1), DEFINITIONS
        # an option that one of them does not know changes nothing where it is not set
        different = [
            f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key) and (before.get(key) or now.get(key))
        ]
        if different:
            made_by = manifest.get("versions", {}).get("embedgeo", "unknown")
            raise ValueError(
                f"a sweep folder holds results of one setting; {self.path}, made by embedgeo "
                f"{made_by}, has others: {listed(different, 4)}. Give another folder."
            )
        return manifest

    def manifest(self) -> dict[str, Any]:
        """The content of ``manifest.json``; empty where there is none yet."""
        path = self.path / "manifest.json"
        if self._manifest or not path.exists():
            return self._manifest
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            dict(manifest["asked"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} must be a new folder or that of a sweep; {path} is none of a sweep's."
            ) from error
        self._manifest = manifest
        return manifest

    def done(self) -> set[str]:
        """Names of the checkpoints that are done, without those that were replaced and failed."""
        written = self.checkpoints.glob(_PARQUET)
        failed = self.failed.glob(_TEXT)
        return {path.stem for path in written} - {path.stem for path in failed}

    def read(self, name: str) -> pd.DataFrame:
        """The records of a checkpoint that is done."""
        path = self._file(name)
        if not len(records := read_records(path)):
            remedy = f"Removing it is safe: the next sweep measures {name} again."
            raise ValueError(
                f"{path} must hold the records of a checkpoint; it holds none. {remedy}"
            )
        return records

    def facts(self, name: str) -> dict[str, str]:
        """Facts about a checkpoint that is done, from `write`."""
        return read_metadata(self._file(name))

    def origin(self, names: Iterable[str]) -> dict[str, str]:
        """Digests of the records of checkpoints, as the metadata of what is derived from them."""
        return {_DERIVED: json.dumps({name: digest(self._file(name)) for name in names})}

    def shared_files(self) -> list[tuple[str, list[str]]]:
        """Weight files that checkpoints share which otherwise differ: see
        `records.shared_files`.
        """
        every = {name: self.facts(name).get("weight_files", "") for name in sorted(self.done())}
        return shared_files(
            {name: json.loads(digests) for name, digests in every.items() if digests}
        )

    def tables(self, kind: str) -> dict[str, Path]:
        """Files of the tables of one kind, by checkpoint."""
        return {path.stem: path for path in (self.path / kind).glob(_PARQUET)}

    def read_tables(self, name: str, wanted: Collection[str] = ()) -> dict[str, pd.DataFrame]:
        """The tables of a checkpoint that is done, by kind; those that are ``wanted`` have to be
        there.
        """
        kinds = sorted({*wanted, *self._kinds(name)})
        return {kind: read_table(self.path / kind / f"{name}.parquet") for kind in kinds}

    def with_means(self, checkpoints: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
        """Records of checkpoints, by name, and their means over blocks: see `with_means`."""
        files = self.tables("jackknife")
        return with_means(checkpoints.values(), [files.get(name) for name in checkpoints])

    def failures(self) -> dict[str, str]:
        """Reasons why checkpoints failed, by name."""
        return {path.stem: path.read_text().strip() for path in sorted(self.failed.glob(_TEXT))}

    def runs(self) -> dict[str, dict[str, pd.DataFrame]]:
        """The records of all checkpoints that are done, by training run and, in the order of steps,
        by checkpoint.

        A run has the name of its series, fit for a folder; a single series that of the model.
        Different models in one series are runs of their own; so is a final model beside steps.
        """
        frames = {
            name: pd.concat(map(read_records, self._measured_files(name)), ignore_index=True)
            for name in self.done()
        }
        checkpoints = {
            name: records
            for name, records in frames.items()
            if len(records) and self.facts(name).get("name", name) == name  # else it is a copy
        }
        first = {name: records.iloc[0] for name, records in checkpoints.items()}
        series = _series(
            checkpoints, {name: self.facts(name).get("model_class", "") for name in checkpoints}
        )
        models = {Path(each["model"]).name for each in first.values()}
        is_one = len(models) == len(set(series.values())) == 1
        titles = dict.fromkeys(series, models.pop()) if is_one else series
        of_steps = {own for name, own in series.items() if self._has_step(name)}
        runs: dict[str, dict[str, pd.DataFrame]] = {}
        for name in sorted(checkpoints, key=lambda name: (series[name], first[name]["step"], name)):
            own = first[name]
            end = "" if self._has_step(name) or series[name] not in of_steps else " final"
            records = checkpoints[name].assign(series=series[name] + end)
            if first.get(own["duplicate_of"], own)["weights_sha256"] != own["weights_sha256"]:
                records["duplicate_of"] = None  # the weights of that one have been replaced since
            runs.setdefault(file_name(titles[name] + end) or "other", {})[name] = records
        for of_run in runs.values():
            names = self.with_samples(of_run)
            for previous, name in pairwise(names):
                derived_from = _derived_from(drift_file(self.path, name))
                # one of these has come since
                if derived_from and not {names[0], previous} <= derived_from.keys():
                    of_run[name] = of_run[name][: len(read_records(self._file(name)))]
        return runs

    def with_samples(self, checkpoints: Mapping[str, pd.DataFrame]) -> list[str]:
        """Those of checkpoints that have a step and sampled rows; of several of one step, one."""
        of_steps = {
            records["step"].iloc[0]: name
            for name, records in checkpoints.items()
            if sample_file(self.path, name).exists() and self._has_step(name)
        }
        return [*of_steps.values()]

    def write(
        self,
        name: str,
        records: pd.DataFrame,
        tables: Mapping[str, pd.DataFrame] = MappingProxyType({}),
        facts: Mapping[str, str] = MappingProxyType({}),
        sample: Mapping[str, LayerSample] | None = None,
    ) -> None:
        """Write the tables and the sampled rows of a checkpoint, then its records, which makes it
        done.

        Facts are ``model_class``, by which models of one series are told apart; ``files``, by which
        a change of local weights is noticed; ``config``, the digest of ``config.json``;
        ``has_step``, "false" of a final model; ``weight_files``, the digests of several files of
        weights, by which one that others share is found; and what a report tells of the model.
        """
        # of earlier records, none may be left beside what belongs to these, and nothing of theirs
        own = (
            drift_file(self.path, name),
            sample_file(self.path, name),
            *(self.path / kind / f"{name}.parquet" for kind in {*TABLES, *self._kinds(name)}),
        )
        earlier = [path for path in own if path.exists()]
        if sample is not None or tables or earlier:
            self._file(name).unlink(missing_ok=True)
        for path in earlier:
            path.unlink()
        if sample is not None:
            write_sample(self.path, name, sample, records.iloc[0].to_dict())
            facts = {**facts, "sample_sha256": digest(sample_file(self.path, name))}
        for kind, table in tables.items():
            path = self.path / kind / f"{name}.parquet"
            write_parquet(path, table, TABLES.get(kind))
        facts = {**facts, _KINDS: "/".join(tables), "name": name}
        write_parquet(self._file(name), records, SCHEMA, facts)
        (self.failed / f"{name}.txt").unlink(missing_ok=True)

    def write_failure(self, name: str, reason: str) -> None:
        """Write down why a checkpoint failed, for people to read; the next run tries it again."""
        # the summary names it, too
        with suppress(OSError), replacing(self.failed / f"{name}.txt") as temporary:
            temporary.write_text(reason + "\n")

    def rebuild(self, *, csv: bool = True) -> None:
        """Bring ``tensorboard/`` and, unless it is to wait, ``metrics.csv`` up to date with the
        Parquet files; see `runs`.
        """
        with suppress(OSError):
            self.failed.rmdir()  # once it is empty
        seen: set[str] | None = None
        while (done := self.done()) != seen:  # other processes may finish checkpoints meanwhile
            seen = done
            runs = self.runs()
            if csv:
                with replacing(self.path / "metrics.csv") as temporary:
                    frames = [records for run in runs.values() for records in run.values()]
                    records = pd.concat(frames or [pd.DataFrame(columns=SCHEMA.names)])
                    write_csv(records, temporary, index=False)
            self._write_events(runs)

    def _write_events(self, runs: Mapping[str, Mapping[str, pd.DataFrame]]) -> None:
        """Write one event file per checkpoint: so what is done is also written, however often a
        sweep is killed.
        """
        wanted = dict[str, Path]()
        for run, checkpoints in runs.items():
            for name, records in checkpoints.items():
                step = int(records["step"].iloc[0])
                path = self.tensorboard / run / f"{EVENTS}{step:012d}.{name}"
                wanted[name] = path
                # an event file has the time of what it was made of, whatever the clocks say; less a
                # second for each record, for what is derived may be out of date
                changed = max(file.stat().st_mtime_ns for file in self._measured_files(name))
                changed -= 10**9 * len(records)
                if not path.exists() or path.stat().st_mtime_ns != changed:
                    with replacing(path) as temporary:
                        write_events(temporary, step, to_records(records))
                        os.utime(temporary, ns=(changed, changed))
        for path in list(self.tensorboard.rglob(f"{EVENTS}*")):
            own = _OWN_EVENTS.fullmatch(path.name)  # other writers' files have a time there
            name = own["name"] if own else ""
            if own and (wanted.get(name, path) != path or name not in self.done()):
                path.unlink(missing_ok=True)
                with suppress(OSError):  # it holds more
                    path.parent.rmdir()

    def _kinds(self, name: str) -> list[str]:
        """Kinds of the tables that were written with the records of a checkpoint, if it is done."""
        kinds = self.facts(name).get(_KINDS, "") if self._file(name).exists() else ""
        return [*filter(None, kinds.split("/"))]

    def _has_step(self, name: str) -> bool:
        return self.facts(name).get("has_step") != "false"

    def _file(self, name: str) -> Path:
        return self.checkpoints / f"{name}.parquet"

    def _measured_files(self, name: str) -> list[Path]:
        """The records of a checkpoint, and those of its drift as long as they are of these."""
        path = drift_file(self.path, name)
        derived_from = _derived_from(path)
        is_current = derived_from.keys() <= self.done() and all(
            digest(self._file(each)) == own for each, own in derived_from.items()
        )
        return [self._file(name), path] if derived_from and is_current else [self._file(name)]


def found_results(path: Path) -> SweepFolder | list[MonitoredRun]:
    """The sweep in a folder, with a warning where monitors' histories are, too; or else the
    monitored runs there, or that of a history itself.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no results.
    """
    if not path.is_dir() and not is_history(path):
        raise FileNotFoundError(f"results must be in folders of runs; {path} is none.")
    sweep = SweepFolder(path)
    if sweep.done():
        if histories := sorted(file.name for file in path.glob("history.*parquet")):
            warnings.warn(
                "a folder is read as a sweep's or as a monitored run's; "
                f"{path} is both, and {listed(histories)} is not read. Give that file itself.",
                stacklevel=3,
            )
        return sweep
    if runs := monitored_runs(path):
        return runs
    raise ValueError(
        "results are in the folder of a sweep (checkpoints/*.parquet) or of a monitored run "
        f"(history.parquet); {path} holds no measurements of these kinds."
    )


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {name: version(name) for name in _PACKAGES if find_spec(name)}


def with_means(
    checkpoints: Iterable[pd.DataFrame], jackknife: Iterable[Path | None] = ()
) -> pd.DataFrame:
    """Records of several measurements without means over blocks, and these, with their standard
    errors where there is a file of deviations.
    """
    frames = [*checkpoints]
    means = list[dict[Any, Any]]()
    for frame, path in zip_longest(frames, jackknife):
        of_blocks = block_means(to_records(frame), deviations=_deviations(path))
        shared: Any = frame[frame.columns.difference([*RECORD_COLUMNS])].iloc[0].to_dict()
        means += [shared | each for each in of_blocks]
    return pd.concat([*frames, pd.DataFrame(means)] if means else frames, ignore_index=True)


def _deviations(path: Path | None) -> Deviations:
    """Those in a table of kind ``jackknife``."""
    table = pd.DataFrame() if path is None else read_table(path)
    groups: Any = table.groupby(["layer", "metric"])["deviation"] if len(table) else ()
    return {key: deviations.tolist() for key, deviations in groups}


def _derived_from(path: Path) -> dict[str, str]:
    """Digests of the records that a file was derived from, by checkpoint; empty without one."""
    metadata = read_metadata(path) if path.exists() else {}
    digests: dict[str, str] = json.loads(metadata.get(_DERIVED, "{}"))
    return digests


def _series(checkpoints: Mapping[str, pd.DataFrame], classes: Mapping[str, str]) -> dict[str, str]:
    """The series of each checkpoint; where a series has several models, with their classes, if
    known, and shapes.
    """
    names_of: dict[str, list[str]] = {}
    for name, records in checkpoints.items():
        names_of.setdefault(str(records["series"].iloc[0]), []).append(name)
    series = {}
    for own, names in names_of.items():
        models = {name: _shape(checkpoints[name]) for name in names}
        if len({classes[name] for name in names} - {""}) > 1:
            models = {name: f"{classes[name]} {shape}" for name, shape in models.items()}
        are_several = len(set(models.values())) > 1
        series.update(
            {name: f"{own} {models[name]}".strip() if are_several else own for name in names}
        )
    return series


def _shape(records: pd.DataFrame) -> str:
    """Width and depth of the model, as its records have them."""
    layers = records[~is_of_model(records)].drop_duplicates("layer")
    widths = layers.set_index("layer")["width"]
    blocks = [*chain.from_iterable(blocks_by_side(widths.index).values())] or [*widths.index]
    return f"{widths[blocks].max()} wide, {len(blocks)} deep"
