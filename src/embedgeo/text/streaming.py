"""Text read from a dataset on the Hub, as far as it is needed."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from huggingface_hub.errors import RepositoryNotFoundError

from embedgeo.extras import require_extra
from embedgeo.results.wording import listed, reason

PREFIX = "hf://datasets/"
_FORM = "hf://datasets/NAME[/CONFIG][:SPLIT][#COLUMN]"


class Address(NamedTuple):
    """Where the text of a dataset is.

    Attributes:
        given: the whole address.
        name: of the dataset, ``author/name``.
        config: its configuration; None for the default one.
        split: of the dataset.
        column: that holds the text.
    """

    given: str
    name: str
    config: str | None
    split: str
    column: str


def parse_address(address: str) -> Address:
    """Take ``hf://datasets/NAME[/CONFIG][:SPLIT][#COLUMN]`` apart; default: the column ``text`` of the split ``train``.

    Raises:
        ValueError: it is none.

    >>> parse_address("hf://datasets/lab/web/en:test")[1:]
    ('lab/web', 'en', 'test', 'text')
    """
    path, has_column, column = address.removeprefix(PREFIX).partition("#")
    path, has_split, split = path.partition(":")
    parts = path.split("/")
    if not all(parts) or len(parts) not in (2, 3) or (has_column and not column) or (has_split and not split):
        raise ValueError(f"text must be a file or a dataset, {_FORM}, where NAME is author/name; got {address!r}.")
    return Address(address, "/".join(parts[:2]), (*parts[2:], None)[0], split or "train", column or "text")


def stream_dataset(address: Address) -> Iterator[str]:
    """Read the documents of a dataset one by one, through the library ``datasets``, which runs no code of a dataset.

    Rows without text are left out.

    Raises:
        ImportError: the library is not installed.
        ValueError: there is no such dataset, split or column, or no text in it.
        OSError: it cannot be read.
    """
    require_extra("datasets", f"text: {address.given}")
    import datasets

    rows = iter(_opened(datasets, address))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of the network, of the files and of the library, of many kinds
            raise OSError(f"text: {address.given} cannot be read to its end; {reason(error)}") from error
        if row is None:
            return
        document = row.get(address.column)
        if address.column not in row:
            raise ValueError(
                f"text: {address.given} must have a column {address.column!r}; it has {listed(list(row))}. Name one by "
                "#COLUMN."
            )
        if document is not None:
            if not isinstance(document, str):
                raise ValueError(
                    f"text: column {address.column!r} of {address.given} must hold strings; it holds "
                    f"{type(document).__name__}."
                )
            yield document


def _opened(datasets: ModuleType, address: Address) -> Iterable[dict[str, Any]]:
    if Path(address.name).exists():  # the library would read it
        raise ValueError(
            f"text: {address.given} is a dataset on the Hub; {Path(address.name).absolute()} would be read in its "
            "place. Start the sweep in another folder."
        )
    try:
        return datasets.load_dataset(address.name, address.config, split=address.split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, RepositoryNotFoundError) as error:
        raise ValueError(
            f"text must be a file or a dataset on the Hub, {_FORM}; it has no {address.name} that this user may read."
        ) from error
    except Exception as error:  # of many kinds
        raise ValueError(f"text: {address.given} cannot be read; {reason(error)}") from error
