"""Training runs of the findings: small language models of three designs, sound and with a planted fault.

Each run trains a model of Python's documentation with a `embedgeo.StepMonitor` on a probe of held-out text drawn at
random, and writes a folder: ``history.parquet`` and ``losses.csv``, of sound runs also ``variants.parquet`` (the last
weights, measured in other ways) and of the first seed ``probes.parquet`` (many probes of two checkpoints). The file
``done`` is written last: a run that has it is not made again.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)
from transformers.utils import logging

from embedgeo import StepMonitor, default_metrics, log_spaced_steps, observe
from embedgeo.metrics import IntrinsicDimension
from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer

Design = Literal["decoder", "pre_ln", "post_ln"]
"""GPT-NeoX, which continues a text; RoBERTa-PreLayerNorm and BERT, which fill in tokens."""

DESIGNS: tuple[Design, ...] = ("decoder", "pre_ln", "post_ln")
RATES: dict[Design, float] = {"decoder": 3e-3, "pre_ln": 2e-3, "post_ln": 1e-3}
"""Highest learning rates, at which each design learns."""

VOCABULARY = 2048
LENGTH, BATCH = 64, 32  # tokens of a sequence, sequences of a batch
MASKED = 0.2  # share of the tokens that an encoder has to fill in; a tenth of these it is shown all the same
HELD_OUT_PARTS = 3  # twelfths, each of what is left
JACKKNIFE = 16
SEEN = 16  # batches of a probe for the loss

FAULTS = {
    "learning_rate": "learning rate far too high: 30 times as high, all along",
    "no_warm_up": "no warm-up, and a learning rate 10 times as high",
    "initial_scale": "bad initial scale: all weights 10 times as large",
    "corrupted": "corrupted data: shuffled tokens, for a tenth of the run",
    "underflow": "underflow: gradients rounded to float16 after a loss scale far too small, from the middle on",
    "dead_head": "dead head: a head of a middle block gives zeros, from the middle on",
    "label_shift": "label shift: the token after the next one is to be found, from the middle on",
    "rate_jump": "learning rate 30 times as high from the middle on",
}
"""What is planted, and from when."""

LATE = ("corrupted", "underflow", "dead_head", "label_shift", "rate_jump")
"""Faults that begin in the middle of the run: before it their runs are sound."""

_UNDERFLOW = 2.0**-14  # of the loss scale
_HEAD_WIDTH = 32


@dataclass(frozen=True)
class Size:
    """How much is trained and measured."""

    max_steps: int = 500
    every_n_steps: int = 50
    num_layers: int = 6
    width: int = 128
    seeds: int = 3
    held_out: int = 256  # sequences
    probe: int = 64  # of these, while a model trains
    alarm_steps: int = 400
    alarm_layers: int = 4
    alarm_width: int = 64
    alarm_probe: int = 32
    sound: int = 10  # runs beside faulty ones
    faulty: int = 3  # runs of each fault


SIZES = {
    "full": Size(),
    "small": Size(12, 6, 2, 32, 2, 24, 16, 100, 2, 32, 4, 2, 1),
}


@dataclass(frozen=True)
class Plan:
    """A run to make: of three designs with all that is measured, or one for the alarm, measured at every other step."""

    design: Design
    seed: int
    fault: str = ""
    is_for_alarm: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        kind = [self.fault or "sound"] if self.is_for_alarm else []
        return "-".join([*kind, self.design, str(self.seed)])


def plans(size: Size) -> list[Plan]:
    """All runs, the longest first."""
    return [
        *(Plan(design, seed) for seed in range(size.seeds) for design in reversed(DESIGNS)),
        *(Plan("decoder", 100 + seed, is_for_alarm=True) for seed in range(size.sound)),
        *(Plan("decoder", seed, fault, is_for_alarm=True) for fault in FAULTS for seed in range(size.faulty)),
    ]


class Text(NamedTuple):
    """Tokens to train on, and sequences of those held out."""

    tokens: Tensor  # shape (n,)
    held_out: Tensor  # shape (sequences, positions), drawn at random
    counts: Tensor  # of each token in the text to train on, shape (vocabulary,)
    frame: tuple[int, ...]  # special tokens around a sequence, none of a decoder
    mask: int  # token


def text_of(design: Design, size: Size) -> Text:
    """The built-in corpus, as a design is given it: encoders have a token before and after each sequence."""
    text, parts = "\n\n".join(builtin_corpus()), []
    for _ in range(HELD_OUT_PARTS):
        text, part = split_held_out([text])
        parts.append(part)
    tokenizer = train_tokenizer(text, VOCABULARY)
    mask, *frame = range(len(tokenizer), len(tokenizer) + 3)
    if design == "decoder":
        frame = []
    sequences = cut_sequences([tokenizer.encode("\n\n".join(parts))], LENGTH - len(frame))
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
    if len(sequences) < size.held_out:
        raise ValueError(f"held_out must be at most {len(sequences)} sequences, which there are; got {size.held_out}.")
    tokens = torch.tensor(tokenizer.encode(text))
    counts = tokens.bincount(minlength=len(tokenizer) + 3)
    return Text(tokens, framed(sequences[order[: size.held_out]], frame), counts, tuple(frame), mask)


def framed(sequences: Tensor, frame: Sequence[int]) -> Tensor:
    """Sequences with a special token before and one after, if there are any."""
    if not frame:
        return sequences
    first, last = (sequences.new_full((len(sequences), 1), token) for token in frame)
    return torch.cat([first, sequences, last], 1)


def new_model(design: Design, num_layers: int, width: int, vocabulary: int) -> PreTrainedModel:
    """A model with random weights; positions of the encoders begin as sines, from which they learn within minutes."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // _HEAD_WIDTH,
        "intermediate_size": 4 * width,
        "max_position_embeddings": LENGTH + 1,
        "use_cache": False,
    }
    if design == "decoder":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, bos_token_id=0, eos_token_id=0))
    sizes |= {"type_vocab_size": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    if design == "pre_ln":
        model: PreTrainedModel = RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(**sizes))
    else:
        model = BertForMaskedLM(BertConfig(**sizes))
    positions = model.base_model.embeddings.position_embeddings.weight
    angles = torch.arange(len(positions))[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    with torch.no_grad():
        positions.copy_(0.02 * math.sqrt(2) * torch.stack([angles.sin(), angles.cos()], -1).reshape(positions.shape))
    return model


def inputs_of(design: Design, sequences: Tensor, mask: int, generator: torch.Generator, shift: int = 0) -> Any:
    """Inputs and labels of a batch; ``shift`` has a decoder find tokens so many places further on."""
    if design == "decoder":
        if not shift:
            return {"input_ids": sequences, "labels": sequences}
        return {"input_ids": sequences[:, :-shift], "labels": sequences[:, shift:]}
    chosen = torch.rand(sequences.shape, generator=generator) < MASKED
    shown = torch.rand(sequences.shape, generator=generator) < 0.1
    return {
        "input_ids": sequences.masked_fill(chosen & ~shown, mask),
        "labels": sequences.masked_fill(~chosen, -100),
    }


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, design: Design, text: Text, num_sequences: int) -> tuple[float, float]:
    """Loss in nats a token, and that of the frequencies of tokens alone."""
    inputs = inputs_of(design, text.held_out[:num_sequences], text.mask, torch.Generator().manual_seed(1))
    was_training = model.training
    model.eval()
    loss = float(model(**inputs).loss)
    model.train(was_training)
    found = inputs["labels"][:, 1:] if design == "decoder" else inputs["labels"]
    counts = text.counts + 1.0
    return loss, float((counts.sum() / counts).log()[found[found >= 0]].mean())


