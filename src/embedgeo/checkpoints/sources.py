"""Sources of checkpoints: repositories on the Hub and local folders, one or several."""

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.files import (
    Contents,
    StoredFile,
    hashed_file,
    have_same_weights,
    needed_files,
    other_format,
    stored_step,
    stored_values,
)
from embedgeo.formatting import listed
from embedgeo.results.files import file_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from embedgeo.checkpoints.loading import DeviceMap, ModelClass

_STEP = re.compile(
    r"(?<![a-z])(?:(?:global[_-]?)?steps?|iter(?:ation)?s?|checkpoint|ckpt)[-_=]?"
    r"(?P<number>\d+(?:\.\d+(?=[km]))?)(?P<unit>[km]?)(?![a-z0-9])"
    r"(?![^a-z\d]\d(?![\d.]*[mbt]t?(?![a-z0-9])))",  # of two numbers neither is known to be it
    re.IGNORECASE,
)
# a number in m or b is the model's size, unless "tokens" or a t is beside it, or a step in k before
_TOKENS = re.compile(
    r"(?:(?<=\dk)[-_]|[-_]tokens?[-_]?|[-_](?=[\d.]+(?:[mb]?t|[mb][-_]tokens?)))"
    r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[mbt])t?(?![a-z0-9])",
    re.IGNORECASE,
)
_SAYS_STEP = re.compile("step|iter", re.IGNORECASE)  # the file may hold another one
# Lightning's file names count both
_EPOCH = re.compile(r"(?:epoch|(?<![a-z])ep)[-_=]?\d+[-_]?|[-_]ep(?:och)?[-_=]?\d+$", re.IGNORECASE)
_LIKE_STEP = re.compile(
    r"(?<![a-z])(?:it|ba|ep|(?:steps?|iter(?:ation)?s?|batch|update|checkpoint|ckpt|epoch|tokens?)"
    r"[^a-z\d]{0,3})\d|^\d+$|(?:^|[-_])\d[\d.]*[kmbt]t?$"  # and tokens alone, as 100B
    r"|\d[kmbt]?[^a-z\d]?(?:token|step|iter(?:ation)?|epoch)s?(?![a-z])",
    re.IGNORECASE,
)
# state dicts, unless they are those of an optimizer and the like
_STATES = (".pt", ".pth")
_NO_WEIGHTS = re.compile(r"optim|sched|rng|scaler|training_args", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)

UNREADABLE = -1
"""The step of a Lightning file that does not name one and from which none can be read: its contents
fail.
"""

Steps = str | int | Sequence[int]
"""``"all"``, ``"log"``, ``"final"``, or the steps themselves: a number, ``"0,1,2,512"`` or a list.
"""


class Position(NamedTuple):
    """Place of a checkpoint in its training run."""

    # optimizer steps taken, or the number of the checkpoint if its publisher counts these instead
    step: int
    tokens: int | None  # tokens seen, if the name contains them
    series: str  # the name without both, which checkpoints of one training run have in common


def parse_position(name: str) -> Position | None:
    """Step and tokens seen in the name of a revision, repository, folder or file; None if there is
    no step in it.
    """
    matches = list(_STEP.finditer(name))
    if not matches:
        return None
    match = max(matches, key=lambda m: ("step" in m[0].lower(), "iter" in m[0].lower(), m.start()))
    after = name[match.end() :]
    if tokens := _TOKENS.search(name, match.end()):
        after = name[match.end() : tokens.start()] + name[tokens.end() :]
    series = _EPOCH.sub("", name[: match.start("number")] + after)
    return Position(_amount(match), tokens and _amount(tokens), series)


def _amount(match: re.Match[str]) -> int:
    return round(float(match["number"]) * _UNITS[match["unit"].lower()])


