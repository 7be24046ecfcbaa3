"""A checkpoint measured: its files are fetched, its model is loaded and run over the probe text."""

import ctypes
import gc
import json
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.structure import (
    find_logits,
    input_embedding,
    measured_model,
    output_embedding,
    weights_device,
)
from embedgeo.checkpoints import loading
from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import reason
from embedgeo.geometry import Geometry
from embedgeo.metrics import default_metrics
from embedgeo.metrics.layer import MetricFactory, require_num_groups
from embedgeo.results.files import remove_leftovers, temporary_path
from embedgeo.results.parquet import TABLES
from embedgeo.results.records import Record, model_record
from embedgeo.results.samples import LayerSample
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import Batch, ProbeText, require_one_side, require_vocabulary

_POSITIONS = 128  # whose logits are held at a time
_METRIC_OPTIONS = [
    name for name in signature(default_metrics).parameters if hasattr(SweepSettings, name)
]


@dataclass
class Measured:
    """Records, tables, further facts and sample of a checkpoint, see `SweepFolder.write`; and the
    checkpoint with the digests that it had.
    """

    records: list[Record]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    sample: dict[str, LayerSample] | None = None
    checkpoint: Checkpoint | None = None


class Downloads:
    """Fetches checkpoints one at a time: with ``evict`` into a temporary folder inside ``out``,
    else into the cache.
    """

    def __init__(self, out: Path, *, evict: bool) -> None:
        # of killed processes of this machine, also where another one opens the sweep folder
        remove_leftovers(out)
        self.folder = temporary_path(out / "downloads")
        self._evict = evict
        self._thread = ThreadPoolExecutor(1)
        self._fetches: dict[str, Future[Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # then a download may not be waited for
        is_stopped = kind is not None and not issubclass(kind, Exception)
        self._thread.shutdown(wait=not is_stopped, cancel_futures=True)
        self.discard()

    def discard(self) -> None:
        """Remove all that has been downloaded."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, checkpoint: Checkpoint) -> Future[Path]:
        """Begin to fetch a checkpoint, unless that has begun already; the result is its folder or
        file.
        """
        if checkpoint.name not in self._fetches:
            cache = self.folder / checkpoint.name if self._evict else None
            fetch = replace(checkpoint, cache=cache).fetch
            self._fetches[checkpoint.name] = self._thread.submit(fetch)
        return self._fetches[checkpoint.name]

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove what was downloaded of a checkpoint, and what a device map keeps on disk."""
        self._fetches.pop(checkpoint.name, None)
        shutil.rmtree(self.folder / checkpoint.name, ignore_errors=True)


@dataclass
class Worker:
    """Measures checkpoints, each on the text of its model."""

    settings: SweepSettings
    texts: Mapping[str, ProbeText]  # by `Checkpoint.model`
    downloads: Downloads
    make_metrics: MetricFactory

    def measure(
        self, checkpoint: Checkpoint, choose_next: Callable[[], Checkpoint | None]
    ) -> Measured:
        """Measure a checkpoint, and fetch the next one meanwhile."""
        text = self.texts[checkpoint.model]
        try:
            checkpoint = checkpoint.hashed()
            model = self._load(checkpoint)
            require_vocabulary(model, text.token_ids)
            if (upcoming := choose_next()) is not None:
                self.downloads.start(upcoming)
            measured = self._measure_model(model, text)
            return replace(measured, checkpoint=checkpoint)
        finally:
            self.downloads.remove(checkpoint)

    def _load(self, checkpoint: Checkpoint) -> nn.Module:
        settings = self.settings
        path = self.downloads.start(checkpoint).result()
        if path.is_dir():
            require_one_side(
                loading.load_config(path, trust_remote_code=settings.trust_remote_code)
            )
        if settings.device_map is not None:
            gc.collect()  # accelerate's hooks keep the model before this one in reference cycles
        return replace(checkpoint, path=path).load(
            getattr(torch, settings.dtype),
            chosen_device(settings),
            device_map=settings.device_map,
            offload_folder=self.downloads.folder / checkpoint.name / "offloaded",
        )

    def _measure_model(self, model: nn.Module, text: ProbeText) -> Measured:
        """Measure a model, which has no weights afterwards."""
        settings = self.settings
        with torch.inference_mode():
            geometry = Geometry(
                model,
                settings.layer_patterns,
                self.make_metrics,
                text.skip_first_positions,
                text.ignore_token_ids,
                rows=settings.rows,
                jackknife=settings.jackknife,
                skip_massive=settings.skip_massive,
            )
        try:
            with torch.inference_mode():
                loss = self._run(geometry, text)
            network = measured_model(model)
            # "meta" unties those tied
            num_parameters = sum(parameter.numel() for parameter in network.parameters())
            facts = {"model_class": type(network).__name__, "num_parameters": str(num_parameters)}
            if not text.is_even:
                facts["text_lengths"] = json.dumps(Counter(text.lengths.tolist()), sort_keys=True)
            if settings.device_map is None:
                model.to("meta")  # also where others refer to it
            _release_memory()
            with torch.inference_mode():
                return self._results(geometry, loss, text, facts)
        finally:
            geometry.close()
            _release_memory()

    def _run(self, geometry: Geometry, text: ProbeText) -> "TokenLoss":
        # with a device map, accelerate's hooks move what enters each part
        device = weights_device(geometry.model)
        modules = [call.module for layer in geometry.layers for call in layer.calls]
        loss = TokenLoss(geometry.model, modules, text.mask_token_id)
        token_ids = text.token_ids[: int(text.lengths.max())].view(1, -1).to(device)
        loss.find_head(token_ids)
        if loss.is_wanted and text.mask_token_id is None:
            loss.require_unseen(token_ids)
        # some models join neighbouring embeddings, also where the mask leaves one out
        padding = getattr(input_embedding(geometry.model), "padding_idx", None) or 0
        for on_cpu in text.batches(self.settings.batch_size, padding):
            batch = on_cpu.to(device)
            if batch.word_ids is not None:
                geometry.probe.word_ids = batch.word_ids
            if batch.word_types is not None:
                geometry.probe.token_ids = batch.word_types
            with geometry.probe:
                states = loss.run(batch.token_ids, batch.mask)
            loss.add(states, batch)
            # they may be the logits of the whole batch, and the next ones are made in their place
            del states
        return loss

    def _results(
        self, geometry: Geometry, loss: "TokenLoss", text: ProbeText, facts: dict[str, str]
    ) -> Measured:
        records = geometry.records()
        if silent := geometry.silent_layers():
            raise ValueError(
                f"layers must be reached by a forward pass; {', '.join(silent)} never was. Leave "
                f"it out."
            )
        total, count = loss.total.tolist()
        if loss.is_wanted and count:
            records.append(model_record("loss", total / count))
        tables = geometry.layer_tables()
        if self.settings.token_tables:
            types = geometry.token_tables()
            if types.empty:
                raise ValueError(
                    "token_tables needs TokenMoments among the metrics; there is none. Leave it "
                    "out."
                )
            sizes = types["token_id"].map(text.type_sizes) if text.words else 1.0
            tokens = types["token_id"].map(text.token_texts)
            tables["tokens"] = types.assign(num_tokens=sizes, token=tokens)
        sample = geometry.samples() if self.settings.save_samples else None
        if self.settings.jackknife:
            # of too few sequences
            tables.setdefault("jackknife", pd.DataFrame(columns=TABLES["jackknife"].names))
        return Measured(records, tables, facts, sample)


def chosen_device(settings: SweepSettings) -> torch.device:
    """The device that models run on, which this machine must have."""
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ValueError(
            "device must be one that this machine has; torch finds no cuda. Give --device cpu."
        )
    return torch.device(settings.device or ("cuda" if has_cuda else "cpu"))


def _release_memory() -> None:
    """Give freed memory back to the system, which glibc does not do by itself."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class TokenLoss:
    """Runs a model over batches, and sums its loss at next tokens; for an encoder with a mask
    token, at masked ones.
    """

    def __init__(
        self,
        model: nn.Module,
        measured: Collection[nn.Module],
        mask_token_id: int | None,
    ) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)  # the sum of the losses, and their number
        # a model that gives no logits has none, either
        self.is_wanted = mask_token_id is not None or not loading.is_encoder_model(model)
        self._model = measured_model(model)
        self._mask_token_id = mask_token_id
        self._measured = measured  # which run on all positions
        self._head: nn.Linear | None = None

    def find_head(self, token_ids: Tensor) -> None:
        """Find the linear module whose output is the logits, with nothing that scales or caps them,
        by running some tokens.
        """
        head = output_embedding(self._model)
        if not isinstance(head, nn.Linear) or head in self._measured:
            return
        # an error of the model shows when it is measured
        with suppress(Exception), _shortened(head) as inputs:
            logits = find_logits(self._model, self._forward(token_ids))
            product = F.linear(inputs[0][:, -1:], head.weight, head.bias)
            # not of weights that are elsewhere, or of a subclass with a forward pass of its own
            if logits is not None and torch.equal(product, logits):
                self._head = head

    def require_unseen(self, token_ids: Tensor) -> None:
        """Leave the loss out, and say so, if the model sees the tokens that it is to predict: if a
        position changes with those after it.
        """
        last = token_ids.shape[1] // 4 * 2  # even, where no block of positions ends
        others = token_ids.clone()
        others[:, last + 1 :] = others[:, :1]
        states = self.run(token_ids)
        changed = self.run(others)
        if states is not None and changed is not None:
            change = (changed[0, last] - states[0, last]).std()
            # rounding depends on other tokens where experts take theirs together
            if change > torch.finfo(states.dtype).eps ** 0.5 * states[0, last].std():
                self._leave_out(
                    "its positions see those after them, and so the tokens that it would have to "
                    "predict"
                )

    def _leave_out(self, why: str) -> None:
        self.is_wanted = False
        warnings.warn(f"no loss is recorded of {type(self._model).__name__}: {why}.", stacklevel=3)

    def run(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Run a batch; returns the input of the head, or the logits if no head was found, or None
        without logits of each token.
        """
        if self._head is None:
            states = find_logits(self._model, self._forward(token_ids, mask))
            return states if states is not None and states.shape[:-1] == token_ids.shape else None
        with _shortened(self._head) as inputs:
            self._forward(token_ids, mask)
        return inputs[0]

    def add(self, states: Tensor | None, batch: Batch) -> None:
        """Add the loss of a batch, given what `run` returned, unless the model gives no logits."""
        token_ids, mask, predicts = batch[:3]
        if not self.is_wanted:
            return
        if predicts is not None and self._mask_token_id is not None:
            states = self.run(token_ids.masked_fill(predicts, self._mask_token_id), mask)
        # of probabilities, also rounded to bfloat16, the sum at each position is 1
        if states is None or (
            self._head is None and (states[0].float().sum(-1) - 1).abs().max() < 0.02
        ):
            self._leave_out("it gives no logits of each token, which probabilities are not")
            return
        targets = token_ids
        if predicts is None:  # at each position the next token
            predicts = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
            predicts = predicts.roll(-1, 1)
            predicts[:, -1] = False
            targets = token_ids.roll(-1, 1)
        states = states.flatten(0, 1)
        targets = targets.flatten().to(states.device)
        for part in predicts.flatten().nonzero().flatten().to(states.device).split(_POSITIONS):
            logits = states[part]
            if self._head is not None:
                logits = F.linear(logits, self._head.weight, self._head.bias)
            losses = F.cross_entropy(logits.float(), targets[part], reduction="none")
            self.total += torch.tensor(
                [float(losses.cpu().double().sum()), len(part)], dtype=torch.float64
            )

    def _forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Any:
        if not isinstance(self._model, PreTrainedModel):
            return self._model(token_ids)
        padding = {} if mask is None else {"attention_mask": mask.long()}
        return self._model(input_ids=token_ids, **padding)


@contextmanager
def _shortened(head: nn.Module) -> Iterator[list[Tensor]]:
    """Run the head on the last position only; yields a list that its inputs are appended to."""
    inputs: list[Tensor] = []

    def shorten(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(shorten)
    try:
        yield inputs
    finally:
        handle.remove()


def metrics_function(settings: SweepSettings) -> MetricFactory:
    """The function named by ``metrics``, with its options: it makes the metrics of a layer, given
    its width.
    """
    require_num_groups(settings.jackknife)
    name = settings.metrics
    rule = (
        "metrics must name a function of a layer's width as package.function, in a module that can "
        "be imported"
    )
    function = loading.import_function(name, rule)
    values: dict[str, Any] = {option: getattr(settings, option) for option in _METRIC_OPTIONS}
    values["count_range"] = tuple(settings.count_range)
    # those that are not given are left to the function, which has defaults of its own
    options = {
        option: value for option, value in values.items() if value != getattr(SweepSettings, option)
    }
    try:
        signature(function).bind(1, **options)
    except TypeError as error:
        raise ValueError(
            "metrics must name a function that takes a layer's width and the options given with "
            f"it; {name} does not ({reason(error)})."
        ) from error
    return partial(function, **options)