def run(plan: Plan, size: Size, folder: Path) -> None:
    """Make a run, unless its folder is complete."""
    out = folder / plan.name
    if (out / "done").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = text_of(plan.design, size)
    torch.manual_seed(plan.seed)
    shape = (size.alarm_layers, size.alarm_width) if plan.is_for_alarm else (size.num_layers, size.width)
    model = new_model(plan.design, *shape, vocabulary=len(text.counts))
    losses, before = _trained(plan, size, text, model, out)
    pd.DataFrame(losses).to_csv(out / "losses.csv", index=False)
    if not plan.is_for_alarm:
        model.eval()
        _write_variants(plan.design, model, text, out)
        if plan.seed == 0:
            _write_probes(plan.design, model, before, text, size, out)
    (out / "done").write_text(f"{asdict(size)}\n")


def _trained(
    plan: Plan, size: Size, text: Text, model: PreTrainedModel, out: Path
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train the model; losses by step, and the weights at the measured step before the last."""
    last = size.alarm_steps if plan.is_for_alarm else size.max_steps
    every = 2 if plan.is_for_alarm else size.every_n_steps
    num_probe = size.alarm_probe if plan.is_for_alarm else size.probe
    middle = last // 2
    fault = plan.fault
    if fault == "initial_scale":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(10)
    rate = RATES[plan.design] * {"learning_rate": 30, "no_warm_up": 10}.get(fault, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = 1 if fault == "no_warm_up" else max(1, last // 10)
    batches = _batches(plan, text, last, corrupted=range(middle, middle + last // 10) if fault == "corrupted" else ())
    probe = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in text.held_out[:num_probe].split(32)]
    extra = () if plan.is_for_alarm else (*(s for s in log_spaced_steps(last) if s < last), last)
    monitor = StepMonitor(
        model,
        every,
        extra_steps=extra,
        probe=probe,
        ignore_token_ids=text.frame,
        folder=out,
        jackknife=0 if plan.is_for_alarm else min(JACKKNIFE, num_probe),
        metrics=None if plan.is_for_alarm else lambda dim: default_metrics(dim, spectrum=True),
        on_error="raise",
    )
    masks = torch.Generator().manual_seed(plan.seed)
    losses: list[dict[str, float]] = []
    before: dict[str, Tensor] = {}
    with monitor:
        for step, sequences in enumerate(batches):
            is_late = step >= middle
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / last)) / 2
                group["lr"] *= 30 if fault == "rate_jump" and is_late else 1
            losses.append({"step": step})
            if step % every == 0 or step in extra:
                losses[-1]["held_out"], losses[-1]["unigram"] = held_out_loss(model, plan.design, text, num_probe)
            if step == last - every:
                before = {name: value.clone() for name, value in model.state_dict().items()}
            shift = 1 if fault == "label_shift" and is_late else 0
            if fault == "dead_head" and is_late:
                _kill_head(model)
            inputs = inputs_of(plan.design, sequences, text.mask, masks, shift)
            with monitor.step(step, inputs):
                loss = model(**inputs).loss
                loss.backward()
            if fault == "underflow" and is_late:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad = (parameter.grad * _UNDERFLOW).half().float() / _UNDERFLOW
            optimizer.step()
            optimizer.zero_grad()
            losses[-1]["training"] = float(loss.detach())
    held_out, unigram = held_out_loss(model, plan.design, text, num_probe)
    losses.append({"step": last, "held_out": held_out, "unigram": unigram})
    return losses, before


def _batches(plan: Plan, text: Text, last: int, corrupted: Sequence[int]) -> Iterator[Tensor]:
    """Sequences that start anywhere in the text; those of some steps have their tokens shuffled."""
    generator = torch.Generator().manual_seed(plan.seed)
    length = LENGTH - len(text.frame)
    for step in range(last):
        starts = torch.randint(len(text.tokens) - length + 1, (BATCH, 1), generator=generator)
        sequences = text.tokens[starts + torch.arange(length)]
        if step in corrupted:
            order = torch.randperm(sequences.numel(), generator=generator)
            sequences = sequences.flatten()[order].view_as(sequences)
        yield framed(sequences, text.frame)


@torch.no_grad()
def _kill_head(model: nn.Module) -> None:
    """Have the first head of a middle block of a GPT-NeoX write nothing."""
    blocks = model.gpt_neox.layers  # type: ignore[union-attr]
    blocks[len(blocks) // 2].attention.dense.weight[:, :_HEAD_WIDTH] = 0  # type: ignore[index, union-attr]


def _measured(model: PreTrainedModel, sequences: Tensor, **options: Any) -> pd.DataFrame:
    with torch.inference_mode(), observe(model, **options) as geometry:
        for ids in sequences.split(32):
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return geometry.to_frame()


def _apart(dim: int) -> list[Any]:
    return [IntrinsicDimension(dim, neighbors="other_sequences")]


def _write_variants(design: Design, model: PreTrainedModel, text: Text, out: Path) -> None:
    """Measure all that is held out: as the runs are, with all tokens, without the first, words, other neighbours."""
    plain: dict[str, Any] = {
        "ignore_token_ids": text.frame,
        "metrics": lambda dim: default_metrics(dim, spectrum=True),
        "jackknife": min(JACKKNIFE, len(text.held_out)),
    }
    ways: dict[str, dict[str, Any]] = {
        "plain": plain,
        "without_first": plain | {"skip_first_positions": 1},
        "other_sequences": plain | {"metrics": _apart},
    }
    if design != "decoder":
        ways["special_tokens"] = plain | {"ignore_token_ids": ()}
    frames = {way: _measured(model, text.held_out, **options) for way, options in ways.items()}
    pd.concat(frames, names=["way"]).reset_index("way").to_parquet(out / "variants.parquet", index=False)


def _write_probes(
    design: Design, model: PreTrainedModel, before: dict[str, Tensor], text: Text, size: Size, out: Path
) -> None:
    """Measure the last two checkpoints with probes of 8, 16, 32 … sequences, no two of which share any."""
    after = {name: value.clone() for name, value in model.state_dict().items()}
    frames = []
    for checkpoint, weights in (("before", before), ("after", after)):
        model.load_state_dict(weights)
        for num_sequences in probe_sizes(size):
            for draw, sequences in enumerate(text.held_out.split(num_sequences)[:8]):
                found = _measured(model, sequences, ignore_token_ids=text.frame, metrics=_with_spectrum)
                frames.append(found.assign(checkpoint=checkpoint, num_sequences=num_sequences, draw=draw))
    pd.concat(frames).to_parquet(out / "probes.parquet", index=False)


def _with_spectrum(dim: int) -> list[Any]:
    return default_metrics(dim, spectrum=True)


def probe_sizes(size: Size) -> list[int]:
    """Numbers of sequences of which four probes at least fit into what is held out."""
    return [2**i for i in range(3, 12) if 4 * 2**i <= size.held_out] or [size.held_out // 4]


def made_with(folder: Path, plan: Plan) -> str:
    """The size that a complete run was made with; empty where there is none."""
    path = folder / plan.name / "done"
    return path.read_text().strip() if path.exists() else ""


