"""The Hugging Face Hub: list revisions and files, and download the files of a commit."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from embedgeo.checkpoints.files import Contents, StoredFile, hashed_file
from embedgeo.formatting import reason

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt

T = TypeVar("T")


def list_revisions(repository: str) -> dict[str, str]:
    """Branches and tags of a repository, with the commits that they point to."""
    try:
        refs = retried(partial(HfApi().list_repo_refs, repository))
    except OSError as error:
        is_unknown = isinstance(error, RepositoryNotFoundError)
        why = "the Hub has none that this user may read" if is_unknown else reason(error)
        raise FileNotFoundError(
            f"{repository} must be a local path that exists or a repository on the Hub; there is "
            f"no such path, and {why}."
        ) from error
    commits = {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}
    for name, commit in commits.items():
        if not _COMMIT.fullmatch(commit):
            raise ValueError(
                f"{repository}: revision {name!r} must stand for a commit; got {commit!r}."
            )
    return commits


def list_files(repository: str, commit: str) -> list[StoredFile]:
    """Files of a commit, with the sha256 of those in large-file storage and git's hash of the
    others.
    """
    entries = retried(lambda: list(HfApi().list_repo_tree(repository, revision=commit)))
    return [
        StoredFile(e.path, e.size, f"git:{e.blob_id}" if e.lfs is None else e.lfs.sha256)
        for e in entries
        if isinstance(e, RepoFile)
    ]


def fetch(repository: str, commit: str, contents: Contents, cache: Path | None = None) -> Path:
    """The folder with the files of a commit, which have the hashes that the Hub lists.

    Files are used from the user's cache if all are there and as listed. Otherwise all are
    downloaded, into a ``cache`` of their own if given; lost connections, server errors, truncated
    bodies and wrong hashes are tried again.
    """
    names = [file.name for file in contents.files]
    download = partial(snapshot_download, repository, revision=commit, allow_patterns=names)
    with suppress(OSError):  # not in the user's cache, or not readable there
        folder = Path(download(local_files_only=True))
        if not _first_wrong(folder, contents):
            return folder
    for force in (False, True):
        folder = Path(retried(partial(download, cache_dir=cache, force_download=force)))
        if not (wrong := _first_wrong(folder, contents)):
            return folder
    raise OSError(f"{wrong} It was downloaded twice.")


def _first_wrong(folder: Path, contents: Contents) -> str:
    """Error about the first file that is not as listed; empty if all are."""
    for file in contents.files:
        if not (folder / file.name).is_file():
            return f"{file.name} must be among the files of the commit; it is not."
        if file.digest.startswith("git:"):
            got = f"git:{git_hash((folder / file.name).read_bytes())}"
        else:
            got = hashed_file(folder / file.name).digest
        if got != file.digest:
            return (
                f"{file.name} must have the hash that the Hub lists, {file.digest}; it has {got}."
            )
    return ""


def fetch_small(
    repository: str, commit: str, names: Sequence[str], cache: Path, *, with_code: bool | None
) -> Path:
    """Download some small files of a commit, and its code if asked for, into a cache of their own:
    the folder that holds them.
    """
    patterns = [*names, "*.py"] if with_code else [*names]
    download = partial(
        snapshot_download, repository, revision=commit, allow_patterns=patterns, cache_dir=cache
    )
    return Path(retried(download))


def retried(attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until it succeeds, a few times; errors of other kinds become
    ConnectionErrors.
    """
    waits = iter(_WAITS)
    while True:
        try:
            return attempt()
        except Exception as error:
            may_pass = _may_pass(error)
            wait = next(waits, None) if may_pass else None
            if wait is None:
                raised = error
                if not isinstance(error, OSError | ValueError):
                    raised = ConnectionError(
                        f"the Hub must answer at {constants.ENDPOINT}; got {reason(error)}"
                    )
                if may_pass:
                    raised.add_note("this may pass: run the same command again")
                raise raised from error.__cause__ if raised is error else error
        time.sleep(wait)


def _may_pass(error: BaseException | None) -> bool:
    """Tell an error of the network or the Hub, or one caused by such, that may pass by itself."""
    if error is None or isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if "Consistency check failed" in str(error):  # a body cut short; a plain OSError
        return True
    # the HTTP library under huggingface_hub has changed its name between versions; its classes have
    # not
    is_transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return is_transport or isinstance(error, ConnectionError) or _may_pass(error.__cause__)
