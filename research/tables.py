"""A table of each checkpoint of a run, in a folder: what is there is not measured again."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import embedgeo


def checkpoint_parser(description: str | None) -> ArgumentParser:
    """A parser of the options that say which checkpoints are measured."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="repository on the Hub, or local folder")
    parser.add_argument("--steps", default="all", help="all, log, final, or steps such as 0,512")
    parser.add_argument("--tokenizer", help="repository or folder; default: the model's")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    return parser


def checkpoint_tables(
    options: Namespace, measure: Callable[[Any], pd.DataFrame]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Measure each checkpoint, and yield its name and its table, ``<out>/<name>.parquet``.

    A checkpoint with the weights of an earlier one has the numbers of that one.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    for checkpoint in embedgeo.iter_checkpoints(options.model, options.steps):
        file = options.out / f"{checkpoint.name}.parquet"
        original = options.out / f"{checkpoint.duplicate_of}.parquet"
        if not file.exists():
            is_known = checkpoint.duplicate_of is not None and original.exists()
            with TemporaryDirectory() as cache:  # of what is downloaded
                fetched = replace(checkpoint, cache=Path(cache))
                table = pd.read_parquet(original) if is_known else measure(fetched)
            unfinished = file.with_suffix(".part")
            table.assign(step=checkpoint.step).to_parquet(unfinished)
            unfinished.rename(file)
            print(file)
        yield checkpoint.name, pd.read_parquet(file)


def load_tokenizer(options: Namespace, checkpoint: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that is asked for, or else that of the checkpoint, or of its repository.

    Raises:
        OSError, ValueError: there is none.
    """
    source = options.tokenizer or checkpoint.path or checkpoint.model
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    return tokenizer
