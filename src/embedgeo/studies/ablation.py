"""Losses with other hidden states: with what lacks a part of a layer's, and with a layer's own in
place of the last's.

The first are ablations, the second the logit lens: final norm and head read what is there at a
layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input, mode_restorer
from embedgeo.capture.forward_inputs import require_exclusions
from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.structure import (
    find_logits,
    is_hugging_face,
    measured_model,
    named_parts,
    submodels,
    weights_device,
)
from embedgeo.formatting import listed
from embedgeo.functional.distributed import all_reduce_sum, reduce_states
from embedgeo.functional.precision import accumulator_dtype, matmul_precision, on_one_device
from embedgeo.functional.processing import require_removed
from embedgeo.functional.rows import NO_TYPE, sequence_positions
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.functional.tokens import TokenTable, token_table
from embedgeo.results.records import Record, model_record

NUM_REMOVED = (1, 3, 10)
"""Numbers of directions, or coordinates, that are taken away, unless told otherwise."""


def replacements(num_removed: Sequence[int] = NUM_REMOVED) -> tuple[str, ...]:
    """Names of the replacements of a hidden state, by others than itself.

    Raises:
        ValueError: ``num_removed``, of directions and of coordinates, are not distinct numbers of
            at least 1.
    """
    require_removed(num_removed, "removed_directions")
    return (
        "without_offset",
        *(f"without_{k}_directions" for k in num_removed),
        *(f"without_{k}_coordinates" for k in num_removed),
        "without_context",
        "without_token",
        "as_noise",
    )


class RowStatistics(NamedTuple):
    """Statistics that rows are replaced by: their scatter, and the mean of each token type."""

    scatter: Scatter
    types: TokenTable

    @classmethod
    def of(cls, rows: Tensor, token_ids: Tensor) -> "RowStatistics":
        """The statistics of rows, shape (n, d), of these token types, shape (n,), without those
        with a NaN or Inf.
        """
        finite = rows.isfinite().all(1)
        rows, token_ids = rows[finite].to(accumulator_dtype(rows.device)), token_ids[finite]
        if len(rows):
            return cls(row_scatter(rows), token_table(rows, token_ids))
        ids, *fields = TokenTable.empty(rows.shape[1])
        return cls(row_scatter(rows), TokenTable(ids, *(field.to(rows) for field in fields)))

    def merge(self, other: "RowStatistics") -> "RowStatistics":
        """The statistics of the rows of both."""
        return RowStatistics(self.scatter.merge(other.scatter), self.types.merge(other.types))


class Substitutes(NamedTuple):
    """Mean, axes and token means by which rows are replaced.

    Attributes:
        mean: μ, shape (d,).
        directions: eigenvectors of the covariance Σ as columns, that of the largest eigenvalue
            first, shape (d, d); zeros where the rows, which may be fewer than d, have no variance.
        deviations: square roots of its eigenvalues, in this order, shape (d,).
        coordinates: the coordinates, that of the largest variance first, shape (d,).
        token_ids: the token types that have a mean, ascending, shape (T,).
        token_means: their mean rows, shape (T, d).
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    coordinates: Tensor
    token_ids: Tensor
    token_means: Tensor

    @classmethod
    def of(cls, statistics: RowStatistics) -> "Substitutes":
        """The substitutes for rows, from the statistics of others."""
        n, mean, scatter = statistics.scatter
        values, vectors = torch.linalg.eigh(scatter / n.clamp(min=1))
        coordinates = scatter.diagonal().argsort(descending=True, stable=True)
        types = statistics.types.typed()
        values, vectors = values.flip(0), vectors.flip(1)
        vectors = vectors * (values > len(values) * torch.finfo(values.dtype).eps * values[0])
        return cls(
            mean, vectors, values.clamp(min=0).sqrt(), coordinates, types.token_ids, types.mean
        )

    def replaced(self, name: str, rows: Tensor, token_ids: Tensor, normal: Tensor) -> Tensor:
        """Rows in place of those given, of the same dtype; rows of token types without a mean keep
        what needs one.

        Args:
            name: one of `replacements`; any other one leaves the rows as they are.
            rows: shape (n, d).
            token_ids: shape (n,).
            normal: standard normal numbers, shape (n, d), of which noise is made.
        """
        x = rows.to(self.mean.dtype)
        with matmul_precision(rows.device):
            if name == "without_offset":
                x = x - self.mean
            elif name in ("without_context", "without_token"):
                seen = torch.isin(token_ids, self.token_ids)
                means = self.token_means[torch.searchsorted(self.token_ids, token_ids[seen])]
                x = x.index_put((seen,), means if name == "without_context" else x[seen] - means)
            elif name.endswith("_directions"):
                axes = self.directions[:, : int(name.split("_")[1])]
                x = x - (x - self.mean) @ axes @ axes.T
            elif name.endswith("_coordinates"):
                largest = self.coordinates[: int(name.split("_")[1])]
                x = x.index_copy(1, largest, self.mean[largest].expand(len(x), -1))
            elif name == "as_noise":
                x = normal.to(x) @ self.directions  # whose signs must not matter
                x = self.mean + (x * self.deviations) @ self.directions.T
        return x.to(rows.dtype)


