"""Text to run models on: read, cut into texts or sequences, and tokenized."""

from embedgeo.extras import require_extra

require_extra("sweep", "embedgeo.text")

from embedgeo.text.reading import Documents as Documents
from embedgeo.text.reading import builtin_corpus as builtin_corpus
from embedgeo.text.reading import read_documents as read_documents
from embedgeo.text.reading import split_held_out as split_held_out
from embedgeo.text.tokenizing import END_OF_TEXT as END_OF_TEXT
from embedgeo.text.tokenizing import cut_sequences as cut_sequences
from embedgeo.text.tokenizing import train_tokenizer as train_tokenizer
