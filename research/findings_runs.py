"""Small models of Python's documentation, sound and faulty, measured while they train: the runs of
docs/findings.md.

    python -m research.findings_runs [--size full|small] [--folder runs/findings] [--processes 2]

Every run writes two tables into the folder, its values and its losses. A run whose tables are there
is not done again, so that what was stopped goes on where it was. `research.findings` makes the
page of them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
import torch
from jsonargparse import CLI
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

import embedgeo
from embedgeo.functional import type_regressions
from embedgeo.metrics import Anisotropy, IntrinsicDimension, default_metrics
from embedgeo.text import builtin_corpus, cut_sequences, split_held_out, train_tokenizer
from research.models import HEAD_WIDTH, MASKED, learning_share, new_decoder

Kind = Literal["decoder", "pre-LN", "post-LN"]
KINDS: tuple[Kind, ...] = ("decoder", "pre-LN", "post-LN")
"""A GPT-NeoX, an encoder that norms the inputs of its blocks (RoBERTa-PreLayerNorm) and one their
outputs (BERT).
"""
Result = TypeVar("Result")

STARTS = ("rate × 10", "no warm-up", "weights × 4")
"""Faults that a run has from its first step on."""

EVENTS = ("rate jumps × 10", "noise for text", "float16 underflow", "dead head", "labels shifted")
"""Faults that begin half way through a run."""


PROCESSED = ("as it is", "z-scored", "whitened", "3 directions removed")
COUNT_RANGES = ((2, 100000), (5, 100000), (10, 100000), (20, 100000), (50, 100000), (10, 50))
"""How often token types occur that regressions are over; the third is that of the metrics."""


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    steps: int
    seq_len: int
    batch_size: int
    learning_rate: float
    num_layers: int = 6
    width: int = 128
    # share of the tokens that an encoder has to fill in; losses held out are with the usual one
    masked: float = MASKED


@dataclass(frozen=True)
class Size:
    """Runs and probes."""

    trainings: dict[Kind, Training]
    alarms: Training
    alarm_every: int = 2
    alarm_probe: int = 1024  # tokens
    sound: int = 12  # runs without a fault
    seeds: int = 3  # of each model and each fault
    topics: int | None = None  # of the corpus; default: all
    vocab_size: int = 2048
    probe: int = 4096  # tokens that are measured while a model trains
    large_probe: int = 16384  # tokens that are measured at the end
    probe_sizes: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)  # tokens
    probes: int = 12  # of each size


SIZES = {
    "full": Size(
        {
            "decoder": Training(600, 128, 8, 3e-3),
            "pre-LN": Training(1000, 32, 32, 2e-3),
            "post-LN": Training(1000, 32, 32, 5e-4, masked=0.4),
        },
        Training(400, 64, 8, 3e-3, num_layers=4, width=64),
    ),
    "small": Size(
        {
            "decoder": Training(4, 32, 4, 3e-3, num_layers=2, width=32),
            "pre-LN": Training(4, 32, 4, 2e-3, num_layers=2, width=32),
            "post-LN": Training(4, 32, 4, 1e-3, num_layers=2, width=32),
        },
        Training(12, 32, 2, 3e-3, num_layers=2, width=32),
        alarm_every=3,
        alarm_probe=128,
        sound=2,
        seeds=2,
        topics=10,
        vocab_size=384,
        probe=512,
        large_probe=1024,
        probe_sizes=(256, 512),
        probes=2,
    ),
}


class Task(NamedTuple):
    """A run: of a model of a kind, or of the decoder that alarms are tried on, with a fault or
    none.
    """

    kind: Kind
    seed: int
    is_alarm: bool = False
    fault: str = ""

    def __str__(self) -> str:
        words = [
            self.kind,
            *(["alarm"] if self.is_alarm else []),
            *([self.fault] if self.fault else []),
        ]
        return "-".join([*words, str(self.seed)]).replace(" × ", "-by-").replace(" ", "-")


def tasks(size: Size) -> list[Task]:
    """All runs, those that take long first."""
    seeds = range(size.seeds)
    models = [Task(kind, seed) for kind in reversed(KINDS) for seed in seeds]
    sound = [Task("decoder", 100 + seed, is_alarm=True) for seed in range(size.sound)]
    faulty = [
        Task("decoder", 200 + seed, True, fault) for fault in (*EVENTS, *STARTS) for seed in seeds
    ]
    return [*models, *sound, *faulty]


class Text(NamedTuple):
    """The corpus: token ids of what is trained on, with the words they are of, and of what is held
    out.
    """

    tokenizer: PreTrainedTokenizerFast
    token_ids: Tensor  # (n,)
    word_ids: Tensor  # (n,): the word that each token is of, -1 for none
    word_types: Tensor  # (n,)
    held_out: Tensor  # (m,)

    @property
    def surprise(self) -> Tensor:
        """Nats of each token type by the frequencies of the text."""
        counts = self.token_ids.bincount(minlength=len(self.tokenizer)) + 1.0
        return (counts.sum() / counts).log()


@cache
def read_text(vocab_size: int, topics: int | None) -> Text:
    """Python's documentation, or its first topics, tokenized."""
    text, held_out = split_held_out(builtin_corpus()[:topics])
    tokenizer = train_tokenizer(text, vocab_size)
    encoding = tokenizer(text, add_special_tokens=False)
    token_ids = encoding["input_ids"]
    word_ids, word_types = words_of(token_ids, encoding.word_ids(), tokenizer)
    held_out_ids = torch.tensor(tokenizer.encode(held_out))
    return Text(tokenizer, torch.tensor(token_ids), word_ids, word_types, held_out_ids)


