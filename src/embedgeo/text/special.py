"""The special tokens around a text."""

from typing import Any, Literal

Tokenizer = Any
"""A tokenizer of Hugging Face: called with a text and ``add_special_tokens``, it returns ``input_ids``."""

SpecialTokens = Literal["none", "bos", "bos+eos", "default"]
"""The special tokens around a text or sequence: by default, those that the tokenizer puts there."""


def choose_special_tokens(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> tuple[list[int], list[int]]:
    """Ids of the special tokens to put before and after a text.

    An encoder's ``[CLS]`` and ``[SEP]`` are BOS and EOS. Where there is neither BOS nor ``[CLS]``, EOS stands for it:
    in GPT-2 one token is both.

    Raises:
        ValueError: the tokenizer has none.
    """
    if special_tokens == "default":
        return special_tokens_around(tokenizer)
    wanted = () if special_tokens == "none" else special_tokens.split("+")
    found: list[list[int]] = [[], []]
    for i, kinds in enumerate((("bos", "cls", "eos"), ("eos", "sep"))):
        if kinds[0] in wanted:
            given = [getattr(tokenizer, f"{kind}_token_id", None) for kind in kinds]
            found[i] = [token_id for token_id in given if token_id is not None][:1]
            if not found[i]:
                raise ValueError(
                    f"special_tokens={special_tokens!r} needs a tokenizer with a {' or '.join(kinds)} token; it has "
                    "none. Take 'none' or 'default'."
                )
    return found[0], found[1]


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the special tokens that a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]
