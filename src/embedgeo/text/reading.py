"""Text read from files and datasets, and cut into texts."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from sentencex import segment  # type: ignore[import-untyped]

from embedgeo.extras import require_extra
from embedgeo.formatting import listed, reason
from embedgeo.functional.sampling import row_keys

_PREFIX = "hf://datasets/"
_FORM = "hf://datasets/NAME[/CONFIG][:SPLIT][#COLUMN]"
_PART_OF_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}", re.ASCII)
_DRAWN_AT_ONCE = 4096
_MOST_LETTERS = 2**24  # of a document; of those that a digest is of
# what is cut into sentences at once, in quadratic time
_PARAGRAPH = re.compile(r"(?s).{1,1048576}\S{0,1000}")

_NO_TEXT = re.compile(
    r"\.(json|ndjson|jsonlines|jl|ipynb|csv|tsv|parquet|tar|zip|zst|xz|bz2)(\.gz)?$", re.IGNORECASE
)

Unit = Literal["sequence", "line", "sentence", "document"]
"""Input of a model: a sequence cut from all documents in a row, or one text by itself."""


def builtin_corpus() -> list[str]:
    """The documentation topics that come with Python: about 0.7 MB of English, one string a
    topic.
    """
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def _read(path: Path) -> Iterator[str]:
    is_lines = path.name.lower().removesuffix(".gz").endswith(".jsonl")
    refused = (
        f"text must be plain, or JSON lines by the name .jsonl (.jsonl.gz); {path} is not. Rename "
        "it if it has JSON lines, or unpack or convert it."
    )
    if _NO_TEXT.search(path.name):
        raise ValueError(refused)
    for number, piece in enumerate(_pieces(path, is_lines=is_lines), 1):
        document = piece
        # UTF-16 without a mark of it reads as letters between zeros
        if "\0" in piece or (number == 1 and not is_lines and _is_json(piece)):
            raise ValueError(refused)
        if is_lines:
            if not piece.strip():
                continue
            try:
                document = json.loads(piece)["text"]
                document.encode()  # a string, and no half of a surrogate pair in it
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    "each line of a .jsonl must be an object with a string text, of at most "
                    f"{_MOST_LETTERS} letters; {path}:{number} is not."
                ) from error
        yield document


def _is_json(document: str) -> bool:
    """Tell a document that begins with an object or a list of JSON, which has another or a text."""
    try:
        value = json.JSONDecoder().raw_decode(document.lstrip())[0]
    except (ValueError, RecursionError):
        return False
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(isinstance(v, str | dict | list) for v in values)


def _pieces(path: Path, *, is_lines: bool) -> Iterator[str]:
    """The lines of a file, or else whole lines together, as many letters as a document has."""
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no file. Of a folder, a device or a pipe, name files")
        with opened(path, "rt", encoding="utf-8-sig") as file:
            while piece := ("" if is_lines else file.read(_MOST_LETTERS)) + file.readline(
                _MOST_LETTERS
            ):
                yield piece
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        remedy = " Convert it to UTF-8." if isinstance(error, UnicodeError) else ""
        raise ValueError(
            f"text must be files of UTF-8 text, .jsonl or .gz; {path} is not readable: {error}."
            f"{remedy}"
        ) from error


class Documents:
    """The documents of files and datasets, in order, which are read anew each time that they are
    needed; without paths, the built-in corpus.

    Files are plain text (a document each, or one every 16,777,216 letters) or ``.jsonl`` (a
    document a line, in the field ``text``), also as ``.gz``; in UTF-8.
    Of datasets, ``sha256`` is that of their addresses; of long files that of their beginning. Both
    are ``is_streamed``.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._parts: list[Address | Path | list[str]] = [
            parse_address(path) if path.startswith(_PREFIX) else Path(path).expanduser()
            for path in paths
        ] or [builtin_corpus()]
        self.is_streamed = any(isinstance(part, Address) for part in self._parts)
        parts = ([part.url] if isinstance(part, Address) else _of(part) for part in self._parts)
        digest = hashlib.sha256()
        num_letters = 0
        for document in hashing(chain.from_iterable(parts), digest):
            num_letters += len(document)
            if num_letters > _MOST_LETTERS:
                self.is_streamed = True
                break
        self.sha256 = digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(map(_of, self._parts))


def _of(part: "Address | Path | list[str]") -> Iterable[str]:
    if isinstance(part, list):
        return part
    return _stream(part) if isinstance(part, Address) else _read(part)


class Address(NamedTuple):
    """Address of a dataset's text: ``author/name``, a configuration if one is named, split and
    column.
    """

    url: str
    name: str
    config: str | None
    split: str
    column: str


