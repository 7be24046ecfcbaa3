"""Text to run models on: real English that every machine has, cut into sequences of tokens."""

from collections.abc import Iterable

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def builtin_corpus() -> list[str]:
    """The documentation topics that come with Python: about 0.7 MB of English, one string a topic.

    >>> len(builtin_corpus()) > 50
    True
    """
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


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
