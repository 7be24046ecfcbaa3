"""Text to run models on: read, tokenized, and cut into sequences."""

from embedgeo.text.reading import builtin_corpus as builtin_corpus
from embedgeo.text.reading import hash_documents as hash_documents
from embedgeo.text.reading import read_documents as read_documents
from embedgeo.text.reading import split_held_out as split_held_out
from embedgeo.text.tokenizing import END_OF_TEXT as END_OF_TEXT
from embedgeo.text.tokenizing import cut_sequences as cut_sequences
from embedgeo.text.tokenizing import hash_ids as hash_ids
from embedgeo.text.tokenizing import special_tokens_around as special_tokens_around
from embedgeo.text.tokenizing import tokenize_sequences as tokenize_sequences
from embedgeo.text.tokenizing import train_tokenizer as train_tokenizer