def parse_address(url: str) -> Address:
    """Take the address of a dataset apart; default: the column ``text`` of the split ``train``."""
    path, has_column, column = url.removeprefix(_PREFIX).partition("#")
    path, has_split, split = path.partition(":")
    parts = path.split("/")
    is_named = len(parts) in (2, 3) and all(parts) and all(map(_PART_OF_NAME.fullmatch, parts[:2]))
    if not is_named or (has_column and not column) or (has_split and not split):
        raise ValueError(
            f"text must be a file or a dataset, {_FORM}, where NAME is author/name; got {url!r}."
        )
    config = "/".join(parts[2:]) or None
    return Address(url, "/".join(parts[:2]), config, split or "train", column or "text")


def _stream(address: Address) -> Iterator[str]:
    """The documents of a dataset one by one, but for rows without text; no code of the dataset is
    run.
    """
    require_extra("datasets", f"text: {address.url}")
    import datasets

    rows = iter(_opened(datasets, address))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of the network, of the files and of the library, of many kinds
            raise OSError(
                f"text: {address.url} cannot be read to its end; {reason(error)}"
            ) from error
        if row is None:
            return
        if address.column not in row:
            raise ValueError(
                f"text: {address.url} must have a column {address.column!r}; it has "
                f"{listed(list(row))}. Name one by #COLUMN."
            )
        document = row[address.column]
        if document is not None:
            if not isinstance(document, str):
                raise ValueError(
                    f"text: column {address.column!r} of {address.url} must hold strings; it holds "
                    f"{type(document).__name__}."
                )
            yield document


def _opened(datasets: ModuleType, address: Address) -> Iterable[dict[str, Any]]:
    if Path(address.name).exists():  # the library would read it
        raise ValueError(
            f"text: {address.url} is a dataset on the Hub; {Path(address.name).absolute()} would "
            "be read in its place. Start the sweep in another folder."
        )
    try:
        return datasets.load_dataset(
            address.name, address.config, split=address.split, streaming=True
        )
    except Exception as error:  # of many kinds
        raise ValueError(
            f"text must be a file or a dataset on the Hub, {_FORM}; {address.url} cannot be read "
            f"({reason(error)})."
        ) from error


def hashing(documents: Iterable[str], digest: "hashlib._Hash") -> Iterator[str]:
    """The documents, each added to a digest when it is asked for."""
    for document in documents:
        data = document.encode()
        digest.update(f"{len(data)}\n".encode() + data)
        yield document


def split_held_out(documents: Iterable[str]) -> tuple[str, str]:
    """Split text into what a model is trained on and what is held out: every twelfth run of sixteen
    paragraphs.

    Paragraphs that occur more than once are kept once, so that nothing in the second text is in the
    first.
    """
    paragraphs = dict.fromkeys(
        p.strip("\n") for document in documents for p in document.split("\n\n")
    )
    split: tuple[list[str], list[str]] = [], []
    for i, paragraph in enumerate(paragraphs):
        split[i // 16 % 12 == 11].append(paragraph)
    return "\n\n".join(split[0]) + "\n", "\n\n".join(split[1]) + "\n"


def cut_texts(
    documents: Iterable[str],
    unit: Unit,
    *,
    min_words: int = 0,
    max_words: int = 0,
    share: float = 1.0,
) -> Iterator[str]:
    """Cut documents into texts, as they are asked for, and leave out those of fewer or more words
    (0: no limit).

    Texts have no white space around them, and blank ones are left out; of the unit ``sequence``
    they are the documents as they are. Of all, the share that is kept is drawn, each by its number
    alone.
    """
    texts = documents if unit == "sequence" else _stripped(documents, unit)
    draws = chain.from_iterable(
        (row_keys(start, _DRAWN_AT_ONCE, seed=0) < share).tolist()
        for start in count(0, _DRAWN_AT_ONCE)
    )
    for text, is_drawn in zip(texts, draws, strict=False):
        if is_drawn and min_words <= len(text.split()) <= (max_words or len(text)):
            yield text


def _stripped(documents: Iterable[str], unit: Unit) -> Iterator[str]:
    for document in documents:
        pieces: Iterable[str] = [document]
        if unit == "line":
            pieces = document.split("\n")
        # paragraph by paragraph: of a long document, sentencex takes quadratic time
        elif unit == "sentence":
            runs = groupby(document.split("\n"), lambda line: not line.strip())
            paragraphs = ("\n".join(lines) for is_blank, lines in runs if not is_blank)
            parts = chain.from_iterable(map(_PARAGRAPH.findall, paragraphs))
            pieces = chain.from_iterable(segment("en", part) for part in parts)
        yield from filter(None, map(str.strip, pieces))
