"""Where the tokenizers of a sweep's models come from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from embedgeo.checkpoints import hub, is_local, loading
from embedgeo.checkpoints.files import TOKENIZER_FILES, VOCABULARIES, StoredFile, hashed_file
from embedgeo.results.wording import listed, reason
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.settings import SweepSettings

Identity = tuple[str, ...]
"""The kind of a tokenizer, and the names and hashes of its files."""


class MissingTokenizerError(ValueError):
    """A model has no files of a tokenizer."""


class Found(NamedTuple):
    """A tokenizer, and what tells it from others."""

    tokenizer: PreTrainedTokenizerBase
    identity: Identity


def find_tokenizers(
    models: Mapping[str, Sequence[Planned]], settings: SweepSettings, folder: Path
) -> tuple[dict[str, Found], list[str]]:
    """The tokenizer of each model, and sentences about models that have none and so get that of the first other one.

    Args:
        models: the checkpoints of each.
        settings: of the sweep.
        folder: files are fetched into it.

    Raises:
        ValueError: there is none, or one does not load.
    """
    found: dict[str, Found] = {}
    missing: list[MissingTokenizerError] = []
    by_files: dict[tuple[StoredFile, ...], Found] = {}  # as listed, so that they need not be fetched
    for model, plan in models.items():
        files = () if settings.tokenizer else _listed_files(plan)
        try:
            found[model] = by_files.get(files) or find_tokenizer(plan, settings, folder)
            if files:
                by_files[files] = found[model]
        except MissingTokenizerError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    lender = next(iter(found))
    without = [model for model in models if model not in found]
    lines = [f"{model} has no tokenizer: that of {lender} is used; name another by tokenizer=" for model in without]
    return {model: found.get(model, found[lender]) for model in models}, lines


def find_tokenizer(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> Found:
    """The tokenizer asked for, else that of the first checkpoint that has one, else that of ``main`` or of the folder.

    Raises:
        MissingTokenizerError: there is none.
        ValueError: it does not load.
    """
    tried: list[str] = []
    kind: type[ValueError] = MissingTokenizerError
    for source, locate in _tokenizer_sources(plan, settings, folder):
        try:
            path = locate()
            tokenizer = loading.load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
            return Found(tokenizer, _identity(tokenizer, path))
        except Exception as error:
            tried.append(f"{source} ({reason(error)})")
            if not isinstance(error, FileNotFoundError) or settings.tokenizer is not None:
                kind = ValueError
    models = listed(list(dict.fromkeys(planned.checkpoint.model for planned in plan)))
    found = f"none loads: {'; '.join(tried)}" if tried else f"{models} has no files of one, nor have its checkpoints"
    raise kind(
        f"a tokenizer must come from tokenizer=, the checkpoints or main; {found}. Name a folder, a repository or a "
        "tokenizer.json by tokenizer=."
    )


def _listed_files(plan: Sequence[Planned]) -> tuple[StoredFile, ...]:
    """The files of the first checkpoint's own tokenizer and ``config.json``, which may tell its kind.

    Empty where it has none, or they are not listed.
    """
    files = () if plan[0].contents is None else plan[0].contents.others
    return files if any(file.name in VOCABULARIES for file in files) else ()


def _identity(tokenizer: PreTrainedTokenizerBase, path: Path) -> Identity:
    files = [path] if path.is_file() else sorted(path / name for name in TOKENIZER_FILES if (path / name).is_file())
    return type(tokenizer).__name__, *(f"{file.name} {hashed_file(file).digest}" for file in files)


def _tokenizer_sources(
    plan: Sequence[Planned], settings: SweepSettings, folder: Path
) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Where a tokenizer may come from, and what returns the folder with its files."""
    if settings.tokenizer is not None:
        yield settings.tokenizer, partial(_tokenizer_of, settings.tokenizer, folder)
        return
    owner = next((planned for planned in plan if VOCABULARIES & set(_file_names(planned))), None)
    if owner is not None:
        yield owner.name, partial(small_files, owner, _of_tokenizer(_file_names(owner)), folder)
    for model in dict.fromkeys(planned.checkpoint.model for planned in plan):
        if not is_local(model):
            yield f"main of {model}", partial(_tokenizer_of, model, folder)
        elif VOCABULARIES & {path.name for path in Path(model).expanduser().glob("*")}:
            yield model, partial(_tokenizer_of, model, folder)


def _tokenizer_of(source: str, folder: Path) -> Path:
    """A local folder or file itself; of a repository, the files of its branch ``main``, fetched into ``folder``."""
    if is_local(source):
        return Path(source).expanduser()
    commit = hub.list_revisions(source).get("main")
    if commit is None:
        raise FileNotFoundError(f"{source} has no branch main")
    names = _of_tokenizer(file.name for file in hub.list_files(source, commit))
    if not VOCABULARIES & set(names):
        raise FileNotFoundError("it has no files of a tokenizer")
    return hub.fetch_small(source, commit, names, folder)


def _of_tokenizer(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in TOKENIZER_FILES or name == "config.json"]


def _file_names(planned: Planned) -> list[str]:
    path = planned.checkpoint.path
    if path is None:
        return [] if planned.contents is None else [file.name for file in planned.contents.files]
    return [file.name for file in path.glob("*")]


def small_files(planned: Planned, names: Sequence[str], folder: Path) -> Path:
    """The checkpoint's own folder or file; of one on the Hub, some of its files, fetched into ``folder``."""
    checkpoint = planned.checkpoint
    return checkpoint.path or hub.fetch_small(checkpoint.model, checkpoint.commit, names, folder)
