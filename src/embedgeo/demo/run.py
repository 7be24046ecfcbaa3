"""Training of a small language model whose geometry is measured: what ``embedgeo demo`` runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from embedgeo.demo.settings import DemoSettings
from embedgeo.formatting import shell_command
from embedgeo.report import write_report
from embedgeo.results.files import emptied
from embedgeo.results.records import Record
from embedgeo.sweep import SweepSettings, sweep
from embedgeo.sweep.processes import muted_libraries
from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer
from embedgeo.training.lightning import GeometryMonitor
from embedgeo.training.monitor import log_spaced_steps

HEAD_WIDTH = 32
PROBE_BATCH = 8
WRITTEN = ("probe.txt", "history.parquet", "checkpoints", "tensorboard", "sweep")
"""Names of the files and folders in the output folder."""


def run_demo(settings: DemoSettings) -> None:
    """Train, measure and save; sweep what was saved, and say what to open."""
    out = settings.out
    if settings.hidden_size % HEAD_WIDTH:
        raise ValueError(
            f"hidden_size must be a multiple of {HEAD_WIDTH}, the width of a head; got "
            f"{settings.hidden_size}."
        )
    console = Console()
    with emptied(out, "demo", WRITTEN):
        with muted_libraries():
            history, num_tokens = _train(settings, console)
        console.print("\nSweeping the checkpoints: the same numbers again, from what was saved.")
        swept = SweepSettings(
            model=str(out / "checkpoints"),
            text=str(out / "probe.txt"),
            num_tokens=num_tokens,
            seq_len=settings.seq_len,
            batch_size=PROBE_BATCH,
            token_tables=True,
            jackknife=16,
            out=str(out / "sweep"),
            device="cpu",
        )
        sweep(swept)
        console.print(compare(history, pd.read_csv(out / "sweep" / "metrics.csv")))
        write_report([out / "sweep"])
        show(out)


def _train(settings: DemoSettings, console: Console) -> tuple[Sequence[Record], int]:
    """Train, and return what was measured, and of how many held-out tokens."""
    out = settings.out
    text, probe_text = split_held_out(builtin_corpus())
    (out / "probe.txt").write_text(probe_text, encoding="utf-8", newline="\n")
    tokenizer = train_tokenizer(text, settings.vocab_size)
    probe = cut_sequences([tokenizer.encode(probe_text)], settings.seq_len)
    torch.manual_seed(settings.seed)
    model = new_model(settings, tokenizer)
    last = settings.max_steps
    steps = {*range(0, last, settings.every_n_steps), *log_spaced_steps(min(last, 512)), last}
    console.print(
        f"Training a GPT-NeoX of {settings.num_layers} layers, {model.num_parameters() / 1e6:.1f} "
        f"M parameters, for {last} steps; measuring {probe.numel():,} held-out tokens at "
        f"{len(steps)} of them."
    )
    sequences: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in probe]
    held_out = DataLoader(sequences, batch_size=PROBE_BATCH)
    monitor = GeometryMonitor(
        settings.every_n_steps, sorted(steps), probe=held_out, folder=out, on_error="raise"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=TensorBoardLogger(
            out / "tensorboard", name="training", version="", default_hp_metric=False
        ),
        callbacks=[
            monitor,
            SaveCheckpoints(out / "checkpoints", steps, tokenizer),
            RichProgressBar(),
        ],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = LanguageModel(model, settings.learning_rate, last)
    trainer.fit(module, training_batches(tokenizer.encode(text), settings))
    return monitor.history, probe.numel()


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
    """Windows that start anywhere in the text, as many as one epoch of ``max_steps`` batches
    needs.
    """
    windows = torch.tensor(token_ids).unfold(0, settings.seq_len, 1)
    sampler = RandomSampler(
        windows,
        replacement=True,
        num_samples=settings.max_steps * settings.batch_size,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    return DataLoader(windows, settings.batch_size, sampler=sampler)  # type: ignore[arg-type]


class LanguageModel(LightningModule):
    """Next-token training of a Hugging Face causal language model, with warm-up and a cosine
    schedule.
    """

    def __init__(self, model: GPTNeoXForCausalLM, learning_rate: float, max_steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.max_steps = max_steps

    def training_step(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch of token ids, shape (sequences, positions)."""
        loss: Tensor = self.model(input_ids=input_ids, labels=input_ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with Pythia's betas and weight decay."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        warmup = max(1, self.max_steps // 20)

        def share(step: int) -> float:
            # not 0 at step 0: step 1 would repeat its weights
            warmed_up = min(1.0, (step + 1) / warmup)
            return warmed_up * 0.5 * (1 + math.cos(math.pi * step / self.max_steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveCheckpoints(Callback):
    """Saves model and tokenizer as ``folder/step{N}``, N being the optimizer steps that the weights
    have taken.
    """

    def __init__(self, folder: Path, steps: set[int], tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder = folder
        self.steps = steps
        self.tokenizer = tokenizer

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *_: object
    ) -> None:
        """Save the weights that are measured before this batch."""
        step = trainer.global_step
        folder = self.folder / f"step{step}"
        if step in self.steps and not folder.exists():
            pl_module.model.save_pretrained(folder)  # type: ignore[operator, union-attr]
            self.tokenizer.save_pretrained(folder)

    on_train_end = on_train_batch_start


def compare(history: Sequence[Record], offline: pd.DataFrame) -> str:
    """A sentence on whether the numbers of a sweep are those of the monitor."""
    online = pd.DataFrame(history).query("layer_index >= 0")  # a sweep has no means
    both = online.merge(
        offline, on=["step", "layer", "metric"], how="left", suffixes=("", "_again")
    )
    same = np.isclose(both["value"], both["value_again"], rtol=1e-6, atol=0, equal_nan=True)
    if same.all():
        return f"The sweep gives the monitor's {len(both):,} numbers again."
    return f"The sweep gives only {same.sum():,} of the monitor's {len(both):,} numbers again."


def show(out: Path) -> None:
    """Print where what has been written lies, and what to open."""
    for name, content in (
        ("checkpoints", "a Hugging Face folder for each measured step"),
        ("history.parquet", "every metric at every layer and measured step"),
        ("probe.txt", "the held-out text that was measured"),
        ("sweep", "the same numbers out of the checkpoints, and Q, M, V of each token type"),
        ("sweep/report/index.html", "all of it in figures: open it in a browser"),
        ("tensorboard", "the curves; to look at them:"),
    ):
        print(f"{out / name}  {content}")
    print(f"\n    {shell_command('tensorboard', '--logdir', out / 'tensorboard')}\n")
