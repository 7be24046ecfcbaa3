"""Layers that are the output of a norm, and what it makes of a row: found by running it, not by its
name.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import kept_random_states
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, final_norm, find_stacks, unwrapped
from embedgeo.functional.precision import sent
from embedgeo.functional.rows import RowUnit

_ROWS = 16  # that are looked at
# deviation of the rows below which they are a norm's output; half the ε of their dtype if that is
# more
_CLOSE = 1e-3
_FAR = 0.5  # deviation from a norm's output with which later measurements do not look at it again
_SHRUNK = 0.5  # by which the mean of squares of embeddings of mean 0 may be below 1, for a norm's ε


class Norm(NamedTuple):
    """The affine map of a norm: of a row whose mean of squares is 1 (of a LayerNorm, and mean 0) to
    γ · row + β.
    """

    scale: Tensor  # γ, shape (d,), float64; 1 + weight where that is how the norm computes
    shift: Tensor  # β, shape (d,), float64; zeros where there is none
    is_centered: bool  # as a LayerNorm: a row's mean is taken off first

    @property
    def expected_size(self) -> Tensor:
        """‖γ‖² + ‖β‖²: the mean of ‖γ z + β‖² over rows z whose coordinates have mean 0 and
        variance 1 over the rows.

        Others add Σ_j γ_j² (⟨z_j²⟩ − 1) + 2 Σ_j γ_j β_j ⟨z_j⟩ (Yamagiwa & Shimodaira 2025, appendix
        H).
        """
        return self.scale.square().sum() + self.shift.square().sum()

    def deviation(self, rows: Tensor, *, of_embeddings: bool) -> float:
        """The largest distance of rows, shape (m, d), from a mean of squares of 1 (and a mean of 0)
        before γ and β.
        """
        undone = (rows - self.shift) / self.scale
        sizes = undone.square().mean(1) - 1
        if self.is_centered:
            if of_embeddings:  # which may be small beside the norm's ε: means of 0 tell
                sizes = sizes.where((sizes > 0) | (sizes < -_SHRUNK), 0)
            sizes = torch.maximum(sizes.abs(), undone.mean(1).abs())
        return float(sizes.abs().max().nan_to_num(torch.inf, torch.inf)) if len(rows) else torch.inf


class _Run(NamedTuple):
    """Outputs of a module that may be a norm, given `_inputs`, and its parameters."""

    vectors: list[Tensor]  # its parameters, shape (d,)
    outputs: Tensor  # shape (1, 4, d)
    dtype: torch.dtype  # of the inputs

    def changed(self, change: Callable[[Tensor], Tensor]) -> "_Run":
        """This run with each of its tensors changed."""
        return _Run([change(each) for each in self.vectors], change(self.outputs), self.dtype)


def as_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module with nothing but vectors of this width is, found by running it; None
    if it is none.
    """
    run = _run(module, width)
    return None if run is None else _norm_of(run.changed(_on_cpu))


def _run(module: nn.Module, width: int) -> _Run | None:
    """Run a module that may be a norm, whose device is not waited for; None if it is none."""
    try:
        vectors = [*module.parameters(recurse=False)]
        is_bare = (
            next(module.children(), None) is None
            and next(module.buffers(recurse=False), None) is None
        )
        if not is_bare or any(vector.shape != (width,) for vector in vectors):
            return None
        # a dropout, as far as this tells
        if not vectors and not type(module).__name__.endswith("Norm"):
            return None
        if not all(
            each.is_replicate() for vector in vectors for each in getattr(vector, "placements", ())
        ):
            return None  # running it would take other ranks
        at_hand: AbstractContextManager[None] = nullcontext()
        is_elsewhere = hasattr(module, "_hf_hook")  # accelerate may keep its weights there
        if is_elsewhere:
            from accelerate.utils import align_module_device

            at_hand = align_module_device(module)
        with kept_random_states(), torch.no_grad(), at_hand:
            vectors = [*module.parameters(recurse=False)]
            own = [_local(each).clone() if is_elsewhere else _local(each) for each in vectors]
            device, dtype = (
                (own[0].device, own[0].dtype) if own else (torch.device("cpu"), torch.float32)
            )
            inputs = _inputs(width, dtype, device)
            if vectors and isinstance(vectors[0], DTensor):
                inputs = DTensor.from_local(
                    inputs, vectors[0].device_mesh, vectors[0].placements, run_check=False
                )
            with torch.autocast(device.type, enabled=False):
                outputs = _local(module.forward(inputs))
            return _Run(own, outputs, dtype) if outputs.shape == inputs.shape else None
    except Exception:  # it takes other arguments, or its weights are in parts
        return None


