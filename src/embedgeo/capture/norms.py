"""Layers that are the output of a norm, and what it makes of a row: found by running it, not by its name."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, find_stack, submodels, unwrapped
from embedgeo.functional.rows import RowUnit

_ROWS = 16
"""Rows that tell whether a layer is a norm's output."""


class Norm(NamedTuple):
    """What a LayerNorm or RMSNorm makes of a row whose mean of squares is 1 (and whose mean is 0): γ · row + β.

    Attributes:
        scale: γ, shape (d,), float64; 1 + weight where that is how the norm computes.
        shift: β, shape (d,), float64; zeros where there is none.
    """

    scale: Tensor
    shift: Tensor

    @property
    def expected_size(self) -> Tensor:
        """‖γ‖² + ‖β‖²: the mean of ‖γ z + β‖² over rows z whose coordinates have mean 0 and variance 1 over the rows.

        It is ‖γ‖² + ‖β‖² plus Σ_j γ_j² (⟨z_j²⟩ − 1) + 2 Σ_j γ_j β_j ⟨z_j⟩ in general. Each row's mean of squares is 1,
        so the first sum is 0 where all γ_j are equal, or ⟨z_j²⟩ does not vary with γ_j²; the second is 0 where β is, or
        where the coordinates' means over the rows do not vary with γ β (Yamagiwa & Shimodaira 2025, appendix H).
        """
        return self.scale.square().sum() + self.shift.square().sum()


def as_norm(module: nn.Module, width: int) -> Norm | None:
    """What a module does if it is a norm of rows of this width; None if it is none, or its weights are elsewhere.

    It is run, without its hooks, on a row and on multiples of it. Only modules that have nothing but vectors of this
    width are run: they draw no random numbers, and count nothing.
    """
    vectors = [*module.parameters(recurse=False)]
    is_bare = next(module.children(), None) is None and next(module.buffers(recurse=False), None) is None
    if not is_bare or any(vector.shape != (width,) or vector.is_meta for vector in vectors):
        return None
    if not vectors and not type(module).__name__.endswith("Norm"):  # a dropout, as far as this tells
        return None
    device = vectors[0].device if vectors else torch.device("cpu")
    row = _standard_row(width).to(device, vectors[0].dtype if vectors else torch.float32)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            large = 64 if row.dtype == torch.float16 else 2**20  # beside which the norm's ε is nothing
            up, down, larger = (module.forward(size * row).double() for size in (large, -large, 2 * large))
            scale, shift = (up - down) / (2 * row.double()), (up + down) / 2
            eps = max(torch.finfo(kind).eps for kind in (row.dtype, torch.float32))  # many compute in float32
            tolerance = 8 * eps * max(1.0, float(scale.abs().max()), float(shift.abs().max()))
            if up.shape != (width,) or not bool((up - larger).abs().max() <= tolerance):
                return None
            own = [vector.double() for vector in vectors]  # what it has, without the rounding of running it

            def exact(found: Tensor, among: Sequence[Tensor]) -> Tensor:
                return next((each for each in among if bool((each - found).abs().max() <= tolerance)), found)

            return Norm(
                exact(scale, [*own, *(1 + each for each in own)]), exact(shift, [torch.zeros_like(shift), *own])
            )
    except Exception:  # it takes other arguments, or its weights are in parts
        return None


class Norms:
    """The norms whose outputs the layers of a model are, each looked for once.

    Args:
        model: the model.
        rows: what a row is; a mean over several is no norm's output.
    """

    def __init__(self, model: nn.Module, rows: RowUnit = "tokens") -> None:
        self._model = model
        self._are_outputs = rows not in ("mean", "words")
        self._found: dict[str, nn.Module | None] = {}

    def expected_size(self, layer: Layer, hidden: Tensor) -> float:
        """`Norm.expected_size` of a layer with the weights that the model has now; 0 where it is no norm's output.

        Args:
            layer: one of the model's.
            hidden: rows of it, shape (..., d).
        """
        if layer.name not in self._found and hidden.numel():
            self._found[layer.name] = _find_norm(self._model, layer, hidden)
        module = self._found.get(layer.name)
        norm = as_norm(module, hidden.shape[-1]) if module is not None and self._are_outputs else None
        return 0.0 if norm is None else float(norm.expected_size)

    def architecture(self, layers: Sequence[Layer]) -> str:
        """``post-ln`` where the output of every measured block is that of a norm in it, ``pre-ln`` where none is.

        Empty where only some are, no block was measured, or the blocks have no norm. A block that adds a norm's output
        to its input (OLMo 2, Gemma 2) leaves that as it is: ``pre-ln``.
        """
        stacks = filter(None, map(find_stack, submodels(self._model).values()))
        blocks = {block for stack in stacks for block in stack.blocks}
        measured = {
            layer.calls[0].module: self._found[layer.name] is not None
            for layer in layers
            if layer.name in self._found and not layer.takes_input and layer.calls[0].module in blocks
        }
        kinds = set(measured.values())
        if kinds == {True}:
            return "post-ln"
        if kinds != {False}:
            return ""
        inside = {inner: [*inner.parameters(recurse=False)] for block in measured for inner in block.modules()}
        has_norms = any(own and as_norm(inner, len(own[0])) is not None for inner, own in inside.items())
        return "pre-ln" if has_norms else ""


def _find_norm(model: nn.Module, layer: Layer, hidden: Tensor) -> nn.Module | None:
    """The norm whose output a layer is, its module or one inside it; of what enters the blocks, one before them.

    Of one inside or before, each row must have a mean of squares of 1, once γ and β are undone. That is 1 but for the
    norm's ε: where the rows before the norm are as small as that, as at the start of a training, none is found.
    """
    rows = hidden.detach().reshape(-1, hidden.shape[-1])[:_ROWS]
    if len(layer.calls) > 1:
        return None
    tolerance = max(1e-3, torch.finfo(rows.dtype).eps / 2)
    rows = rows.double()
    for module in _candidates(model, layer):
        norm = as_norm(module, rows.shape[1])
        if norm is not None and module is unwrapped(layer.calls[0].module) and not layer.takes_input:
            return module
        if norm is not None and bool(norm.scale.all()):
            undone = (rows - norm.shift.to(rows.device)) / norm.scale.to(rows.device)
            if bool(((undone.square().mean(1) - 1).abs() <= tolerance).all()):
                return module
    return None


def _candidates(model: nn.Module, layer: Layer) -> Iterator[nn.Module]:
    module = layer.calls[0].module
    if not layer.takes_input:
        yield from unwrapped(module).modules()
        return
    stacks = filter(None, map(find_stack, submodels(model).values()))
    inside = {inner for stack in stacks for block in stack.blocks for inner in block.modules()}
    yield from (each for each in model.modules() if each not in inside and not contains_any(each, [module]))


def _standard_row(width: int) -> Tensor:
    """A row of mean 0 and variance 1, whose entries are far from 0."""
    row = torch.ones(width, dtype=torch.float64)
    row[1::2] = -1
    if width % 2 and width > 1:
        row[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 2**0.5
    return row
