"""Text to run models on: read, tokenized, and cut into sequences."""

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_MARKED = (  # in the order to look for them: the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Encodings by the byte order mark that a file begins with, which is no part of its text."""

Tokenizer = Callable[..., Any]
"""A tokenizer of Hugging Face: called with a text and ``add_special_tokens``, it returns ``input_ids``."""


def builtin_corpus() -> list[str]:
    """The documentation topics that come with Python: about 0.7 MB of English, one string a topic.

    >>> len(builtin_corpus()) > 50
    True
    """
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def read_documents(paths: Sequence[str | PathLike[str]] = ()) -> list[str]:
    """Read the documents in files, in order.

    Args:
        paths: plain text (a document each) or ``.jsonl`` (a document a line, in the field ``text``), either of them
            also as ``.gz``; in UTF-8, or in the encoding that a byte order mark names. None for the built-in corpus.

    Raises:
        ValueError: a file that is not there, is of another encoding, or a line without ``text``.
    """
    return [document for path in paths for document in _read(Path(path).expanduser())] if paths else builtin_corpus()


def _read(path: Path) -> Iterator[str]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_packed = suffixes[-1:] == [".gz"]
    is_lines = ".jsonl" in (suffixes[-2:-1] if is_packed else suffixes[-1:])
    try:
        data = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
        text = _decoded(data)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise ValueError(
            f"text must be files of UTF-8 text, .jsonl or .gz; {path} is not readable: {error}."
        ) from error
    if not is_lines:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            document.encode()  # a string, and no half of a surrogate pair in it
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"each line of a .jsonl must be an object with a string text; {path}:{number} is not."
            ) from error
        yield document


def _decoded(data: bytes) -> str:
    encoding = next((name for mark, name in _MARKED if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnicodeError(f"{error}. Convert it, as by iconv -f LATIN1 -t UTF-8") from error
    if text.count("\0") > len(text) // 10:  # about every second one, where it is UTF-16 without a mark
        raise UnicodeError("it holds zero bytes, as text in UTF-16 does. Convert it, as by iconv -f UTF-16LE -t UTF-8")
    if data and not text:
        raise UnicodeError("it holds nothing but a byte order mark")
    return text


def hash_documents(documents: Iterable[str]) -> str:
    """The sha256 of documents, their boundaries included."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(f"{len(data)}\n".encode() + data)
    return digest.hexdigest()


def hash_ids(token_ids: Tensor) -> str:
    """The sha256 of token ids and their shape."""
    return hashlib.sha256(f"{tuple(token_ids.shape)}".encode() + token_ids.to("cpu").numpy().tobytes()).hexdigest()


def tokenize_sequences(
    documents: Iterable[str], tokenizer: Tokenizer, *, seq_len: int, num_tokens: int, for_encoder: bool = False
) -> Tensor:
    """Tokenize documents and cut them into sequences of equal length, so that none needs padding.

    Args:
        documents: texts.
        tokenizer: of a Hugging Face model.
        seq_len: tokens in each sequence.
        num_tokens: use the first so many tokens only.
        for_encoder: put the tokenizer's special tokens (as ``[CLS]`` and ``[SEP]``) around every sequence, inside its
            ``seq_len`` tokens. Otherwise each document is tokenized as the tokenizer does by itself: one that adds a
            BOS token adds it to each document, and no other is added.

    Returns:
        Shape (sequences, seq_len), int64.

    Raises:
        ValueError: a length or number that is not positive, or text shorter than one sequence.
    """
    for name, value in (("seq_len", seq_len), ("num_tokens", num_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 token; got {value}.")
    if num_tokens < seq_len:
        raise ValueError(f"num_tokens must fill at least one sequence of {seq_len} tokens; got {num_tokens}.")
    if not for_encoder:
        return cut_sequences(_tokenized(documents, tokenizer, num_tokens), seq_len, num_tokens)
    before, after = special_tokens_around(tokenizer)
    num_special = len(before) + len(after)
    if seq_len <= num_special:
        raise ValueError(f"seq_len must leave room beside {num_special} special tokens; got {seq_len}.")
    body = num_tokens // seq_len * (seq_len - num_special)
    inner = cut_sequences(_tokenized(documents, tokenizer, body, with_special=False), seq_len - num_special, body)
    around = [torch.tensor(ids, dtype=torch.int64).expand(len(inner), len(ids)) for ids in (before, after)]
    return torch.cat((around[0], inner, around[1]), dim=1)


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the special tokens that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def _tokenized(
    documents: Iterable[str], tokenizer: Tokenizer, num_tokens: int, *, with_special: bool = True
) -> Iterator[list[int]]:
    """The documents up to the one that reaches the budget: the rest need not be tokenized."""
    for document in documents:
        token_ids = tokenizer(document, add_special_tokens=with_special)["input_ids"]
        yield token_ids
        num_tokens -= len(token_ids)
        if num_tokens <= 0:
            return


def cut_sequences(documents: Iterable[list[int]], seq_len: int, num_tokens: int | None = None) -> Tensor:
    """Join tokenized documents and cut them into consecutive sequences.

    Args:
        documents: token ids of each.
        seq_len: tokens in each sequence.
        num_tokens: use the first so many tokens only; default: all.

    Returns:
        Shape (sequences, seq_len), int64; tokens that do not fill a sequence are left out.

    Raises:
        ValueError: the text is shorter than one sequence.

    >>> cut_sequences([[1, 2, 3], [4, 5]], seq_len=2)
    tensor([[1, 2],
            [3, 4]])
    """
    tokens = torch.tensor([token for document in documents for token in document][:num_tokens])
    if len(tokens) < seq_len:
        raise ValueError(
            f"the text must fill at least one sequence of {seq_len} tokens; it has {len(tokens)}. "
            "Give more text or a smaller sequence length."
        )
    return tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)


def split_held_out(documents: Iterable[str]) -> tuple[str, str]:
    """Split text into what a model is trained on and what it never sees.

    Every twelfth run of sixteen paragraphs is held out. Paragraphs that occur more than once are kept once, so that
    nothing in the second text is in the first.

    Args:
        documents: paragraphs are separated by an empty line.

    Returns:
        The text to train on and the text held out.

    >>> split_held_out([str(i) for i in range(200)])[1].split()[:3]
    ['176', '177', '178']
    """
    paragraphs = dict.fromkeys(p.strip("\n") for document in documents for p in document.split("\n\n"))
    split: tuple[list[str], list[str]] = [], []
    for i, paragraph in enumerate(paragraphs):
        split[i // 16 % 12 == 11].append(paragraph)
    return "\n\n".join(split[0]) + "\n", "\n\n".join(split[1]) + "\n"


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the text, with at most ``vocab_size`` tokens; it adds none when it encodes.

    >>> train_tokenizer("to be or not to be", 300).decode([0])
    '<|endoftext|>'
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END_OF_TEXT)
