"""Text tokenized, and cut into sequences."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

Tokenizer = Callable[..., Any]
"""A tokenizer of Hugging Face: called with a text and ``add_special_tokens``, it returns ``input_ids``."""


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


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the text, with at most ``vocab_size`` tokens; it adds none when it encodes.

    >>> train_tokenizer("to be or not to be", 300).decode([0])
    '<|endoftext|>'
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END_OF_TEXT)