def select_steps(existing: Iterable[int], steps: Steps) -> set[int]:
    """Select steps among those that exist: ``"log"`` takes the first, the last, and those nearest
    to powers of two.
    """
    available = sorted(set(existing))
    if steps in ("all", "final"):
        return set(available)
    if steps == "log":
        positive = [step for step in available if step > 0]
        powers = [2**k for k in range(max(positive, default=0).bit_length())]
        nearest = {_nearest(positive, power, scale=math.log) for power in powers}
        return {*available[:1], *nearest, *available[-1:]}
    parts = str(steps).split(",") if isinstance(steps, str | int) else steps
    try:
        wanted = {int(part) for part in parts}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'steps must be "all", "log", "final", or steps such as 0,1,2,512; got {steps!r}.'
        ) from error
    if unknown := sorted(wanted - set(available)):
        near = sorted({_nearest(available, step) for step in unknown}) if available else []
        raise ValueError(
            f"steps must name steps of which there is a checkpoint; got {listed(unknown)}. "
            f"{f'The nearest are {listed(near)}' if near else 'There are none'}; --steps all takes "
            f"{len(available)}."
        )
    return wanted


def _nearest(available: Sequence[int], step: int, scale: Callable[[int], float] = float) -> int:
    return min(available, key=lambda candidate: abs(scale(candidate) - scale(step)))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training run that is not loaded yet; or a final model.

    Attributes:
        name: unique among the checkpoints that are listed together, and valid as a file name.
        model: the repository, or the local folder as it was given.
        revision: branch or tag; of a local checkpoint, the name of its folder, file or link.
        position: the step, the tokens seen and the series, as the name has them.
        commit: that the revision points to; empty for a local checkpoint.
        path: the folder or file; None for a checkpoint on the Hub.
        has_step: false for a final model, which is at step 0.
        contents: its files with their digests; None where they cannot be listed.
        weights_sha256: digest of the weights, `Contents.sha256`; empty where it is unknown, as
            of local ones before `hashed`.
        weights_state: sizes and times of local weight files, which change with them.
        duplicate_of: name of an earlier checkpoint with the same weights and ``config.json``; None
            if there is none.
        error: why the files cannot be listed; empty where they are.
        model_class: what makes the model of a file: see `iter_checkpoints`.
        trust_remote_code: whether code that comes with the model is run: see `iter_checkpoints`.
        cache: folder that files are downloaded to; None: the Hugging Face cache.
    """

    name: str
    model: str
    revision: str
    position: Position
    commit: str = ""
    path: Path | None = None
    has_step: bool = True
    contents: Contents | None = None
    weights_sha256: str = ""
    weights_state: str = ""
    duplicate_of: str | None = None
    error: str = ""
    model_class: "ModelClass | None" = None
    trust_remote_code: bool | None = None
    cache: Path | None = None

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.position.step

    @property
    def original(self) -> str:
        """Name of the first checkpoint that it is a duplicate of, which may be itself."""
        return self.duplicate_of or self.name

    def fetch(self) -> Path:
        """The folder or file of the checkpoint, downloaded if need be.

        Downloaded weights have the digests that the Hub lists.

        Raises:
            OSError: the Hub does not answer, or gives other files.
            ValueError: the files of the checkpoint cannot be listed.
        """
        if self.error:
            raise ValueError(f"{self.name} cannot be read: {self.error}")
        if self.path is not None:
            return self.path
        contents = self.contents or self.read_contents()
        return hub.fetch(self.model, self.commit, contents, self.cache)

    def load(
        self,
        dtype: "torch.dtype | None" = None,
        device: "str | torch.device" = "cpu",
        *,
        device_map: "DeviceMap | None" = None,
        offload_folder: Path | None = None,
    ) -> "nn.Module":
        """Load the model in evaluation mode; its files are downloaded if need be.

        Args:
            dtype: of the weights; default: float32.
            device: that the model is moved to.
            device_map: spreads the model over devices, as for `embedgeo.sweep.SweepSettings`, in
                place of ``device``.
            offload_folder: for weights that a ``device_map`` puts on disk.

        Returns:
            A Hugging Face model; without its head, where the checkpoint has none. Of a file, what
            ``model_class`` makes.

        Raises:
            OSError: the Hub does not answer, or gives other files.
            ValueError: files are damaged, or saved over since they were listed; weights are missing
                or misshapen; or code that comes with the model is needed and not trusted.
        """
        from embedgeo.checkpoints import loading  # which imports torch and transformers

        path = self.fetch()
        if path.is_file():
            assert self.model_class is not None
            loaded = loading.load_file(path, self.model_class, dtype=dtype).to(device)
            self.require_step()
            return loaded
        model = loading.load_model(
            path,
            self.contents or self.read_contents(),
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
            device_map=device_map,
            offload_folder=offload_folder,
        )
        return model.to(device) if device_map is None else model

    def require_step(self) -> None:
        """Check that a file still holds the step that it was listed with: a run that goes on saves
        its latest checkpoint over.
        """
        step = self.step
        path = self.path
        if path is not None and not (_SAYS_STEP.search(path.stem) and _named_position(path)):
            with suppress(ValueError):  # a folder holds none, nor need a file
                step = stored_step(path)
        if step != self.step:
            raise ValueError(
                f"a file must be loaded as it was listed; {self.name} was of step {self.step}, and "
                f"has been saved over with step {step}. Sweep again."
            )

    def hashed(self) -> "Checkpoint":
        """The checkpoint with the digest of its weights, which are read where it is unknown."""
        if self.path is None or self.weights_sha256 or self.error:
            return self
        contents = self.read_contents()
        return replace(self, contents=contents, weights_sha256=contents.sha256)

    def read_contents(self, *, with_hashes: bool = True) -> Contents:
        """The files to load with their hashes, which the Hub lists and which are computed for local
        files; of local weights only if asked for.
        """
        with_code = bool(self.trust_remote_code)
        if self.path is None:
            files = hub.list_files(self.model, self.commit)
            return needed_files(files, with_code=with_code)
        if self.step == UNREADABLE:
            stored_step(self.path)
        weights, others = local_files(self.path, with_code=with_code)
        listed = (StoredFile(path.name, path.stat().st_size, "") for path in weights)
        return Contents(
            tuple(map(hashed_file, weights) if with_hashes else listed),
            tuple(map(hashed_file, others)),
        )

    def read_weights_state(self) -> str:
        """Sizes and times of local weight files, which change when these are replaced; empty on the
        Hub.
        """
        if self.path is None:
            return ""
        stats = {path.name: path.stat() for path in local_files(self.path)[0]}
        return json.dumps(
            {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()}
        )


def local_files(path: Path, *, with_code: bool = False) -> tuple[list[Path], list[Path]]:
    """The weights of a local checkpoint, and the other files that are needed."""
    if path.is_file():
        return [path], []
    files = (
        StoredFile(p.name, p.stat().st_size, "")
        for p in path.iterdir()
        if p.is_file() or p.name.startswith("pytorch_model_fsdp_")  # named with its remedy
    )
    needed = needed_files(files, with_code=with_code)
    return [path / file.name for file in needed.weights], [
        path / file.name for file in needed.others
    ]


def is_local(model: str) -> bool:
    """Tell a folder or file from a repository."""
    return os.path.exists(os.path.expanduser(model))


def require_source(name: str, source: str) -> None:
    """Check that an argument may name something: a path that exists, or else what a repository can
    be called.
    """
    if not is_local(source) and not _REPOSITORY.fullmatch(source):
        raise ValueError(
            f"{name} must be a local path that exists or a repository on the Hub, author/name of "
            f"at most 96 letters each; got {source[:200]!a}."
        )


def list_checkpoints(
    model: str | Sequence[str], revisions: str = "*", *, final: bool = False
) -> list[Checkpoint]:
    """List the checkpoints of models, sorted by series and step.

    ``final`` takes the branch ``main`` of a repository and a folder that is itself a model; of
    others the last step of each series.
    """
    models = [model] if isinstance(model, str) else list(model)
    folders = [_absolute(name).name for name in models if is_local(name)]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"folders must differ in their names, by which their results are kept apart; "
            f"{listed(models)} do not. "
            "Give links to them under other names, or sweep each into an out of its own."
        )
    checkpoints: list[Checkpoint] = []
    for name in models:
        of_model = _list_model(name, revisions, is_only=len(models) == 1)
        of_steps = [c for c in of_model if c.has_step]
        of_none = [c for c in of_model if not c.has_step]
        if final:
            of_steps = list(
                {c.position.series: c for c in sorted(of_steps, key=lambda c: c.step)}.values()
            )
        elif of_steps and any(c.path for c in of_none):
            warnings.warn(
                f"{name}: left out the model in the folder itself, for there are checkpoints of "
                "steps. Measure it by --steps final in another sweep.",
                stacklevel=2,
            )
        checkpoints += (of_none or of_steps) if final else (of_steps or of_none)
    checkpoints.sort(key=lambda c: (c.position.series, c.step, c.name))
    _require_distinct(checkpoints)
    if not final:
        _warn_of_single(checkpoints)
    return checkpoints


def _list_model(model: str, revisions: str, is_only: bool) -> list[Checkpoint]:
    if is_local(model):
        if revisions != "*":
            raise ValueError(
                f"revisions chooses branches and tags on the Hub; {model} is local. Use steps for "
                f"folders."
            )
        return list(_list_folder(model, is_only))
    require_source("model", model)
    checkpoints = [*_list_repository(model, revisions, is_only)]
    if not checkpoints:
        among = "" if revisions == "*" else f" among the revisions that match {revisions!r}"
        raise FileNotFoundError(
            "model must have a branch main, or branches or tags that name steps, such as "
            f"step1000; {model} has none{among}."
        )
    return checkpoints


def _list_repository(repository: str, revisions: str, is_only: bool) -> Iterator[Checkpoint]:
    own = "" if is_only else repository.replace("/", "--")
    commits = {
        name: c
        for name, c in hub.list_revisions(repository).items()
        if fnmatchcase(name, revisions)
    }
    positions = {name: position for name in commits if (position := parse_position(name))}
    others = commits.keys() - positions.keys() - {revisions}
    _warn_of_others(repository, filter(_LIKE_STEP.search, others))
    for name, position in positions.items():
        own_position = position._replace(series=_with_model(own, position.series))
        yield Checkpoint(
            file_name(_with_model(own, name)), repository, name, own_position, commits[name]
        )
    name = "main" if "main" in commits else revisions  # one that is named exactly
    if name in commits and name not in positions:
        named = None if positions else parse_position(repository.rpartition("/")[2])
        position = named or Position(0, None, own)
        yield Checkpoint(
            file_name(_with_model(own, name)),
            repository,
            name,
            position,
            commits[name],
            has_step=named is not None,
        )


def _list_folder(model: str, is_only: bool) -> Iterator[Checkpoint]:
    """The checkpoints of steps in a folder, and the folder itself where it is a model of no
    step.
    """
    folder = _absolute(model)
    own = "" if is_only else folder.name
    place = folder
    inside = folder / "checkpoints"
    if _like_checkpoints(inside):
        if beside := _like_checkpoints(folder):
            raise ValueError(
                f"checkpoints must be in one folder; {model} has checkpoints, and beside this "
                f"folder {listed(beside)}. Give {inside}, or move all into one folder."
            )
        place = inside  # of a Lightning logger's folder of a run
    is_model = (place / "config.json").is_file() and _has_weights(place)
    # beside a checkpoint's weights, DeepSpeed keeps its optimizer in a folder of the same step
    hidden = (".", "global_step") if is_model else "."
    candidates = (
        [folder]
        if folder.is_file()
        else sorted(
            p
            for p in place.iterdir()
            if (p / "config.json").is_file() or not p.name.startswith(hidden)
        )
    )
    paths = [
        p
        for p in candidates
        if p.is_dir() or p.suffix == ".ckpt" or (_is_state(p) and not is_model)
    ]
    known = _with_unnamed(paths, _named_positions(model, paths))
    positions = {path: position for path, position in known.items() if position}
    if not positions and (folder / "config.json").is_file():
        itself = folder if parse_position(folder.name) else folder.resolve()
        if position := parse_position(itself.name):
            positions[itself] = position
    if not positions and len(states := list(filter(_is_state, paths))) == 1:
        folder = states[0]
    is_final = _is_final(folder, positions)
    if is_final:
        positions.pop(folder, None)
    elif not positions:
        raise FileNotFoundError(
            "model must be a folder with config.json, a .ckpt, .pt or .pth file, or a folder of "
            "checkpoints with their steps in their names, such as step1000 or step=1000.pt; "
            f"{model} is none of these."
            f"{other_format(p.name for p in candidates) or ' Of a folder of models, name each.'}"
        )
    _warn_of_others(
        model,
        [p.name for p in candidates if p not in (*known, folder) and _is_like_one(p, is_model)],
    )
    for path, position in positions.items():
        series = _with_model(own, "" if path.is_file() else position.series)
        name = file_name(_with_model(own, path.name))
        yield Checkpoint(name, model, path.name, position._replace(series=series), path=path)
    if is_final:
        position = Position(0, None, own)
        yield Checkpoint(
            file_name(folder.name), model, folder.name, position, path=folder, has_step=False
        )


def _is_state(path: Path) -> bool:
    """Tell a file that may be a state dict of a model from others."""
    return path.suffix in _STATES and path.is_file() and not _NO_WEIGHTS.search(path.name)


def _like_checkpoints(place: Path) -> list[str]:
    """Folders and files that may be meant as checkpoints, in a folder."""
    is_model = (place / "config.json").is_file()
    return sorted(
        p.name
        for p in (place.iterdir() if place.is_dir() else ())
        if (p.is_dir() or p.suffix in (".ckpt", *_STATES)) and _is_like_one(p, is_model)
    )


def _is_like_one(path: Path, is_in_model: bool) -> bool:
    """Tell what may be meant as a checkpoint; files and folders inside a model, by a step alone."""
    if _NO_WEIGHTS.search(path.name):
        return False
    is_weights = path.suffix.lower() in (".ckpt", *_STATES, ".safetensors")
    is_one = not is_in_model and (is_weights or (path / "config.json").is_file())
    return is_one or bool(_LIKE_STEP.search(path.name if path.is_dir() else path.stem))


def _named_position(path: Path) -> Position | None:
    """The position in the name of a folder or file."""
    return parse_position(path.stem if path.suffix in (".ckpt", *_STATES) else path.name)


def _named_positions(model: str, paths: Iterable[Path]) -> dict[Path, Position]:
    """Positions in names of folders and files. A number after "checkpoint" or "ckpt" may be that of
    an epoch: the step that a file holds takes its place.
    """
    positions: dict[Path, Position] = {}
    differing = []
    for path in paths:
        if position := _named_position(path):
            says_step = path.is_dir() or _SAYS_STEP.search(path.stem)
            try:
                if (step := stored_step(path)) != position.step:
                    differing.append(f"{path.name} ({step})")
                    position = position if says_step else position._replace(step=step)
            except ValueError:  # of a folder, or of what fails when it is loaded
                differing += [] if says_step else [f"{path.name} (none)"]
            positions[path] = position
    if differing:
        warnings.warn(
            f"{model}: other steps than in their names are stored in {listed(differing)}. A number "
            "after step or iter in a name is taken, else the step that is stored, if there is one.",
            stacklevel=2,
        )
    return positions


def _with_unnamed(
    paths: Sequence[Path], named: Mapping[Path, Position]
) -> dict[Path, Position | None]:
    """Positions also of files with no step in their name, as ``last.ckpt``, unless another one has
    their step; None where that has their weights, too. A state dict need not say its step.
    """
    owners = {position.step: path for path, position in named.items()}
    positions: dict[Path, Position | None] = {**named}
    for path in paths:
        if path.is_file() and path not in named:
            try:
                step = stored_step(path)
            except ValueError:
                if path.suffix not in _STATES:
                    positions[path] = Position(UNREADABLE, None, "")
                continue
            if (owner := owners.setdefault(step, path)) is path:
                positions[path] = Position(step, None, "")
            elif owner.is_file() and have_same_weights(owner, path):
                positions[path] = None
    return positions


def _is_final(folder: Path, positions: Mapping[Path, Position]) -> bool:
    """Tell a folder or file that is itself a model, and not one of the steps that were found."""
    if folder.is_file():
        if folder.suffix in _STATES:
            return folder not in positions
        if folder in positions and positions[folder].step == UNREADABLE:
            with suppress(ValueError, TypeError):
                return "state_dict" in stored_values(folder)
        return False
    if {folder, folder.resolve()} & positions.keys() or not (folder / "config.json").is_file():
        return False
    return not positions or _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    """Tell a folder that is a model from one where a configuration is beside checkpoints."""
    try:
        local_files(folder)
    except FileNotFoundError:
        return False
    except ValueError:
        pass  # it is named when it is read
    return True


def _require_distinct(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that each step of a series is there once, and each final model."""
    for (_, step), places in groupby(checkpoints, lambda c: (c.position.series, c.step)):
        group = list(places)
        if len(group) == 1 or step == UNREADABLE:
            continue
        names = listed([c.path or (c.name if c.has_step else c.model) for c in group])
        if not all(c.has_step for c in group):
            raise ValueError(
                "models must differ in their names, by which their results are kept apart; "
                f"{names} do not. Give each once, and links to folders under other names."
            )
        raise ValueError(
            f"a step must be named once; {names} all name step {step}. Choose by --revisions on "
            "the Hub; of a folder move all but one of them to another folder."
        )


