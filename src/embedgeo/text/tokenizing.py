"""Text tokenized, and cut into sequences."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

_LETTERS_PER_TOKEN = 8  # to begin with, of a text of which not all is needed
_TOKENS_BEFORE_CUT = 1024  # that are not used: what follows a cut has no say in those before them

Tokenizer = Any
"""A tokenizer of Hugging Face: called with a text and ``add_special_tokens``, it returns
``input_ids``.
"""

Token = Sequence[int]
"""An id and the place of the token's word: alike for consecutive tokens of a word, another for the
next word; -1 for a token of no word.
"""

SpecialTokens = Literal["none", "bos", "bos+eos", "default"]
"""The special tokens around a text or sequence: by default, those that the tokenizer puts there."""


class SpelledWords(NamedTuple):
    """The words of n tokens; those of no word, such as special tokens and white space, have the
    number -1.
    """

    word_ids: Tensor  # (n,), int64: counted over all texts
    word_types: Tensor  # (n,), int64: positions in `spelled`
    spelled: list[str]  # the tokens of each type, decoded, without white space around them


class TokenizedText(NamedTuple):
    """Texts or sequences as tokens, all of them in a row."""

    token_ids: Tensor  # (n,), int64
    lengths: Tensor  # number of tokens of each text, int64
    words: SpelledWords | None = None
    num_cut: int = 0  # texts that were longer
    num_before: int = 0  # special tokens that each text begins with


def tokenize_joined(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    num_tokens: int,
    for_encoder: bool = False,
    special_tokens: SpecialTokens = "default",
    with_words: bool = False,
) -> TokenizedText:
    """Tokenize documents and cut them into sequences of ``seq_len`` tokens, the first
    ``num_tokens`` in all.

    ``special_tokens`` are put around every sequence, inside its tokens. By default, these are an
    encoder's own, and for a decoder those that the tokenizer puts before a text, such as BOS. Words
    at the ends of sequences are cut.
    """
    before, after = chosen_special_tokens(tokenizer, special_tokens)
    if special_tokens == "default" and not for_encoder:
        after = []
    room = _room(seq_len, num_tokens, len(before) + len(after))
    if num_tokens < seq_len:
        raise ValueError(
            f"num_tokens must fill at least one sequence of {seq_len} tokens; got {num_tokens}."
        )
    body = num_tokens // seq_len * room
    encoded = _encoded(documents, tokenizer, body, in_all=True, with_words=with_words)
    sequences = cut_sequences(encoded, room, body).tolist()
    return _surrounded(sequences, before, after, tokenizer.decode if with_words else None)


def tokenize_texts(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    num_tokens: int,
    special_tokens: SpecialTokens = "default",
    with_words: bool = False,
) -> TokenizedText:
    """Tokenize texts by themselves, as many as fit into ``num_tokens``; longer ones are cut to
    ``max_length``.
    """
    before, after = chosen_special_tokens(tokenizer, special_tokens)
    num_special = len(before) + len(after)
    room = _room(max_length, num_tokens, num_special)
    taken: list[list[Token]] = []
    num_cut = 0
    left = num_tokens
    for tokens in _encoded(texts, tokenizer, room + 1, in_all=False, with_words=with_words):
        if tokens:
            left -= min(len(tokens), room) + num_special
            if left < 0:
                break
            taken.append(tokens[:room])
            num_cut += len(tokens) > room
        if left <= num_special:
            break
    if not taken:
        raise ValueError(
            f"num_tokens must be enough for the first text; got {num_tokens}."
            if left < 0
            else "text must have at least one text that unit, min_words, max_words and sample "
            "leave; it has none."
        )
    return _surrounded(taken, before, after, tokenizer.decode if with_words else None)._replace(
        num_cut=num_cut
    )


def _surrounded(
    texts: Iterable[Sequence[Token]],
    before: list[int],
    after: list[int],
    decode: Callable[..., str] | None,
) -> TokenizedText:
    """Texts between special tokens; with words if they can be decoded."""
    start, end = ([(token_id, -1) for token_id in special] for special in (before, after))
    whole = [[*start, *text, *end] for text in texts]
    return TokenizedText(
        torch.tensor([token_id for text in whole for token_id, _ in text]),
        torch.tensor([len(text) for text in whole]),
        None if decode is None else _spell_words(whole, decode),
        num_before=len(before),
    )


def chosen_special_tokens(
    tokenizer: Tokenizer, special_tokens: SpecialTokens
) -> tuple[list[int], list[int]]:
    """Ids of the special tokens to put before and after a text.

    An encoder's ``[CLS]`` and ``[SEP]`` are BOS and EOS; without BOS and ``[CLS]``, EOS is both, as
    in GPT-2.
    """
    if special_tokens == "default":
        added = set(tokenizer.get_added_vocab().values())
        for text in chain("a", tokenizer.get_vocab()):  # of which one has a token of its own
            plain = tokenizer(text, add_special_tokens=False)["input_ids"]
            whole = tokenizer(text)["input_ids"]
            for start in range(len(whole)):
                end = start + len(plain)
                if plain and added.isdisjoint(plain) and whole[start:end] == plain:
                    return whole[:start], whole[end:]
        raise ValueError(
            "a tokenizer must leave the tokens of a text as they are, with special ones around "
            "them; this one does not. Give --tokens in place of a text."
        )
    wanted = special_tokens.split("+")
    ids: list[list[int]] = [[], []]
    for i, kinds in enumerate((("bos", "cls", "eos"), ("eos", "sep"))):
        if kinds[0] in wanted:
            known = (getattr(tokenizer, f"{kind}_token_id", None) for kind in kinds)
            ids[i] = [token_id for token_id in known if token_id is not None][:1]
            if not ids[i]:
                raise ValueError(
                    f"--special-tokens {special_tokens} needs a tokenizer with a "
                    f"{' or '.join(kinds)} token; it has none. Take none or default."
                )
    return ids[0], ids[1]


def _room(length: int, num_tokens: int, num_special: int) -> int:
    """Tokens of a sequence that are not special."""
    for name, value in (("seq_len", length), ("num_tokens", num_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 token; got {value}.")
    if length <= num_special:
        raise ValueError(
            f"seq_len must leave room beside {num_special} special tokens; got {length}."
        )
    return length - num_special


def _encoded(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    num_tokens: int,
    *,
    in_all: bool,
    with_words: bool,
) -> Iterator[list[Token]]:
    """Tokens, at least the first ``num_tokens`` of each text, or of all
    texts together.
    """
    if with_words and not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"--rows words needs a tokenizer that says which word a token is of (tokenizer.json); "
            f"{type(tokenizer).__name__} does not. Take other rows."
        )
    num_words = 0
    left = num_tokens
    for text in texts:
        encoding = _beginning(text, tokenizer, left)
        token_ids = encoding["input_ids"]
        places = [-1] * len(token_ids)
        if with_words:
            places = [-1 if place is None else place + num_words for place in encoding.word_ids()]
            num_words = max(num_words - 1, *places, -1) + 1
        yield list(zip(token_ids, places, strict=True))
        if in_all:
            left -= len(token_ids)
            if left <= 0:
                return


def _beginning(text: str, tokenizer: Tokenizer, num_tokens: int) -> Any:
    """The tokens of a text, or of so much of it that the first ``num_tokens`` are those of the
    whole text.
    """
    size = _LETTERS_PER_TOKEN * (num_tokens + _TOKENS_BEFORE_CUT)
    while size < len(text):
        space = re.compile(r"\s").search(text, size, 2 * size)
        encoding = tokenizer(text[: space.start() if space else size], add_special_tokens=False)
        if len(encoding["input_ids"]) >= num_tokens + _TOKENS_BEFORE_CUT:
            return encoding
        size *= 4
    return tokenizer(text, add_special_tokens=False)


def _spell_words(texts: Iterable[Iterable[Token]], decode: Callable[..., str]) -> SpelledWords:
    """Number the words of texts, and spell them. A word that is cut, at the end of a text, has the
    tokens left.
    """
    runs = ((place, [*run]) for text in texts for place, run in groupby(text, itemgetter(1)))
    spelled: dict[str, int] = {}
    types: dict[tuple[int, ...], int] = {(): -1}
    words: list[tuple[int, int]] = []
    for number, (place, run) in enumerate(runs):
        tokens = tuple(token_id for token_id, _ in run if place >= 0)
        if tokens not in types:
            word = decode(list(tokens), clean_up_tokenization_spaces=False).strip()
            if len(word.split()) > 1:
                raise ValueError(
                    "--rows words needs a tokenizer that tells words apart; this one takes "
                    f"{word[:40]!r} as one. Take other rows."
                )
            types[tokens] = spelled.setdefault(word, len(spelled)) if word else -1
        word_type = types[tokens]
        words += [(number if word_type >= 0 else -1, word_type)] * len(run)
    word_ids, word_types = torch.tensor(words).T.contiguous()
    return SpelledWords(word_ids, word_types, list(spelled))


def cut_sequences(
    documents: Iterable[Sequence[Any]], seq_len: int, num_tokens: int | None = None
) -> Tensor:
    """Join documents, given by token ids, and cut the first ``num_tokens`` into sequences, shape
    (sequences, seq_len).

    Tokens that do not fill a sequence are left out; a text shorter than one sequence is refused.
    """
    tokens = torch.tensor([token for document in documents for token in document][:num_tokens])
    if len(tokens) < seq_len:
        raise ValueError(
            f"the text must fill at least one sequence of {seq_len} tokens; it has {len(tokens)}. "
            "Give more text or a smaller sequence length."
        )
    return tokens[: len(tokens) // seq_len * seq_len].unflatten(0, (-1, seq_len))


def hash_ids(token_ids: Tensor) -> str:
    """The sha256 of token ids and their shape."""
    return hashlib.sha256(
        f"{tuple(token_ids.shape)}".encode() + token_ids.numpy().tobytes()
    ).hexdigest()


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the text, with at most ``vocab_size`` tokens; it adds none when
    it encodes.
    """
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(bpe.to_str()), eos_token=END_OF_TEXT
    )