def paired_change(
    before: Tensor, after: Tensor, counts: Tensor, half: Tensor
) -> tuple[Tensor, Tensor]:
    """Change of a mean over tokens, the average of that in each half of the sequences, and its
    standard error.

    The error is that of a ratio of sums over sequences, which are taken to be independent; NaN
    where a half has fewer than two sequences with tokens.

    Args:
        before: sum over the tokens of each sequence, shape (S,), float64.
        after: the same, changed.
        counts: number of tokens of each sequence, shape (S,).
        half: marks of the sequences of the second half, shape (S,), bool.

    >>> paired_change(
    ...     torch.zeros(4),
    ...     torch.tensor([2.0, 4.0, 4.0, 6.0]),
    ...     torch.full((4,), 2.0),
    ...     torch.arange(4) > 1,
    ... )
    (tensor(2.), tensor(0.3536))
    """
    changes, squares = [], []
    for own in (~half & (counts > 0), half & (counts > 0)):
        n = counts[own]
        change = (after[own] - before[own]).sum() / n.sum()
        rest = after[own] - before[own] - change * n
        changes.append(change)
        squares.append(
            rest.square().sum() * len(n) / (len(n) - 1) / n.sum().square()
            if len(n) > 1
            else n.sum() / 0
        )
    error = torch.stack(squares).sum().sqrt() / 2
    return torch.stack(changes).mean(), torch.where(error.isinf(), torch.nan, error)


_MASKED = 0.15  # share of the tokens that a masked model's loss is computed at

Agree = Callable[[], AbstractContextManager[None]]


class AblationBatch(NamedTuple):
    """Sequences that a model is run on, and the tokens that its loss is computed at."""

    inputs: Mapping[str, Any]  # what the model is called with by name, ``input_ids`` among it
    real: Tensor  # False = padding, (batch, positions)
    # the token that the logits of each position are to predict, -100: none, (batch, positions)
    targets: Tensor
    # of the sequences among all, (batch,); the even ones are one half, the odd ones the other
    numbers: Tensor

    @property
    def token_ids(self) -> Tensor:
        """What the model reads, shape (batch, positions)."""
        token_ids: Tensor = self.inputs["input_ids"]
        return token_ids


