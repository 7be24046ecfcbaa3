"""Text to run models on: real English that every machine has, cut into sequences of tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor


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
