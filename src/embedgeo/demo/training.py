"""The demo's model, its text in batches, and what Lightning needs to train it."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from embedgeo.demo import DemoSettings

HEAD_WIDTH = 32


def new_model(settings: DemoSettings, tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """A GPT-NeoX in the manner of Pythia, with random weights."""
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // HEAD_WIDTH,
        intermediate_size=4 * settings.hidden_size,
        max_position_embeddings=settings.seq_len,
        use_cache=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPTNeoXForCausalLM(config)


def training_batches(token_ids: list[int], settings: DemoSettings) -> DataLoader[Tensor]:
    """Windows that start anywhere in the text, as many as one epoch of ``max_steps`` batches needs."""
    windows = torch.tensor(token_ids).unfold(0, settings.seq_len, 1)
    sampler = RandomSampler(
        windows,
        replacement=True,
        num_samples=settings.max_steps * settings.batch_size,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    return DataLoader(windows, settings.batch_size, sampler=sampler)  # type: ignore[arg-type]


class LanguageModel(LightningModule):
    """Next-token training of a Hugging Face causal language model, with warm-up and a cosine schedule."""

    def __init__(self, model: GPTNeoXForCausalLM, learning_rate: float, max_steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate, self.max_steps = learning_rate, max_steps

    def training_step(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch of token ids, shape (sequences, positions)."""
        loss: Tensor = self.model(input_ids=input_ids, labels=input_ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with Pythia's betas and weight decay."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = max(1, self.max_steps // 20)

        def share(step: int) -> float:
            rising = min(1.0, (step + 1) / warmup)  # not 0 at step 0: step 1 would repeat its weights
            return rising * 0.5 * (1 + math.cos(math.pi * step / self.max_steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveCheckpoints(Callback):
    """Saves model and tokenizer as ``folder/step{N}``, N being the optimizer steps that the weights have taken."""

    def __init__(self, folder: Path, steps: set[int], tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder, self.steps, self.tokenizer = folder, steps, tokenizer
        self.sha256: dict[int, str] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save the weights that are measured before this batch."""
        self._save(trainer.global_step, pl_module.model)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last weights."""
        self._save(trainer.global_step, pl_module.model)

    def _save(self, step: int, model: Any) -> None:
        if step in self.steps and step not in self.sha256:
            folder = self.folder / f"step{step}"
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            self.sha256[step] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
