"""Text to run models on: read, cut into texts or sequences, and tokenized."""

from embedgeo.extras import require_extra

require_extra("sweep", "embedgeo.text")

from embedgeo.text.reading import (
    Documents,
    builtin_corpus,
    split_held_out,
)
from embedgeo.text.tokenizing import (
    END_OF_TEXT,
    cut_sequences,
    train_tokenizer,
)

__all__ = [
    "END_OF_TEXT",
    "Documents",
    "builtin_corpus",
    "cut_sequences",
    "split_held_out",
    "train_tokenizer",
]
