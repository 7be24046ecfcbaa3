"""Layers that are the output of a norm, and what it makes of a row: found by running it, not by its name."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import kept_random_states
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, final_norm, find_stacks, unwrapped
from embedgeo.functional.rows import RowUnit

_ROWS = 16  # that are looked at
_CLOSE = 1e-3  # deviation of the rows below which they are a norm's output; half the ε of their dtype if that is more
_FAR = 0.5  # deviation from a norm's output with which later measurements do not look at it again
_SHRUNK = 0.5  # by which the mean of squares of embeddings of mean 0 may be below 1, for a norm's ε


class Norm(NamedTuple):
    """The affine map of a norm: of a row whose mean of squares is 1 (of a LayerNorm, and mean 0) to γ · row + β."""

    scale: Tensor  # γ, shape (d,), float64; 1 + weight where that is how the norm computes
    shift: Tensor  # β, shape (d,), float64; zeros where there is none
    is_centered: bool  # as a LayerNorm: a row's mean is taken off first

    @property
    def expected_size(self) -> Tensor:
        """‖γ‖² + ‖β‖²: the mean of ‖γ z + β‖² over rows z whose coordinates have mean 0 and variance 1 over the rows.

        Others add Σ_j γ_j² (⟨z_j²⟩ − 1) + 2 Σ_j γ_j β_j ⟨z_j⟩ (Yamagiwa & Shimodaira 2025, appendix H).
        """
        return self.scale.square().sum() + self.shift.square().sum()

    def deviation(self, rows: Tensor, *, of_embeddings: bool) -> float:
        """The largest distance of rows, shape (m, d), from a mean of squares of 1 (and a mean of 0) before γ and β."""
        undone = (rows - self.shift) / self.scale
        sizes = undone.square().mean(1) - 1
        if self.is_centered:
            if of_embeddings:  # which may be small beside the norm's ε: means of 0 tell
                sizes = sizes.where((sizes > 0) | (sizes < -_SHRUNK), 0)
            sizes = torch.maximum(sizes.abs(), undone.mean(1).abs())
        return float(sizes.abs().max().nan_to_num(torch.inf, torch.inf)) if len(rows) else torch.inf


def as_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module with nothing but vectors of this width is, found by running it; None if it is none."""
    try:
        vectors = [*module.parameters(recurse=False)]
        is_bare = next(module.children(), None) is None and next(module.buffers(recurse=False), None) is None
        if not is_bare or any(vector.shape != (width,) for vector in vectors):
            return None
        if not vectors and not type(module).__name__.endswith("Norm"):  # a dropout, as far as this tells
            return None
        if not all(each.is_replicate() for vector in vectors for each in getattr(vector, "placements", ())):
            return None  # running it would take other ranks
        at_hand: AbstractContextManager[None] = nullcontext()
        if hasattr(module, "_hf_hook"):  # accelerate may keep its weights elsewhere
            from accelerate.utils import align_module_device

            at_hand = align_module_device(module)
        with kept_random_states(), torch.no_grad(), at_hand:
            return _norm_by_running(module, [*module.parameters(recurse=False)], width)
    except Exception:  # it takes other arguments, or its weights are in parts
        return None


def _norm_by_running(module: nn.Module, vectors: Sequence[Tensor], width: int) -> Norm | None:
    standard = torch.ones(width, dtype=torch.float64, device="cpu")  # of mean 0 and variance 1, with entries far from 0
    standard[1::2] = -1
    if width % 2 and width > 1:
        standard[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64, device="cpu") / 2**0.5
    device = vectors[0].device if vectors else torch.device("cpu")
    row = standard.to(device, vectors[0].dtype if vectors else torch.float32)
    if vectors and isinstance(vectors[0], DTensor):
        row = DTensor.from_local(row, vectors[0].device_mesh, vectors[0].placements, run_check=False)
    own = [_local(each).clone() for each in vectors]  # without the rounding of running, after which it may be elsewhere
    large = 64 if row.dtype == torch.float16 else 2**20  # beside which the norm's ε is nothing
    with torch.autocast(device.type, enabled=False):
        inputs = (large * row, -large * row, 2 * large * row, large * row + large)
        outputs = [_local(module.forward(each)) for each in inputs]
    *own, up, down, larger, moved = _on_cpu(torch.stack([*own, *outputs]))  # which is waited for once
    scale = (up - down) / (2 * standard.to(row.dtype).double())
    shift = (up + down) / 2
    eps = max(torch.finfo(kind).eps for kind in (row.dtype, torch.float32))  # many compute in float32
    tolerance = 8 * eps * max(1.0, float(scale.abs().max()), float(shift.abs().max()))
    if up.shape != (width,) or not bool((up - larger).abs().max() <= tolerance):
        return None
    scales = [*own, *(1 + each for each in own)]
    shifts = [torch.zeros_like(shift), *own]
    return Norm(
        scale=next((each for each in scales if (each - scale).abs().max() <= tolerance), scale),
        shift=next((each for each in shifts if (each - shift).abs().max() <= tolerance), shift),
        is_centered=bool((up - moved).abs().max() <= tolerance),
    )


class _Look(NamedTuple):
    """The norms that a layer may be the output of, and its rows."""

    norms: dict[nn.Module, Norm]
    rows: Tensor | None  # None: it is that of the only one
    least: float = 0.0  # deviation above which it is none


