"""Small language models of Python's documentation: a decoder and an encoder, trained in minutes.

    python -m research.models [--kind decoder|encoder] [--max_steps 300]

Prints what the model has learned of the text held out. Other scripts measure the models.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jsonargparse import CLI
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer

HEAD_WIDTH = 32

MASKED = 0.2
"""Share of the tokens that an encoder has to fill in; a tenth of these it is shown all the same."""

Kind = Literal["decoder", "encoder"]
"""A GPT-NeoX, which continues a text, or a ModernBERT, which fills in tokens."""


@dataclass(frozen=True)
class Settings:
    """The sizes of a model, and how it is trained. The defaults are those of `embedgeo demo`."""

    max_steps: int = 300
    num_layers: int = 6
    hidden_size: int = 128
    vocab_size: int = 2048
    seq_len: int = 256
    batch_size: int = 8
    learning_rate: float = 3e-3
    seed: int = 0


SETTINGS: dict[Kind, Settings] = {
    "decoder": Settings(),
    "encoder": Settings(
        num_layers=4, seq_len=128, batch_size=16, max_steps=700, learning_rate=2e-3
    ),
}
"""The encoder learns from a fifth of the tokens, in as many minutes."""


class TrainedModel(NamedTuple):
    """A model, the tokens of the text that it was trained on, and what it has learned of the text
    held out.
    """

    model: PreTrainedModel
    token_ids: Tensor  # shape (n,)
    loss: float  # nats a token to be found
    unigram_loss: float  # nats by the frequencies of tokens alone, of the same tokens

    def __str__(self) -> str:
        size = self.model.num_parameters() / 1e6
        loss = (
            f"{self.loss:.2f} nats a token held out, {self.unigram_loss:.2f} by frequencies alone"
        )
        return f"{type(self.model).__name__}, {size:.1f} M parameters: {loss}"


def new_decoder(
    tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int, seq_len: int
) -> GPTNeoXForCausalLM:
    """A GPT-NeoX in the manner of Pythia, with random weights."""
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_WIDTH,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=seq_len,
        use_cache=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPTNeoXForCausalLM(config)


def new_encoder(
    tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int, seq_len: int
) -> ModernBertForMaskedLM:
    """A ModernBERT with random weights, all of whose blocks see the whole sequence."""
    mask = len(tokenizer)  # padding, too, of which there is none
    config = ModernBertConfig(
        vocab_size=len(tokenizer) + 1,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_WIDTH,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=seq_len,
        global_attn_every_n_layers=1,
        pad_token_id=mask,
        **dict.fromkeys(
            ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), tokenizer.eos_token_id
        ),
    )
    return ModernBertForMaskedLM(config)


def inputs_of(kind: Kind, model: PreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
    """Inputs and labels; an encoder's are masked tokens, and labels that leave out the others."""
    if kind == "decoder":
        return {"input_ids": input_ids, "labels": input_ids}
    chosen = torch.rand(input_ids.shape) < MASKED
    shown = torch.rand(input_ids.shape) < 0.1
    mask_id = model.config.pad_token_id
    return {
        "input_ids": input_ids.masked_fill(chosen & ~shown, mask_id),
        "labels": input_ids.masked_fill(~chosen, -100),
    }


def learning_share(step: int, max_steps: int, warm_up: int) -> float:
    """The share of the learning rate at a step: a warm-up, then a cosine."""
    warmed_up = min(1.0, (step + 1) / max(1, warm_up))
    return warmed_up * 0.5 * (1 + math.cos(math.pi * step / max_steps))


def train(kind: Kind, model: PreTrainedModel, token_ids: Tensor, settings: Settings) -> None:
    """Train on windows that start anywhere in the text, with AdamW as Pythia has it."""
    windows = token_ids.unfold(0, settings.seq_len, 1)
    sampler = RandomSampler(
        windows,
        replacement=True,
        num_samples=settings.max_steps * settings.batch_size,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    batches: Any = DataLoader(windows, settings.batch_size, sampler=sampler)
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step, input_ids in enumerate(batches):
        share = learning_share(step, settings.max_steps, settings.max_steps // 20)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * share
        model(**inputs_of(kind, model, input_ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(kind: Kind, settings: Settings, dropout: float | None = None) -> TrainedModel:
    """The model after its training, with its own dropout or another one."""
    text, held_out = split_held_out(builtin_corpus())
    tokenizer = train_tokenizer(text, settings.vocab_size)
    token_ids = torch.tensor(tokenizer.encode(text))
    torch.manual_seed(settings.seed)
    new_model = new_decoder if kind == "decoder" else new_encoder
    model: Any = new_model(tokenizer, settings.num_layers, settings.hidden_size, settings.seq_len)
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout) and dropout is not None:
            each.p = dropout
    train(kind, model, token_ids, settings)
    model.eval()
    sequences = cut_sequences([tokenizer.encode(held_out)], settings.seq_len)
    inputs = inputs_of(kind, model, sequences)
    with torch.no_grad():
        loss = float(model(**inputs).loss)
    counts = token_ids.bincount(minlength=len(tokenizer)) + 1.0
    found = inputs["labels"] if kind == "encoder" else sequences[:, 1:]
    unigram_loss = float((counts.sum() / counts).log()[found[found >= 0]].mean())
    return TrainedModel(model, token_ids, loss, unigram_loss)


def main(kind: Kind = "decoder", max_steps: int | None = None) -> None:
    """Train a model and print its loss."""
    print(trained(kind, replace(SETTINGS[kind], max_steps=max_steps or SETTINGS[kind].max_steps)))


if __name__ == "__main__":
    CLI(main)
