"""Documents cut into the texts that a model is run on: lines, sentences, or whole documents."""

from collections.abc import Iterable, Iterator
from itertools import count, groupby
from typing import Literal

from sentencex import segment  # type: ignore[import-untyped]

from embedgeo.functional.sampling import row_keys

Unit = Literal["sequence", "line", "sentence", "document"]
"""What a model is run on: a sequence cut from all documents in a row, or one text by itself."""

_DRAWN_AT_ONCE = 4096


def cut_texts(
    documents: Iterable[str],
    unit: Unit,
    *,
    min_words: int = 0,
    max_words: int = 0,
    share: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Cut documents into texts, as they are asked for, and leave some out.

    Args:
        documents: whole documents.
        unit: ``line``, ``document``, or ``sentence``, of English: an empty line ends one, and `sentencex.segment` tells
            the others apart. Without the white space around them; blank ones are left out. ``sequence``: the documents
            as they are, blank ones too, to be joined and cut into sequences of tokens.
        min_words: leave out texts of fewer words, which white space separates.
        max_words: leave out texts of more words; 0: none.
        share: of the texts to keep, whatever their words. Each is drawn by a random number that depends only on the
            seed and on how many come before it.
        seed: of the draw.

    >>> list(cut_texts(["One. Two words.  ", " "], "sentence", min_words=2))
    ['Two words.']
    """
    texts = documents if unit == "sequence" else _stripped(documents, unit)
    for text, is_drawn in zip(texts, _draws(share, seed), strict=False):
        if is_drawn and min_words <= len(text.split()) <= (max_words or len(text)):
            yield text


def _stripped(documents: Iterable[str], unit: Unit) -> Iterator[str]:
    for document in documents:
        pieces = document.split("\n") if unit == "line" else _sentences(document) if unit == "sentence" else [document]
        yield from filter(None, map(str.strip, pieces))


def _sentences(document: str) -> Iterator[str]:
    """The sentences of each paragraph: of a long document, sentencex takes quadratic time."""
    for is_blank, lines in groupby(document.split("\n"), lambda line: not line.strip()):
        if not is_blank:
            yield from segment("en", "\n".join(lines))


def _draws(share: float, seed: int) -> Iterator[bool]:
    for start in count(0, _DRAWN_AT_ONCE):
        yield from (row_keys(start, _DRAWN_AT_ONCE, seed=seed) < share).tolist()