def ablation(
    model: nn.Module,
    batches: Iterable[Any],
    layers: LayerSpec = "blocks",
    *,
    mask_token_id: int | None = None,
    skip_first_positions: int = 1,
    ignore_token_ids: Sequence[int] = (),
    num_removed: Sequence[int] = NUM_REMOVED,
    seed: int = 0,
    verbose: bool = True,
) -> list[Record]:
    """Measure how the loss changes when one layer's output is replaced by what lacks a part of it.

    Layer by layer the rows h of the hidden state are replaced: by themselves (``identity``, which
    changes nothing); without their offset, h − μ; without their top k directions, h − UUᵀ(h − μ);
    without their k coordinates of largest variance, which get their means; by the mean of their
    token type, ``without_context``, or without it, ``without_token``, h − μ_t, where the type is
    known; and by noise, N(μ, Σ). μ, U, Σ and μ_t are those of half of the sequences, every other
    one, and the loss is that of the other half; then the other way round, averaged. The model is
    run in evaluation mode and without gradients, ``1 + 22 × layers`` times over the batches for
    three k, which is said before.

    Args:
        model: a Hugging Face model with a language model head, or one that gives logits of shape
            (batch, positions, vocabulary) for token ids. Of several tensors they are the one named
            ``logits``, or else the one as wide as its embedding table or head.
        batches: token ids of shape (batch, positions), or mappings with ``input_ids`` and, if need
            be, ``attention_mask``, ``position_ids`` and ``labels`` (-100 does not count; default:
            the tokens themselves). A causal model's labels are shifted.
        layers: as for `embedgeo.observe`, without means of layers.
        mask_token_id: the mask token of a masked model, of which 15 % of the tokens are masked, the
            same ones in every pass; not needed where there are labels.
        skip_first_positions: number of first positions of a sequence that are left as they are for
            the keys that end in ``_after_first``.
        ignore_token_ids: tokens whose rows are left as they are.
        num_removed: each k, of directions and of coordinates.
        seed: of the masks and of the noise, which depend on it and on a sequence's number alone.
        verbose: print the number of forward passes.

    Returns:
        Records of each layer, as those of the command ``embedgeo ablate``: the metrics are
        ``loss_change_…``, in nats a token, with standard errors over sequences (paired); NaN where
        a half has fewer than two. Those of layer ``model`` are the loss, and the share of rows
        whose token type the other half does not have, ``unseen_type_share``.

    Raises:
        ValueError: fewer than two sequences, a k that is below 1 or given twice, an encoder-decoder
            model, a mean of layers, no logits of all positions, or a masked model without labels
            and mask token.
    """
    made, count = _given_batches(model, batches, mask_token_id, ignore_token_ids, seed)
    found = resolve_layers(model, layers)
    run = Ablation(
        model,
        dict(enumerate(found)),
        made,
        count,
        skip_first_positions,
        ignore_token_ids,
        num_removed=num_removed,
        seed=seed,
    )
    if verbose:
        print(passes_line(len(found), len(made), num_removed))
    with _evaluating(model):
        return run.records()


def logit_lens(
    model: nn.Module,
    batches: Iterable[Any],
    layers: LayerSpec = "blocks",
    *,
    mask_token_id: int | None = None,
    ignore_token_ids: Sequence[int] = (),
    seed: int = 0,
) -> list[Record]:
    """Measure the loss of what the final norm and the head make of each layer's hidden state.

    The output of the last block is replaced by that of the layer, so that all that the model does
    after its blocks, to the logits, it does to this. At the last block it is the model's own loss.
    The model is run once over the batches for each layer, in evaluation mode and without gradients.

    Sources: nostalgebraist 2020, *interpreting GPT: the logit lens*; the notebook of Razzhigaev et
    al. 2024.

    Args:
        model: as for `ablation`.
        batches: as for `ablation`.
        layers: as for `embedgeo.observe`; those that are the input of the first block or the output
            of a block count.
        mask_token_id: as for `ablation`.
        ignore_token_ids: tokens that are not masked.
        seed: of the masks.

    Returns:
        Records of each layer: ``logit_lens_loss``, in nats a token, with a standard error over
        sequences; NaN where there are fewer than two.

    Raises:
        ValueError: an encoder-decoder model, no list of blocks or none of these layers, no logits
            of all positions, or a masked model without labels and mask token.
    """
    made, count = _given_batches(model, batches, mask_token_id, ignore_token_ids, seed)
    found = lens_layers(model, resolve_layers(model, layers))
    run = Ablation(model, found, made, count, seed=seed)
    with _evaluating(model):
        return run.lens_records()


