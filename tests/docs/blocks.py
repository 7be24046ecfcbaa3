"""The code blocks of the README and the documentation, and the names that they may use."""

import re
import textwrap
from typing import NamedTuple
from unittest import mock

import lightning as L
import torch
from torch.utils.data import DataLoader

import embedgeo
from embedgeo.glossary import FOREIGN
from embedgeo.text import train_tokenizer
from tests.files import ROOT
from tests.models import gpt_neox, token_batch
from tests.report.synthetic import make_sweep

PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.joinpath("docs").rglob("*.md")),
]
INTEGRATIONS = {"docs/how-to/loggers.md", "docs/how-to/recipes.md"}
"""Pages whose blocks need packages that `make test` does not have."""

_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.M | re.S,
)


class Block(NamedTuple):
    """A block's code, without its indentation, the number of its first line on the page, and its
    language.
    """

    code: str
    line: int
    language: str


def text(page):
    """A page as it is."""
    return ROOT.joinpath(page).read_text()


def blocks(page, *languages):
    """The blocks of a page in these languages, in order."""
    whole = text(page)
    return [
        Block(
            textwrap.dedent(found["code"]),
            whole.count("\n", 0, found.start("code")) + 1,
            found["language"],
        )
        for found in _BLOCK.finditer(whole)
        if found["language"] in languages
    ]


class Module(L.LightningModule):
    """A model that makes its own loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def names(results):
    """What a page finds there already; ``results`` is the folder of a sweep."""
    torch.manual_seed(0)
    items = token_batch(32, 12)
    items["labels"] = items["input_ids"]
    rows = [{key: value[i] for key, value in items.items()} for i in range(32)]
    loader = DataLoader(rows, batch_size=4)
    model = gpt_neox(vocab_size=300)
    texts = [
        "A transformer learns the frequencies of tokens first.",
        "Then it learns what they mean in their context.",
    ]
    tokenizer = train_tokenizer(" ".join(texts), vocab_size=300)
    tokenizer.pad_token = tokenizer.eos_token
    return {
        "torch": torch,
        "embedgeo": embedgeo,
        "model": model,
        "module": Module(model),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "batches": list(loader),
        "loader": loader,
        "train_dataloader": loader,
        "tokenizer": tokenizer,
        "texts": texts,
        "results": results,
    }


def sweep_folder(folder):
    """A small folder of a sweep."""
    return make_sweep(folder, steps=(0, 1, 8, 64), num_blocks=2, dim=16, n=4096.0)


def run(page, namespace):
    """Run the Python blocks of a page in order, and count them.

    A traceback has the page's lines.
    """
    written = blocks(page, "python")
    with mock.patch.dict(FOREIGN.terms):
        for block in written:
            run_block(page, block, namespace)
    return len(written)


def run_block(page, block, namespace):
    """Run one Python block of a page."""
    exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), namespace)