class Norms:
    """The norms whose outputs the layers of a model are; means and maxima over several tokens are no norm's output."""

    def __init__(self, model: nn.Module, rows: RowUnit = "tokens") -> None:
        self._model = model
        self._are_outputs = rows in ("tokens", "first", "last")
        self._candidates: dict[str, list[nn.Module]] = {}
        self._is_output: dict[str, bool] = {}
        self._looks: dict[str, _Look] = {}  # by layer, that are not compared yet
        self._norms: dict[str, Norm | None] = {}
        self._found: dict[tuple[nn.Module, int], Norm | None] = {}

    def look(self, layer: Layer, hidden: Tensor, mask: Tensor | None = None) -> None:
        """Keep the first rows of a layer, and the norms, with the weights that the model has now, for `expected_size`.

        The mask is best on the CPU.
        """
        self._looks.pop(layer.name, None)
        if not hidden.numel() or len(layer.calls) > 1:
            return
        width = hidden.shape[-1]
        own = None if layer.takes_input else unwrapped(layer.calls[0].module)
        if layer.name not in self._candidates:
            self._candidates[layer.name] = self._outside_blocks(layer) if own is None else [*own.modules()]
        found = {module: self._norm(module, width) for module in self._candidates[layer.name]}
        norms = {module: norm for module, norm in found.items() if norm is not None}
        if own is not None and own in norms:
            self._looks[layer.name] = _Look({own: norms[own]}, None)
        else:
            rows = _first_rows(hidden, mask) if norms else hidden.new_zeros(0, width)
            least = max(_CLOSE, torch.finfo(hidden.dtype).eps / 2)
            self._looks[layer.name] = _Look(norms, rows, least)

    def expected_size(self, layer: Layer) -> float:
        """`Norm.expected_size` of a layer when last looked at; 0 where it is no norm's output."""
        self._compare()
        norm = self._norms.get(layer.name)
        return 0.0 if norm is None or not self._are_outputs else float(norm.expected_size)

    def reset(self) -> None:
        """Forget what has been looked at: weights may change."""
        for held in (self._looks, self._norms, self._found):
            held.clear()

    def _norm(self, module: nn.Module, width: int) -> Norm | None:
        if (module, width) not in self._found:
            self._found[module, width] = as_norm(module, width)
        return self._found[module, width]

    def _compare(self) -> None:
        """Compare the rows that have been looked at with the norms' outputs; a device is waited for once."""
        looks = dict(self._looks)
        self._looks.clear()
        held = {name: look.rows for name, look in looks.items() if look.rows is not None}
        rows_of = dict[str, Tensor]()
        for device in {rows.device for rows in held.values()}:
            here = {name: rows for name, rows in held.items() if rows.device == device}
            whole = _on_cpu(torch.cat([rows.flatten() for rows in here.values()]))
            parts = whole.split([rows.numel() for rows in here.values()])
            rows_of |= {name: part.view(here[name].shape) for name, part in zip(here, parts, strict=True)}
        for name, look in looks.items():
            rows = rows_of.get(name)
            least = look.least
            norm = None
            near = []  # several norms fit while their weights are alike: the next measurement looks at them again
            for module, found in look.norms.items():
                if rows is None:  # the layer is this norm
                    norm = found
                    near = [module]
                    break
                finite = rows[rows.isfinite().all(1)]
                deviation = found.deviation(finite, of_embeddings=module not in self._in_or_after_blocks)
                if deviation < _FAR:
                    near.append(module)
                if deviation < least:
                    norm, least = found, deviation
            if rows is None or not look.norms or bool(rows.isfinite().all(1).any()):
                self._candidates[name] = near
            self._is_output[name] = norm is not None
            self._norms[name] = norm

    def architecture(self, layers: Sequence[Layer]) -> str:
        """``post-ln`` where the outputs of all measured blocks are norms', ``pre-ln`` where none are; else empty."""
        self._compare()
        blocks = set(self._blocks)
        measured = {
            layer.calls[0].module: self._is_output[layer.name]
            for layer in layers
            if layer.name in self._is_output and not layer.takes_input and layer.calls[0].module in blocks
        }
        kinds = set(measured.values())
        if kinds == {True}:
            return "post-ln"
        if kinds != {False}:
            return ""
        inside = {inner: [*inner.parameters(recurse=False)] for block in measured for inner in block.modules()}
        has_norms = any(own and as_norm(inner, len(own[0])) is not None for inner, own in inside.items())
        return "pre-ln" if has_norms else ""

    def _outside_blocks(self, layer: Layer) -> list[nn.Module]:
        inside = {inner for block in self._blocks for inner in block.modules()}
        block = [layer.calls[0].module]
        return [each for each in self._model.modules() if each not in inside and not contains_any(each, block)]

    @cached_property
    def _in_or_after_blocks(self) -> set[nn.Module]:
        """The modules of the blocks and the norms behind them: what these are given is large beside their ε."""
        finals = [unwrapped(norm) for norm in map(final_norm, find_stacks(self._model)) if norm is not None]
        return {inner for top in (*finals, *self._blocks) for inner in top.modules()}

    @property
    def _blocks(self) -> list[nn.Module]:
        return [block for stack in find_stacks(self._model) for block in stack.blocks]


def _first_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The first rows that count, shape (m, d), a copy."""
    if mask is None:
        rows = hidden[(slice(_ROWS),) * (hidden.ndim - 1)].reshape(-1, hidden.shape[-1])[:_ROWS]
    else:
        counted = mask.reshape(-1).nonzero()[:_ROWS, 0].to(hidden.device)
        rows = hidden[torch.unravel_index(counted, hidden.shape[:-1])]
    return _local(rows).clone()


def _on_cpu(tensor: Tensor) -> Tensor:
    """A tensor in float64, which not all devices have."""
    return _local(tensor).cpu().double()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