def lens_layers(model: nn.Module, layers: Sequence[Layer]) -> dict[int, Layer]:
    """Those of some layers that the logit lens reads, by place: the input of the first block, and
    outputs of blocks.

    Raises:
        ValueError: there are none.
    """
    stream = [layer.calls for layer in _stream(model)]
    found = {i: layer for i, layer in enumerate(layers) if layer.calls in stream}
    if not found:
        names = listed([layer.name for layer in layers], 4)
        raise ValueError(
            "the logit lens reads what enters the first block and what blocks give, as "
            'layers="blocks" has it; got '
            f"{names}. Add some."
        )
    return found


def _stream(model: nn.Module) -> list[Layer]:
    """The input of the first block, and the outputs of blocks."""
    layers = resolve_layers(model, "blocks")
    return [layer for layer in layers if not layer.name.endswith("final_norm")]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode."""
    restore = mode_restorer(model)
    model.eval()
    try:
        yield
    finally:
        restore()


def passes_line(num_layers: int, num_batches: int, num_removed: Sequence[int] = NUM_REMOVED) -> str:
    """A sentence on the number of forward passes that an ablation takes.

    >>> passes_line(4, 2)
    'ablation: 178 forward passes (2 batches, 1 + 22 × 4 layers)'
    """
    # the statistics, the identity, and all else with and without the first positions
    of_layer = 2 + 2 * len(replacements(num_removed))
    passes = num_batches * (1 + of_layer * num_layers)
    return (
        f"ablation: {passes:,} forward passes ({num_batches:,} batches, 1 + {of_layer} × "
        f"{num_layers} layers)"
    )


def make_batch(
    inputs: Mapping[str, Any],
    numbers: Tensor,
    *,
    masked: Tensor | None = None,
    mask_token_id: int | None = None,
    labels: Tensor | None = None,
    are_of_masked: bool = False,
) -> AblationBatch:
    """A batch of what a model is called with. Its loss is that at the ``masked`` tokens; without
    them at labels, which are those of a masked model or else shifted; by default at all next
    tokens. Sequences that are padded on the left get their positions.
    """
    token_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    real = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.bool()
    if masked is not None:
        labels = token_ids.masked_fill(~masked, NO_TYPE)
        inputs = {**inputs, "input_ids": token_ids.masked_fill(masked, mask_token_id)}
    targets = (token_ids if labels is None else labels).masked_fill(~real, NO_TYPE)
    if masked is not None or are_of_masked:
        return AblationBatch(inputs, real, targets, numbers)
    if "position_ids" not in inputs and bool((~real[:, :-1] & real[:, 1:]).any()):
        inputs = {**inputs, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    targets = targets.roll(-1, 1).masked_fill(~real, NO_TYPE)
    targets[:, -1] = NO_TYPE
    return AblationBatch(inputs, real, targets, numbers)


def _given_batches(
    model: nn.Module,
    batches: Iterable[Any],
    mask_token_id: int | None,
    ignored: Sequence[int],
    seed: int,
) -> tuple[list[AblationBatch], int]:
    """The batches that a user gives, and the number of their sequences."""
    is_masked = mask_token_id is not None or type(measured_model(model)).__name__.endswith(
        "ForMaskedLM"
    )
    device = weights_device(model)
    made: list[AblationBatch] = []
    first = 0
    for batch in batches:
        given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        given = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        made.append(_given_batch(given, first, is_masked, mask_token_id, ignored, seed))
        first += len(made[-1].numbers)
    return made, first


def _given_batch(
    given: dict[str, Any],
    first: int,
    is_masked: bool,
    mask_token_id: int | None,
    ignored: Sequence[int],
    seed: int,
) -> AblationBatch:
    labels = given.pop("labels", None)
    token_ids = given.get("input_ids")
    if not isinstance(token_ids, Tensor) or token_ids.ndim != 2:
        raise ValueError(
            "batches must be token ids, or mappings with input_ids, of shape (batch, positions); "
            f"got {tuple(getattr(token_ids, 'shape', ())) or type(token_ids).__name__}."
        )
    numbers = first + torch.arange(len(token_ids))
    if labels is not None or not is_masked:
        return make_batch(given, numbers, labels=labels, are_of_masked=is_masked)
    if mask_token_id is None:
        raise ValueError(
            "a masked model needs labels in its batches, or mask_token_id; got neither."
        )
    left_out = torch.tensor([*ignored], dtype=torch.int64, device=token_ids.device)
    may_be_masked = ~torch.isin(token_ids, left_out)
    if (mask := given.get("attention_mask")) is not None:
        may_be_masked &= mask.bool()
    masked = torch.zeros_like(may_be_masked)
    for own, marks, number in zip(may_be_masked, masked, numbers.tolist(), strict=True):
        drawn = torch.rand(int(own.sum()), generator=_generator(seed, number)) < _MASKED
        marks[own] = drawn.to(marks.device)
    return make_batch(given, numbers, masked=masked, mask_token_id=mask_token_id)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 32) + number)


class Ablation:
    """The ablation of layers of a model, given by place, in evaluation mode, on ``num_sequences``
    sequences in all.

    The batches of several ranks are those of each; all of them must then come to `records` and
    `lens_records`. What may fail on one runs inside of ``agree``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[int, Layer],
        batches: Sequence[AblationBatch],
        num_sequences: int,
        skip_first_positions: int = 1,
        ignore_token_ids: Sequence[int] = (),
        *,
        num_removed: Sequence[int] = NUM_REMOVED,
        seed: int = 0,
        agree: Agree = nullcontext,
        has_ranks: bool = False,
    ) -> None:
        require_exclusions(skip_first_positions, ignore_token_ids)
        if len(submodels(model)) > 1:
            raise ValueError(
                f"a decoder or an encoder is needed; {type(measured_model(model)).__name__} is "
                "both. Its blocks cannot be told apart by what they read."
            )
        if means := [layer.name for layer in layers.values() if len(layer.calls) > 1]:
            raise ValueError(
                f"layers must each be the output of a module to be replaced; {listed(means)} is a "
                f"mean."
            )
        self._model = model
        self._network = measured_model(model)
        self._layers = layers
        self._batches = batches
        self._num_sequences = num_sequences
        self._skipped = max(1, skip_first_positions)
        self._ignored = [*ignore_token_ids]
        self._replacements = replacements(num_removed)
        self._seed = seed
        self._agree = agree
        self._has_ranks = has_ranks
        self._parameters = signature(self._network.forward).parameters

    @torch.no_grad()
    def records(self) -> list[Record]:
        """The records of all layers, and of the model."""
        if self._num_sequences < 2:
            raise ValueError(
                f"ablation needs a sequence in each of two halves; got {self._num_sequences} in "
                f"all."
            )
        with eager_mode:
            with self._agree():
                plain = self._losses()
            plain, counts = self._total(plain)
            half = torch.arange(self._num_sequences) % 2 == 1
            found: list[Record] = []
            unseen = math.nan
            for index, layer in self._layers.items():
                with self._agree():
                    statistics = self._statistics(layer)
                if self._has_ranks:
                    scatters = reduce_states([each.scatter for each in statistics.values()])
                    tables = reduce_states(
                        [
                            on_one_device(each.types, each.types.mean.device)
                            for each in statistics.values()
                        ]
                    )
                    statistics = {
                        key: RowStatistics(scatter, types)
                        for key, scatter, types in zip(statistics, scatters, tables, strict=True)
                    }
                substitutes = {key: Substitutes.of(each) for key, each in statistics.items()}
                unseen = _unseen_share(statistics, substitutes)
                width = len(substitutes[0, False].mean)
                others = [
                    (name, after_first)
                    for after_first in (False, True)
                    for name in self._replacements
                ]
                for name, after_first in [("identity", False), *others]:
                    with self._agree():
                        replaced = partial(self._replaced, name, substitutes, after_first)
                        sums = self._losses(partial(_at, layer, replaced))
                    change, error = paired_change(plain, self._total(sums)[0], counts, half)
                    found.append(
                        Record(
                            layer=layer.name,
                            layer_index=index,
                            width=width,
                            metric=f"loss_change_{name}{'_after_first' if after_first else ''}",
                            value=float(change),
                            stderr=float(error),
                        )
                    )
        loss = float(plain.sum() / counts.sum())
        return [*found, model_record("loss", loss), model_record("unseen_type_share", unseen)]

    @torch.no_grad()
    def lens_records(self) -> list[Record]:
        """The records of the logit lens at all layers."""
        last = _stream(self._model)[-1]
        found: list[Record] = []
        with eager_mode:
            for index, layer in self._layers.items():
                widths: list[int] = []
                with self._agree():
                    sums = self._losses(partial(_lens, layer, last, widths))
                sums, counts = self._total(sums)
                loss = sums.sum() / counts.sum()
                several = (counts > 0).sum()
                spread = (sums - loss * counts).square().sum() * several / (several - 1)
                found.append(
                    Record(
                        layer=layer.name,
                        layer_index=index,
                        width=max(widths, default=0),  # a rank may have no batch
                        metric="logit_lens_loss",
                        value=float(loss),
                        stderr=float(spread.sqrt() / counts.sum()) if several > 1 else math.nan,
                    )
                )
        return found

    def _total(self, sums: Tensor) -> Tensor:
        return all_reduce_sum(sums) if self._has_ranks else sums

    def _losses(
        self, hooked: Callable[[AblationBatch], AbstractContextManager[None]] | None = None
    ) -> Tensor:
        """Loss summed over the tokens of each sequence, and their number, shape (2, S), float64,
        with hooks.
        """
        sums = torch.zeros(2, self._num_sequences, dtype=torch.float64)
        for batch in self._batches:
            with nullcontext() if hooked is None else hooked(batch):
                logits = self._logits(batch)
            for own, targets, number in zip(
                logits, batch.targets, batch.numbers.tolist(), strict=True
            ):
                wide = own.to(torch.promote_types(own.dtype, torch.float32))
                losses = F.cross_entropy(
                    wide, targets.to(own.device), reduction="none", ignore_index=NO_TYPE
                )
                sums[0, number] = losses.cpu().double().sum()
                sums[1, number] = (targets != NO_TYPE).sum()
        return sums

    def _logits(self, batch: AblationBatch) -> Tensor:
        if is_hugging_face(self._network):
            inputs = {**batch.inputs, "use_cache": False}
            optional = {"use_cache", "position_ids"} - self._parameters.keys()
            output: Any = self._network(
                **{name: value for name, value in inputs.items() if name not in optional}
            )
        else:
            output = self._network(batch.token_ids)
        logits = find_logits(self._network, output)
        token_ids = batch.token_ids
        # a head of fewer types than there are tokens predicts something else
        fits = logits is not None and logits.shape[:2] == token_ids.shape
        if logits is None or not fits or int(batch.targets.max()) >= logits.shape[2]:
            parts = named_parts(output).values()
            shapes = [str(tuple(each.shape)) for each in parts if isinstance(each, Tensor)]
            raise ValueError(
                "a model is needed that gives logits of shape (batch, positions, vocabulary) for "
                f"token ids of shape {tuple(token_ids.shape)} up to {int(token_ids.max())}; "
                f"{type(self._network).__name__} gives {listed(shapes, 4) or 'no tensor'}. Take "
                "one with a language model head; of several tensors of its width name one, as in "
                '{"logits": logits}.'
            )
        return logits

    def _counted(self, batch: AblationBatch, after_first: bool) -> Tensor:
        """Marks of the rows that are replaced, (batch, positions)."""
        ignored = torch.tensor(self._ignored, dtype=torch.int64, device=batch.token_ids.device)
        counts = batch.real & ~torch.isin(batch.token_ids, ignored)
        return counts & (sequence_positions(batch.real) > self._skipped) if after_first else counts

    def _statistics(self, layer: Layer) -> dict[tuple[int, bool], RowStatistics]:
        """The statistics of each half, of all rows and of those after the first positions."""
        found: dict[tuple[int, bool], RowStatistics] = {}

        def read(batch: AblationBatch, hidden: Tensor) -> Tensor:
            for half in (0, 1):
                for after_first in (False, True):
                    own = (
                        self._counted(batch, after_first)
                        & (batch.numbers % 2 == half).to(batch.real.device)[:, None]
                    )
                    more = RowStatistics.of(
                        hidden[own.to(hidden.device)], batch.token_ids[own].to(hidden.device)
                    )
                    known = found.get((half, after_first))
                    found[half, after_first] = more if known is None else known.merge(more)
            return hidden

        for batch in self._batches:
            with _at(layer, read, batch):
                self._logits(batch)
        return found

    def _replaced(
        self,
        name: str,
        substitutes: Mapping[tuple[int, bool], Substitutes],
        after_first: bool,
        batch: AblationBatch,
        hidden: Tensor,
    ) -> Tensor:
        """The hidden state with the rows of each half replaced by what follows from the other
        half.
        """
        counted = self._counted(batch, after_first)
        changed = hidden.clone()
        for i, number in enumerate(batch.numbers.tolist()):
            rows = hidden[i, counted[i].to(hidden.device)]
            normal = rows.new_empty(0)
            if name == "as_noise":
                normal = torch.randn(
                    rows.shape, generator=_generator(self._seed, number), dtype=torch.float64
                )
            ids = batch.token_ids[i, counted[i]].to(hidden.device)
            other = substitutes[1 - number % 2, after_first]
            changed[i, counted[i].to(hidden.device)] = other.replaced(name, rows, ids, normal)
        return changed