def _absolute(model: str) -> Path:
    """The path of a folder or file under the name that was given: links are not followed."""
    return Path(os.path.abspath(Path(model).expanduser()))


def _with_model(model: str, name: str) -> str:
    """A name with that of its model before it, where several models are listed together."""
    return f"{model}--{name}" if model else name


def _warn_of_single(checkpoints: Sequence[Checkpoint]) -> None:
    """Warn of runs of one checkpoint among others of its model, or that was given by itself."""
    counts = Counter(key for c in checkpoints for key in (c.position.series, Path(c.model)))
    single = [
        c.name
        for c in checkpoints
        if counts[c.position.series] == 1
        and (counts[Path(c.model)] > 1 or _named_position(Path(c.model)))
    ]
    if len(checkpoints) > 1 and single:
        warnings.warn(
            f"runs of one checkpoint each: {listed(single)}. Those of one run are in one folder, "
            "which is given as the model, or in one repository, and their names differ in step and "
            "tokens alone.",
            stacklevel=2,
        )


def _warn_of_others(model: str, names: Iterable[str]) -> None:
    """Warn of what may be meant as a checkpoint, and is not taken."""
    if left_out := [*map(repr, sorted(names))]:
        warnings.warn(
            f"{model}: left out {listed(left_out, 20)}. A checkpoint is a folder, or a .ckpt, .pt "
            "or .pth file, in whose name one step is read that no other has, such as step1000, "
            "checkpoint-1000 or epoch=1-step=1000. Rename these to have them measured, or give one "
            "on the Hub as --revisions.",
            stacklevel=2,
        )
