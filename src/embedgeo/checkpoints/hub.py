"""The Hub: list revisions and files, and fetch a commit's files."""

import re
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

from embedgeo.checkpoints.files import Contents, StoredFile, hashed_file

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt."""

T = TypeVar("T")


class WrongHashError(OSError):
    """A file is not what the Hub's listing says it is."""


def list_repositories(pattern: str) -> list[str]:
    """Repositories whose name matches a pattern such as ``google/multiberts-seed_0-step_*``."""
    author, _, name = pattern.partition("/")
    if not name or set(author) & set("*?["):
        raise ValueError(f"a pattern of repositories must name its author, as in author/name-*; got {pattern!r}.")
    literal = re.split(r"[*?\[]", name)[0]
    listed = retried(lambda: [model.id for model in HfApi().list_models(author=author, search=literal or None)])
    found = sorted(repository for repository in listed if fnmatchcase(repository, pattern))
    if not found:
        raise FileNotFoundError(f"model must match at least one repository; {pattern!r} matches none of {author}'s.")
    return found


def list_revisions(repository: str) -> dict[str, str]:
    """Branches and tags of a repository with the commits they stand for."""
    refs = retried(lambda: HfApi().list_repo_refs(repository))
    commits = {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}
    wrong = [name for name, commit in commits.items() if not _COMMIT.fullmatch(commit)]
    if wrong:
        raise ValueError(f"{repository}: revision {wrong[0]!r} must stand for a commit; got {commits[wrong[0]]!r}.")
    return commits


def list_files(repository: str, commit: str) -> list[StoredFile]:
    """Files of a commit: sha256 of those in large-file storage, git's hash of the others."""
    entries = retried(lambda: list(HfApi().list_repo_tree(repository, revision=commit)))
    return [
        StoredFile(e.path, e.size, f"git:{e.blob_id}" if e.lfs is None else e.lfs.sha256)
        for e in entries
        if isinstance(e, RepoFile)
    ]


def fetch(repository: str, commit: str, contents: Contents) -> Path:
    """Download the files of a commit, and check the weights against the hashes that the Hub lists.

    What a further attempt may mend is tried again: lost connections, server errors, bodies cut short, wrong hashes,
    and what another sweep on this machine has evicted meanwhile because no commit that was whole had a use for it.

    Returns:
        The folder that holds them, in the cache.
    """
    wrong = ""
    for force in (False, True):
        folder = retried(partial(_download, repository, commit, contents.names, force=force))
        wrong = _first_wrong(folder, contents)
        if not wrong:
            return folder
    raise WrongHashError(f"{wrong} It was downloaded twice.")


def _download(repository: str, commit: str, names: Sequence[str], *, force: bool) -> Path:
    folder = Path(snapshot_download(repository, revision=commit, allow_patterns=list(names), force_download=force))
    with cache_lock(repository):  # whoever evicts after this sees the whole snapshot, and keeps its blobs
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{name} must be in the cache after its download; it is not.")
    return folder


def cache_lock(repository: str) -> FileLock:
    """Held while files of a repository, of any commit, are taken out of the cache, or counted as there."""
    return lock_file(repository_folder(repository).name)


def lock_file(name: str) -> FileLock:
    """A lock that all sweeps with this cache share."""
    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"embedgeo-{name}.lock", thread_local=False)


def _first_wrong(folder: Path, contents: Contents) -> str:
    """What is wrong with the first file that is not what the listing says; empty where all are."""
    for file in (*contents.weights, *contents.others):
        if not file.digest.startswith("git:"):
            got = hashed_file(folder / file.name).digest
            if got != file.digest:
                return f"{file.name} must have the sha256 {file.digest}, as the Hub lists it; it has {got}."
    return ""


def fetch_small(repository: str, commit: str, names: Sequence[str], cache: Path) -> Path:
    """Download some small files into a cache of their own; returns the folder that holds them."""
    return Path(
        retried(lambda: snapshot_download(repository, revision=commit, allow_patterns=list(names), cache_dir=cache))
    )


def snapshot_folder(repository: str, commit: str) -> Path:
    """Where the cache holds the files of a commit."""
    return repository_folder(repository) / "snapshots" / commit


def retried(attempt: Callable[[], T]) -> T:
    """What ``attempt`` returns, after further attempts where the cause may pass.

    Raises:
        OSError: it has not passed, or is none that may; ValueError where the attempt raises that.
    """
    for wait in (*_WAITS, None):
        try:
            return attempt()
        except (OSError, ValueError) as error:
            if wait is None or not _may_pass(error):
                raise
        except Exception as error:
            if wait is None or not _may_pass(error):
                why = f"{type(error).__name__}: {error}"
                raise ConnectionError(f"the Hub must answer at {constants.ENDPOINT}; got {why}") from error
        time.sleep(wait)
    raise AssertionError


def _may_pass(error: BaseException | None) -> bool:
    if error is None:
        return False
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if "Consistency check failed" in str(error):  # a body cut short; a plain OSError
        return True
    if type(error) in (FileNotFoundError, FileExistsError):  # another sweep evicts; the client's own are subclasses
        return True
    # the HTTP library under huggingface_hub has changed its name between versions; its classes have not
    is_transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return is_transport or isinstance(error, ConnectionError) or _may_pass(error.__cause__)


def repository_folder(repository: str) -> Path:
    """Where the cache holds a repository."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