def _unseen_share(
    statistics: Mapping[tuple[int, bool], RowStatistics],
    substitutes: Mapping[tuple[int, bool], Substitutes],
) -> float:
    """Share of the rows of both halves whose token type the other half does not have."""
    unseen = 0.0
    total = 0.0
    for half in (0, 1):
        ids, n = (each.cpu() for each in statistics[half, False].types[:2])
        is_seen = torch.isin(ids, substitutes[1 - half, False].token_ids.cpu())
        unseen += float(n[~is_seen].sum())
        total += float(n.sum())
    return unseen / total if total else math.nan


@contextmanager
def _lens(layer: Layer, last: Layer, widths: list[int], batch: AblationBatch) -> Iterator[None]:
    """Context in which the last block gives the hidden state of a layer."""
    held: list[Tensor] = []

    def keep(batch: AblationBatch, hidden: Tensor) -> Tensor:
        held[:] = [hidden.clone()]  # of which a model may add to what it goes on with
        widths.append(hidden.shape[-1])
        return hidden

    def give(batch: AblationBatch, hidden: Tensor) -> Tensor:
        return held[0].to(hidden)

    with _at(layer, keep, batch), _at(last, give, batch):
        yield


@contextmanager
def _at(
    layer: Layer, change: Callable[[AblationBatch, Tensor], Tensor], batch: AblationBatch
) -> Iterator[None]:
    """Context in which a function makes another hidden state of that of a layer, batch first."""
    call = layer.calls[0]
    num_calls = 0

    def replaced(hidden: Tensor | None) -> Tensor | None:
        nonlocal num_calls
        num_calls += 1
        if hidden is None or (num_calls - 1) % call.calls_per_forward != call.index:
            return hidden
        if hidden.ndim != 3:
            raise ValueError(
                f"layer {layer.name} must have a hidden state of shape (batch, positions, d); got "
                f"shape {tuple(hidden.shape)}. Leave it out."
            )
        if layer.positions_first:
            return change(batch, hidden.transpose(0, 1)).transpose(0, 1)
        return change(batch, hidden)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        old = first_input(args, kwargs)
        new = replaced(old)
        return _exchanged_for(args, old, new), _exchanged_for(kwargs, old, new)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        old = first_float(output)
        return _exchanged_for(output, old, replaced(old))

    if call.takes_input:
        handle = call.module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = call.module.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not num_calls:
        raise ValueError(
            f"layers must be reached by a forward pass; {layer.name} never was. Leave it out."
        )


def _exchanged_for(value: Any, old: Tensor | None, new: Tensor | None) -> Any:
    """The value with one tensor in place of another, wherever it is among arguments or in an
    output.
    """
    if value is old:
        return new
    if isinstance(value, dict):
        exchanged_items = {name: _exchanged_for(each, old, new) for name, each in value.items()}
        return exchanged_items if type(value) is dict else type(value)(**exchanged_items)
    if isinstance(value, tuple | list):
        parts = [_exchanged_for(each, old, new) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