def words_of(
    token_ids: list[int], places: list[int | None], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """The word that each token is of, and the type of this word; -1 for white space.

    ``places`` has equal numbers for consecutive tokens of one word.
    """
    types = dict[str, int]()
    word_ids, word_types = list[int](), list[int]()
    for number, (_, run) in enumerate(groupby(places)):
        count = len([*run])
        tokens = token_ids[len(word_ids) : len(word_ids) + count]
        word = tokenizer.decode(tokens, clean_up_tokenization_spaces=False).strip()
        word_ids += [number if word else -1] * count
        word_types += [types.setdefault(word, len(types)) if word else -1] * count
    return torch.tensor(word_ids), torch.tensor(word_types)


class Setting:
    """A model of a kind, and how it is fed: the part of a run that does not depend on its fault."""

    def __init__(self, kind: Kind, training: Training, size: Size) -> None:
        self.kind = kind
        self.training = training
        self.text = read_text(size.vocab_size, size.topics)
        self.is_encoder = kind != "decoder"
        self.num_tokens = len(self.text.tokenizer)
        self.mask_id, self.first, self.last = range(self.num_tokens, self.num_tokens + 3)
        # tokens of a sequence without special ones
        self.body = training.seq_len - 2 * self.is_encoder
        self.special = [self.first, self.last] if self.is_encoder else []
        self.windows = self.text.token_ids.unfold(0, self.body, 1)

    def new_model(self) -> PreTrainedModel:
        """The model with random weights."""
        training, tokenizer = self.training, self.text.tokenizer
        if self.kind == "decoder":
            return new_decoder(tokenizer, training.num_layers, training.width, training.seq_len)
        options: dict[str, Any] = {
            "vocab_size": self.num_tokens + 3,
            "hidden_size": training.width,
            "num_hidden_layers": training.num_layers,
            "num_attention_heads": training.width // HEAD_WIDTH,
            "intermediate_size": 4 * training.width,
            "max_position_embeddings": training.seq_len + 2,
            "type_vocab_size": 1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.06,  # at width 128 as far from 1 / √d as 0.02 is at 768
            "pad_token_id": tokenizer.eos_token_id,  # which the text has none of
        }
        if self.kind == "pre-LN":
            return RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(**options))
        return BertForMaskedLM(BertConfig(**options))

    def surrounded(self, token_ids: Tensor) -> Tensor:
        """Sequences with an encoder's special tokens."""
        ends = [torch.full((len(token_ids), 1), each) for each in self.special]
        return torch.cat((ends[0], token_ids, ends[1]), 1) if ends else token_ids

    def inputs(
        self, token_ids: Tensor, generator: torch.Generator, masked: float = MASKED
    ) -> dict[str, Tensor]:
        """What the model is called with for the loss on sequences, shape (sequences, body)."""
        token_ids = self.surrounded(token_ids)
        if not self.is_encoder:
            return {"input_ids": token_ids, "labels": token_ids}
        chosen = (torch.rand(token_ids.shape, generator=generator) < masked) & (
            token_ids < self.num_tokens
        )
        shown = torch.rand(token_ids.shape, generator=generator) < 0.1
        return {
            "input_ids": token_ids.masked_fill(chosen & ~shown, self.mask_id),
            "labels": token_ids.masked_fill(~chosen, -100),
        }

    @cache  # noqa: B019 - a process has a few
    def held_out(self) -> tuple[dict[str, Tensor], float]:
        """Inputs for the loss held out, and that loss by the frequencies of tokens alone."""
        sequences = cut_sequences([self.text.held_out.tolist()], self.body)
        inputs = self.inputs(sequences, torch.Generator().manual_seed(0))
        found = inputs["labels"] if self.is_encoder else sequences[:, 1:]
        return inputs, float(self.text.surprise[found[found >= 0]].mean())

    def places(self, num_tokens: int, seed: int, *, in_a_row: bool = False) -> Tensor:
        """Numbers of the sequences of a probe, drawn at random or following each other."""
        number = len(self.text.token_ids) // self.body
        take = num_tokens // self.training.seq_len
        generator = torch.Generator().manual_seed(seed)
        if in_a_row:
            return torch.randint(number - take + 1, (), generator=generator) + torch.arange(take)
        return torch.randperm(number, generator=generator)[:take]

    def sequences(self, of_tokens: Tensor, places: Tensor) -> Tensor:
        """Sequences of what there is for each token of the text."""
        return of_tokens[: len(of_tokens) // self.body * self.body].reshape(-1, self.body)[places]


def measure(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> pd.DataFrame:
    """Records of the blocks for sequences of token ids."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), embedgeo.observe(model.base_model, **options) as geometry:
        model.base_model(input_ids=input_ids)
    model.train(was_training)
    return geometry.to_frame()


def of_ranges(model: PreTrainedModel, token_ids: Tensor) -> Iterator[pd.DataFrame]:
    """Regressions over the token types of several frequencies."""
    with torch.no_grad(), embedgeo.observe(model.base_model) as geometry:
        model.base_model(input_ids=token_ids)
    table = geometry.token_tables()
    for least, most in COUNT_RANGES:
        for layer, types in table[table["n"].between(least, most)].groupby("layer"):
            columns = {key: torch.tensor(types[key].to_numpy(dtype=float)) for key in "nQMV"}
            found = {key: float(value) for key, value in type_regressions(columns).items()}
            frame = pd.DataFrame({"metric": found.keys(), "value": found.values()})
            yield frame.assign(layer=layer, variant=f"types {least} to {most}")


def of_processing(setting: Setting, model: PreTrainedModel, token_ids: Tensor) -> pd.DataFrame:
    """Cosines of rows at the middle block, as they are and after processing that is fitted on them:
    of two rows (mean and spread), of two of one token, and of the means of two sequences.
    """
    half_way = setting.training.num_layers // 2
    with torch.no_grad():
        hidden = model.base_model(input_ids=token_ids, output_hidden_states=True).hidden_states
    x = hidden[half_way].double()
    flat = x.flatten(0, 1)
    centred = x - flat.mean(0)
    scale = flat.std(0, correction=0)
    _, singular, axes = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    # rows that a norm has made do not vary along one direction, but for rounding
    varies = singular.square() > 1e-7 * singular[0].square()
    processed = (
        x,
        centred / scale,
        centred @ axes[varies].T / singular[varies] * len(flat) ** 0.5,
        centred - centred @ axes[:3].T @ axes[:3],
    )
    frames = []
    for name, rows in zip(PROCESSED, processed, strict=True):
        unit = nn.functional.normalize(rows.flatten(0, 1), dim=-1)
        pooled = nn.functional.normalize(rows.mean(1), dim=-1)
        generator = torch.Generator().manual_seed(0)
        pairs = torch.randint(len(unit), (2, 100_000), generator=generator)
        cosines = (unit[pairs[0]] * unit[pairs[1]]).sum(-1)[pairs[0] != pairs[1]]
        sums = torch.zeros(int(token_ids.max()) + 1, unit.shape[1], dtype=unit.dtype)
        sums.index_add_(0, token_ids.flatten(), unit)
        n = token_ids.flatten().bincount().double()
        found = {
            "cosine": cosines.mean(),
            "cosine_std": cosines.std(),
            "cosine_same": (sums.square().sum() - n.sum()) / (n * (n - 1)).sum(),
            "cosine_pooled": (pooled.sum(0).square().sum() - len(pooled))
            / (len(pooled) * (len(pooled) - 1)),
        }
        values = [float(value) for value in found.values()]
        frames.append(
            pd.DataFrame({"metric": found.keys(), "value": values, "variant": f"rows {name}"})
        )
    return pd.concat(frames).assign(layer=f"block.{half_way - 1:02}", layer_index=half_way)


_WITH_SPECTRUM = partial(default_metrics, spectrum=True)


def _spectrum(dim: int) -> list[nn.Module]:
    return [Anisotropy(dim, spectrum=True)]


def apart(dim: int) -> list[nn.Module]:
    """The intrinsic dimension without neighbours of the own sequence."""
    return [IntrinsicDimension(dim, neighbors="other_sequences")]


def of_last_rows(setting: Setting, model: PreTrainedModel) -> pd.DataFrame:
    """The spectrum that Li et al. follow: of the last row of every sequence, after the last
    norm.
    """
    token_ids = setting.sequences(
        setting.text.token_ids, torch.arange(len(setting.text.token_ids) // setting.body)
    )
    found = measure(model, token_ids, metrics=_spectrum, rows="last", layers="final_norm")
    return found.assign(variant="last rows")


def final_measurements(
    setting: Setting, size: Size, seed: int, before: PreTrainedModel, model: PreTrainedModel
) -> Iterator[pd.DataFrame]:
    """What is measured of a trained model alone, and of it beside the model some steps before."""
    text = setting.text
    places = setting.places(size.large_probe, seed)
    token_ids = setting.surrounded(setting.sequences(text.token_ids, places))

    def large(variant: str, input_ids: Tensor = token_ids, **options: Any) -> pd.DataFrame:
        return measure(model, input_ids, **{"metrics": _WITH_SPECTRUM, **options}).assign(
            variant=variant
        )

    yield large("tokens", jackknife=16)
    yield large("other sequences", metrics=apart)
    yield large("no first token", skip_first_positions=1)
    if setting.special:
        yield large("no special tokens", ignore_token_ids=setting.special)
    row = setting.places(size.large_probe, seed, in_a_row=True)
    yield large("text in a row", setting.surrounded(setting.sequences(text.token_ids, row)))
    word_ids, word_types = (
        setting.sequences(each, places) for each in (text.word_ids, text.word_types)
    )
    if setting.special:
        word_ids = nn.functional.pad(word_ids, (1, 1), value=-1)
        word_types = nn.functional.pad(word_types, (1, 1))
    yield large("words", rows="words", word_ids=word_ids, token_ids=word_types)
    yield from gaussian_rows(setting, model, token_ids, seed)
    yield from of_ranges(model, token_ids)
    yield of_processing(setting, model, token_ids)
    if seed:  # errors are compared for one run of each kind
        return
    for num_tokens in size.probe_sizes:
        for probe in range(size.probes):
            ids = setting.surrounded(
                setting.sequences(text.token_ids, setting.places(num_tokens, 1000 + probe))
            )
            jackknife = 16 if num_tokens == size.probe and probe < 4 else 0
            for variant, each in (("before", before), ("after", model)):
                yield measure(each, ids, metrics=_WITH_SPECTRUM, jackknife=jackknife).assign(
                    variant=variant, num_tokens=num_tokens, probe=probe
                )


def gaussian_rows(
    setting: Setting, model: PreTrainedModel, token_ids: Tensor, seed: int
) -> Iterator[pd.DataFrame]:
    """Metrics of Gaussian rows in place of hidden states: isotropic, and of the same mean and
    covariance.
    """
    with torch.no_grad():
        hidden = model.base_model(input_ids=token_ids, output_hidden_states=True).hidden_states
    names = ["embed", *(f"block.{i:02}" for i in range(len(hidden) - 1))]
    if setting.kind != "post-LN":
        names[-1] = "final_norm"
    generator = torch.Generator().manual_seed(seed)
    for index, (name, x) in enumerate(zip(names, hidden, strict=True)):
        rows = x.flatten(0, 1).double()
        centred = rows - rows.mean(0)
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
        noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
        same = rows.mean(0) + noise * variances.clamp(min=0).sqrt() @ directions.T
        for variant, drawn in (("isotropic", noise), ("same covariance", same)):
            metrics = default_metrics(rows.shape[1], seed, spectrum=True)
            values = dict[str, float]()
            for metric in metrics:
                metric.update(drawn.reshape(x.shape), token_ids)
                values |= {key: float(value) for key, value in metric.compute().items()}
            frame = pd.DataFrame({"metric": values.keys(), "value": values.values()})
            yield frame.assign(layer=name, layer_index=index, variant=variant)


def measured_steps(last: int) -> set[int]:
    """Steps in half octaves, 0, 1, 2, 3, 4, 6, 8, 11 … and the last."""
    return {0, *(step for i in range(40) if (step := round(2 ** (i / 2))) < last), last}


def onset(training: Training) -> int:
    """Step at which faults of the middle begin."""
    return training.steps // 2 + training.steps // 10


def rate(task: Task, training: Training, step: int) -> float:
    """The learning rate: a warm-up of a twentieth of the steps, then a cosine, unless a fault
    changes it.
    """
    warm_up = 0 if task.fault == "no warm-up" else training.steps // 20
    share = learning_share(step, training.steps, warm_up)
    is_high = task.fault == "rate × 10" or (
        task.fault == "rate jumps × 10" and step >= onset(training)
    )
    return training.learning_rate * share * (10 if is_high else 1)


def batch(
    task: Task, setting: Setting, step: int, generator: torch.Generator, *, is_faulty: bool
) -> dict[str, Tensor]:
    """A training batch, which may have noise for text or labels that are shifted once more."""
    training = setting.training
    places = torch.randint(len(setting.windows), (training.batch_size,), generator=generator)
    token_ids = setting.windows[places]
    if (
        task.fault == "noise for text"
        and is_faulty
        and step < onset(training) + training.steps // 10
    ):
        token_ids = torch.randint(setting.num_tokens, token_ids.shape, generator=generator)
    inputs = setting.inputs(token_ids, generator, training.masked)
    if task.fault == "labels shifted" and is_faulty:
        inputs["labels"] = nn.functional.pad(token_ids[:, 1:], (0, 1), value=-100)
    return inputs


def take_step(
    task: Task, model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, is_faulty: bool
) -> None:
    """A step of the optimizer, whose gradients may be below what float16 can hold, or whose model
    loses a head.
    """
    if task.fault == "float16 underflow" and is_faulty:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad = (weight.grad / 4096).half().float() * 4096
    optimizer.step()
    optimizer.zero_grad()
    if task.fault == "dead head" and is_faulty:
        half_way = model.config.num_hidden_layers // 2
        output: Any = model.get_submodule(f"gpt_neox.layers.{half_way}.attention.dense")
        with torch.no_grad():
            output.weight[:, :HEAD_WIDTH] = 0.0


def train(task: Task, size: Size) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and measure: values by step, layer and metric, and the losses."""
    training = size.alarms if task.is_alarm else size.trainings[task.kind]
    setting = Setting(task.kind, training, size)
    last = training.steps // 2 if task.fault in STARTS else training.steps
    torch.manual_seed(task.seed)
    model = setting.new_model()
    if task.fault == "weights × 4":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4 if weight.ndim > 1 else 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(task.seed)
    steps = {*range(0, last, size.alarm_every), last} if task.is_alarm else measured_steps(last)
    probe = setting.places(size.alarm_probe if task.is_alarm else size.probe, 0)
    probe_ids = setting.surrounded(setting.sequences(setting.text.token_ids, probe))
    make = default_metrics if task.is_alarm else _WITH_SPECTRUM
    held_out, unigram = setting.held_out()
    frames = list[pd.DataFrame]()
    losses = list[dict[str, float]]()
    before = model
    for step in range(last + 1):
        if step in steps:
            frames.append(
                measure(model, probe_ids, metrics=make).assign(step=step, variant="training")
            )
            with torch.no_grad():
                of_held_out = float(model.eval()(**held_out).loss)
            model.train()
            losses.append({"step": step, "held_out": of_held_out, "unigram": unigram})
            if not (task.is_alarm or setting.is_encoder):
                frames.append(of_last_rows(setting, model).assign(step=step))
            if step < last and not task.is_alarm:
                before = deepcopy(model)
        if step < last:
            is_faulty = step >= onset(training)
            loss = model(**batch(task, setting, step, generator, is_faulty=is_faulty)).loss
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(task, training, step)
            take_step(task, model, optimizer, is_faulty=is_faulty)
            losses.append({"step": step, "loss": loss.item()})
    if not task.is_alarm:
        of_trained = final_measurements(setting, size, task.seed, before, model)
        frames += [frame.assign(step=last) for frame in of_trained]
    names: dict[str, Any] = {
        "kind": task.kind,
        "seed": task.seed,
        "fault": task.fault,
        "is_alarm": task.is_alarm,
    }
    names["onset"] = onset(training)
    return pd.concat(frames, ignore_index=True).assign(**names), pd.DataFrame(losses).assign(
        **names
    )


def run(task: Task, size: Size, folder: Path) -> str:
    """Do a run unless its tables are there; the losses, which are written last, say so."""
    torch.set_num_threads(1)
    values_file, losses_file = folder / f"{task}.values.parquet", folder / f"{task}.losses.parquet"
    if not losses_file.exists():
        values, losses = train(task, size)
        for table, file in ((values, values_file), (losses, losses_file)):
            temporary = file.with_suffix(".new")
            table.to_parquet(temporary, index=False)
            temporary.replace(file)
    return str(task)


def do_runs(size: str, folder: Path, processes: int) -> None:
    """Do all runs that have not been done.

    Raises:
        ValueError: the folder has runs of another size, of other settings or of another version of
            this file.
    """
    code = sha256(Path(__file__).read_bytes()).hexdigest()
    settings = json.dumps(
        {"embedgeo": embedgeo.__version__, "code": code, **asdict(SIZES[size])}, indent=1
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if file.exists() and file.read_text() != settings:
        raise ValueError(
            f"--folder must be empty or have runs of these settings and code; {folder} has others. "
            f"Name another."
        )
    file.write_text(settings)
    todo = tasks(SIZES[size])
    run_task = partial(run, size=SIZES[size], folder=folder)
    for done, task in enumerate(shared_among(processes, run_task, todo), 1):
        print(f"{done} of {len(todo)}: {task}", flush=True)


def shared_among(
    processes: int, function: Callable[..., Result], *arguments: Iterable[Any]
) -> Iterator[Result]:
    """What `map` yields, by new processes; by this one if it is one."""
    if processes == 1:
        yield from map(function, *arguments)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, *arguments)


def read_runs(folder: Path, size: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Values and losses of all runs."""
    names: Sequence[Task] = tasks(SIZES[size])
    values, losses = (
        pd.concat(
            [pd.read_parquet(folder / f"{task}.{table}.parquet") for task in names],
            ignore_index=True,
        )
        for table in ("values", "losses")
    )
    return values, losses


def main(
    size: Literal["full", "small"] = "full",
    folder: Path = Path("runs/findings"),
    processes: int = 2,
) -> None:
    """Do the runs."""
    do_runs(size, folder, processes)


if __name__ == "__main__":
    CLI(main)
