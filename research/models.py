"""Small language models of Python's documentation: the demo's decoder, and an encoder trained by
the same code.

    python -m benchmarks.small_models [--kind decoder|encoder] [--max_steps 300]

Prints what the model has learned of the text held out. Other benchmarks measure the models.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jsonargparse import CLI
from lightning.pytorch import Trainer
from torch import Tensor
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from embedgeo.studies.commands import DemoSettings
from embedgeo.studies.demo import HEAD_WIDTH, LanguageModel, new_model, training_batches
from embedgeo.sweep.processes import muted_libraries
from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer

Kind = Literal["decoder", "encoder"]
"""The demo's GPT-NeoX, which continues a text, or a ModernBERT, which fills in tokens."""

SETTINGS: dict[Kind, DemoSettings] = {
    "decoder": DemoSettings(),
    "encoder": DemoSettings(
        num_layers=4, seq_len=128, batch_size=16, max_steps=700, learning_rate=2e-3
    ),
}
"""The demo's, and those with which an encoder learns from a fifth of the tokens in as many minutes.
"""

MASKED = 0.2
"""Share of the tokens that the encoder has to fill in; a tenth of these it is shown all the same.
"""


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


class MaskedLanguageModel(LanguageModel):
    """The demo's training, of a model that fills in tokens."""

    def training_step(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        """The loss of the tokens to fill in, in a batch of token ids of shape (sequences,
        positions).
        """
        loss: Tensor = self.model(**filling_in(input_ids, self.model.config.pad_token_id)).loss
        self.log("loss", loss, prog_bar=True)
        return loss


def filling_in(input_ids: Tensor, mask_id: int) -> dict[str, Tensor]:
    """Inputs with masked tokens, and labels that leave out the others."""
    chosen = torch.rand(input_ids.shape) < MASKED
    shown = torch.rand(input_ids.shape) < 0.1
    return {
        "input_ids": input_ids.masked_fill(chosen & ~shown, mask_id),
        "labels": input_ids.masked_fill(~chosen, -100),
    }


def new_encoder(
    settings: DemoSettings, tokenizer: PreTrainedTokenizerFast
) -> ModernBertForMaskedLM:
    """A ModernBERT with random weights, all of whose blocks see the whole sequence."""
    mask = len(tokenizer)  # padding, too, of which there is none
    config = ModernBertConfig(
        vocab_size=len(tokenizer) + 1,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // HEAD_WIDTH,
        intermediate_size=2 * settings.hidden_size,
        max_position_embeddings=settings.seq_len,
        global_attn_every_n_layers=1,
        pad_token_id=mask,
        **dict.fromkeys(
            ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), tokenizer.eos_token_id
        ),
    )
    return ModernBertForMaskedLM(config)


def trained(kind: Kind, settings: DemoSettings, dropout: float | None = None) -> TrainedModel:
    """The model after the demo's training, with its own dropout or another one."""
    text, held_out = split_held_out(builtin_corpus())
    tokenizer = train_tokenizer(text, settings.vocab_size)
    token_ids = torch.tensor(tokenizer.encode(text))
    torch.manual_seed(settings.seed)
    model: Any = (
        new_model(settings, tokenizer) if kind == "decoder" else new_encoder(settings, tokenizer)
    )
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout) and dropout is not None:
            each.p = dropout
    module = LanguageModel if kind == "decoder" else MaskedLanguageModel
    with muted_libraries():
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = training_batches(token_ids.tolist(), settings)
        trainer.fit(module(model, settings.learning_rate, settings.max_steps), batches)
    model.eval()
    sequences = cut_sequences([tokenizer.encode(held_out)], settings.seq_len)
    inputs = {"input_ids": sequences, "labels": sequences}
    if kind == "encoder":
        inputs = filling_in(sequences, model.config.pad_token_id)
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
