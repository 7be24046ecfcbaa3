"""Pretrain a small language model with Lightning's command line; the monitor is added in the
configuration.

python pretrain.py fit --config pretrain.yaml
python pretrain.py fit --config pretrain.yaml --data.files '[my.txt]' --trainer.max_steps 2000
tensorboard --logdir runs/pretrain
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer


class TextData(LightningDataModule):
    """Text files, or Python's own documentation where none are given, as sequences of token ids."""

    def __init__(
        self,
        files: Sequence[Path] = (),
        vocab_size: int = 2048,
        seq_len: int = 256,
        batch_size: int = 4,
    ) -> None:
        super().__init__()
        self.files, self.vocab_size, self.seq_len, self.batch_size = (
            files,
            vocab_size,
            seq_len,
            batch_size,
        )

    def setup(self, stage: str) -> None:
        documents = [path.read_text(encoding="utf-8") for path in self.files] or builtin_corpus()
        texts = split_held_out(documents)
        tokenizer = train_tokenizer(texts[0], self.vocab_size)
        self.train, self.held_out = (
            cut_sequences([tokenizer.encode(text)], self.seq_len) for text in texts
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


class LanguageModel(LightningModule):
    """A GPT-NeoX trained to predict the next token."""

    def __init__(
        self,
        vocab_size: int = 2048,
        hidden_size: int = 128,
        num_layers: int = 6,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=num_heads,
                intermediate_size=4 * hidden_size,
            )
        )

    def training_step(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=input_ids, labels=input_ids).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, input_ids: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.model(input_ids=input_ids, labels=input_ids).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(LanguageModel, TextData)