def _standard(width: int) -> Tensor:
    """A row of mean 0 and variance 1, with entries far from 0, shape (d,), float64, on the CPU."""
    row = torch.ones(width, dtype=torch.float64, device="cpu")
    row[1::2] = -1
    if width % 2 and width > 1:
        row[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64, device="cpu") / 2**0.5
    return row


@lru_cache(maxsize=4)
def _inputs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows that tell what a norm does, shape (1, 4, d): one, its negative, its double, and one that
    is moved by 1.

    They are large, so that the norm's ε is nothing beside them.
    """
    row = (64 if dtype == torch.float16 else 2**20) * _standard(width).to(dtype)
    moved = row + (64 if dtype == torch.float16 else 2**20)
    return sent(torch.stack((row, -row, 2 * row, moved))[None], device)


def _norm_of(run: _Run) -> Norm | None:
    """The norm that made these outputs, in float64 on the CPU; None if it was none."""
    own, (up, down, larger, moved) = run.vectors, run.outputs[0]
    scale = (up - down) / (2 * _standard(len(up)).to(run.dtype).double())
    shift = (up + down) / 2
    # many compute in float32
    eps = max(torch.finfo(kind).eps for kind in (run.dtype, torch.float32))
    tolerance = 8 * eps * max(1.0, float(scale.abs().max()), float(shift.abs().max()))
    if not bool((up - larger).abs().max() <= tolerance):
        return None
    scales = [*own, *(1 + each for each in own)]
    shifts = [torch.zeros_like(shift), *own]
    return Norm(
        scale=next((each for each in scales if (each - scale).abs().max() <= tolerance), scale),
        shift=next((each for each in shifts if (each - shift).abs().max() <= tolerance), shift),
        is_centered=bool((up - moved).abs().max() <= tolerance),
    )


class _Look(NamedTuple):
    """The modules that a layer may be the output of, and its rows."""

    own: nn.Module | None  # the module whose output it is
    modules: list[nn.Module]  # which may be norms
    width: int
    rows: Tensor  # shape (m, d); none where there are no such modules
    least: float  # deviation above which they are no norm's output


_Key = tuple[nn.Module, int]  # a module, and the width of the rows that it is given


class Norms:
    """The norms whose outputs the layers of a model are; means and maxima over several tokens are
    no norm's output.
    """

    def __init__(self, model: nn.Module, rows: RowUnit = "tokens") -> None:
        self._model = model
        self._are_outputs = rows in ("tokens", "first", "last")
        self._candidates: dict[str, list[nn.Module]] = {}
        self._is_output: dict[str, bool] = {}
        self._looks: dict[str, _Look] = {}  # by layer, that are not compared yet
        self._runs: dict[_Key, _Run | None] = {}  # since the last `reset`
        self._norms: dict[str, Norm | None] = {}
        # a mask, and of the first rows that count
        self._places: tuple[Tensor, Tensor] | None = None

    def look(self, layer: Layer, hidden: Tensor, mask: Tensor | None = None) -> None:
        """Keep the first rows of a layer, and the norms, with the weights that the model has now,
        for `expected_size`.

        The mask is best on the CPU: then no device is waited for.
        """
        self._looks.pop(layer.name, None)
        if not hidden.numel() or len(layer.calls) > 1:
            return
        width = hidden.shape[-1]
        own = None if layer.takes_input else unwrapped(layer.calls[0].module)
        if layer.name not in self._candidates:
            self._candidates[layer.name] = (
                self._outside_blocks(layer) if own is None else [*own.modules()]
            )
        for module in self._candidates[layer.name]:
            if (module, width) not in self._runs:
                run = _run(module, width)
                # a copy: the weights will change
                self._runs[module, width] = None if run is None else run.changed(torch.clone)
        modules = [
            module
            for module in self._candidates[layer.name]
            if self._runs[module, width] is not None
        ]
        rows = self._first_rows(hidden, mask).clone() if modules else hidden.new_empty(0, width)
        least = max(_CLOSE, torch.finfo(hidden.dtype).eps / 2)
        self._looks[layer.name] = _Look(own, modules, width, rows.detach(), least)

    def expected_size(self, layer: Layer) -> float:
        """`Norm.expected_size` of a layer when last looked at; 0 where it is no norm's output."""
        self._compare()
        norm = self._norms.get(layer.name)
        return 0.0 if norm is None or not self._are_outputs else float(norm.expected_size)

    def reset(self) -> None:
        """Forget what has been looked at: weights may change."""
        for held in (self._looks, self._norms, self._runs):
            held.clear()
        self._places = None

    def _compare(self) -> None:
        """Compare the rows that have been looked at with the norms' outputs."""
        looks = dict(self._looks)
        self._looks.clear()
        keys = {(module, look.width) for look in looks.values() for module in look.modules}
        runs = {key: run for key in keys if (run := self._runs[key]) is not None}
        norms = {key: _norm_of(run.changed(_on_cpu)) for key, run in runs.items()}
        for name, look in looks.items():
            found = {
                module: norm
                for module in look.modules
                if (norm := norms.get((module, look.width))) is not None
            }
            rows = _on_cpu(look.rows)
            self._norms[name] = self._output_of(name, look, found, rows[rows.isfinite().all(1)])
            self._is_output[name] = self._norms[name] is not None

    def _output_of(
        self, name: str, look: _Look, norms: dict[nn.Module, Norm], rows: Tensor
    ) -> Norm | None:
        """The norm whose output a layer with these rows is, None if of none; later looks are at
        those near it alone.
        """
        if look.own is not None and look.own in norms:
            self._candidates[name] = [look.own]
            return norms[look.own]
        norm, least = None, look.least
        # several norms fit while their weights are alike: the next measurement looks at them again
        near = []
        for module, found in norms.items():
            deviation = found.deviation(rows, of_embeddings=module not in self._in_or_after_blocks)
            if deviation < _FAR:
                near.append(module)
            if deviation < least:
                norm, least = found, deviation
        if not norms or len(rows):
            self._candidates[name] = near
        return norm

    def architecture(self, layers: Sequence[Layer]) -> str:
        """``post-ln`` where the outputs of all measured blocks are norms', ``pre-ln`` where none
        are; else empty.
        """
        self._compare()
        blocks = set(self._blocks)
        measured = {
            layer.calls[0].module: self._is_output[layer.name]
            for layer in layers
            if layer.name in self._is_output
            and not layer.takes_input
            and layer.calls[0].module in blocks
        }
        kinds = set(measured.values())
        if kinds == {True}:
            return "post-ln"
        if kinds != {False}:
            return ""
        inside = {
            inner: [*inner.parameters(recurse=False)]
            for block in measured
            for inner in block.modules()
        }
        has_norms = any(
            own and as_norm(inner, len(own[0])) is not None for inner, own in inside.items()
        )
        return "pre-ln" if has_norms else ""

    def _outside_blocks(self, layer: Layer) -> list[nn.Module]:
        inside = {inner for block in self._blocks for inner in block.modules()}
        block = [layer.calls[0].module]
        return [
            each
            for each in self._model.modules()
            if each not in inside and not contains_any(each, block)
        ]

    @cached_property
    def _in_or_after_blocks(self) -> set[nn.Module]:
        """The modules of the blocks and the norms behind them: what these are given is large beside
        their ε.
        """
        finals = [
            unwrapped(norm)
            for norm in map(final_norm, find_stacks(self._model))
            if norm is not None
        ]
        return {inner for top in (*finals, *self._blocks) for inner in top.modules()}

    @property
    def _blocks(self) -> list[nn.Module]:
        return [block for stack in find_stacks(self._model) for block in stack.blocks]

    def _first_rows(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The first rows that count, shape (m, d)."""
        if mask is None:
            rows = hidden[(slice(_ROWS),) * (hidden.ndim - 1)].reshape(-1, hidden.shape[-1])[:_ROWS]
        else:
            # of all layers of a forward pass
            if self._places is None or self._places[0] is not mask:
                self._places = mask, sent(mask.reshape(-1).nonzero()[:_ROWS, 0], hidden.device)
            places = self._places[1].to(hidden.device)
            if hidden.is_contiguous():
                rows = hidden.view(-1, hidden.shape[-1])[places]
            else:  # not all of them are copied
                rows = hidden[torch.unravel_index(places, hidden.shape[:-1])]
        rows = _local(rows)
        return rows.float() if rows.dtype.itemsize == 1 else rows  # float8 has no arithmetic


def _on_cpu(tensor: Tensor) -> Tensor:
    """A tensor in float64, which not all devices have."""
    return _local(tensor).cpu().double()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
