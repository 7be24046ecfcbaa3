"""Text to run models on: read, cut into texts or sequences, and tokenized."""

from embedgeo.extras import require_extra

require_extra("sweep", "embedgeo.text")

from embedgeo.text.reading import (
    Documents as Documents,
    builtin_corpus as builtin_corpus,
    read_documents as read_documents,
    split_held_out as split_held_out,
)
from embedgeo.text.tokenizing import (
    END_OF_TEXT as END_OF_TEXT,
    cut_sequences as cut_sequences,
    train_tokenizer as train_tokenizer,
)
