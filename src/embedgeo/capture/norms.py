"""Layers that are the output of a norm, told by the rows that it gives with the weights that it
has.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, final_norm, find_stacks, unwrapped
from embedgeo.capture.units import RowUnit
from embedgeo.functional.precision import sent

_ROWS = 16  # that are looked at
# deviation of the rows below which they are a norm's output; half the ε of their dtype if that is
# more
_CLOSE = 1e-3
_FAR = 0.5  # deviation from a norm's output with which later measurements do not look at it again
_SHRUNK = 0.5  # by which the mean of squares of embeddings of mean 0 may be below 1, for a norm's ε


class _Look(NamedTuple):
    """The rows of a layer, and the weights of the norms whose output they may be."""

    own: nn.Module | None  # the module whose output the layer is
    norms: dict[nn.Module, list[Tensor]]  # weight, and bias if there is one, shape (d,)
    rows: Tensor  # shape (m, d)


class Norms:
    """The norms whose outputs the layers of a model are; means and maxima over several tokens are
    no norm's output.

    A norm is a module with nothing but a ``weight``, and perhaps a ``bias``, of the layer's width.
    It multiplies by the weight, or by 1 + weight (Gemma); rows of mean square 1 tell.
    """

    def __init__(self, model: nn.Module, rows: RowUnit = "tokens") -> None:
        self._model = model
        self._are_outputs = rows in ("tokens", "first", "last")
        self._candidates: dict[str, list[nn.Module]] = {}
        self._looks: dict[str, _Look] = {}  # by layer, that are not compared yet
        self._sizes: dict[str, float] = {}  # 0 where a layer is no norm's output

    def look(self, layer: Layer, hidden: Tensor, mask: Tensor | None = None) -> None:
        """Keep the first rows of a layer, and the weights that norms have now, for
        `expected_size`.

        The mask is best on the CPU: then no device is waited for.
        """
        self._sizes.pop(layer.name, None)
        if not hidden.numel() or len(layer.calls) > 1:
            return
        own = None if layer.takes_input else unwrapped(layer.calls[0].module)
        if layer.name not in self._candidates:
            self._candidates[layer.name] = (
                self._outside_blocks(layer) if own is None else [*own.modules()]
            )
        rows = hidden.reshape(-1, hidden.shape[-1])
        places = None if mask is None else mask.reshape(-1).nonzero()[:_ROWS, 0]
        rows = rows[:_ROWS] if places is None else rows[sent(places, rows.device)]
        norms = {
            module: weights
            for module in self._candidates[layer.name]
            if (weights := norm_weights(module, rows))
        }
        self._looks[layer.name] = _Look(own, norms, rows.clone())

    def expected_size(self, layer: Layer) -> float:
        """‖γ‖² + ‖β‖² of the norm whose output a layer was when last looked at; 0 for none.

        It is the mean of ‖γ z + β‖² over rows z whose coordinates have mean 0 and variance 1 over
        the rows. Others add Σ_j γ_j² (⟨z_j²⟩ − 1) + 2 Σ_j γ_j β_j ⟨z_j⟩ (Yamagiwa & Shimodaira
        2025, appendix H).
        """
        self._compare()
        return self._sizes.get(layer.name, 0.0) if self._are_outputs else 0.0

    def reset(self) -> None:
        """Forget what has been looked at: weights may change."""
        self._looks.clear()

    def _compare(self) -> None:
        """Compare the rows that have been looked at with the norms' weights."""
        for name, look in self._looks.items():
            self._sizes[name] = self._size(name, look)
        self._looks.clear()

    def _size(self, name: str, look: _Look) -> float:
        """Size of the norm whose output a layer with these rows is, 0 if of none; later looks are
        at those near it alone.
        """
        rows = look.rows.cpu().double()
        rows = rows[rows.isfinite().all(1)]
        # several norms fit while their weights are alike: the next measurement looks at them again
        near = list[nn.Module]()
        size, least = 0.0, max(_CLOSE, torch.finfo(look.rows.dtype).eps / 2)
        for module, vectors in look.norms.items():
            weight, shift = (each.cpu().double() for each in (*vectors, 0 * vectors[0])[:2])
            for scale in (weight, 1 + weight):
                deviation = _deviation(
                    ((rows - shift) / scale)[:, scale != 0],
                    is_centered=isinstance(module, nn.LayerNorm),
                    of_embeddings=module not in self._in_or_after_blocks,
                )
                if deviation < _FAR:
                    near.append(module)
                if deviation < (_FAR if module is look.own else least):
                    least, size = deviation, float(scale.square().sum() + shift.square().sum())
        if len(rows):
            self._candidates[name] = [*dict.fromkeys(near)]
        return size

    def architecture(self, layers: Sequence[Layer]) -> str:
        """``post-ln`` where the outputs of all measured blocks are norms', ``pre-ln`` where none
        are; else empty.
        """
        self._compare()
        blocks = self._blocks
        measured = {
            layer.calls[0].module: self._sizes[layer.name] > 0
            for layer in layers
            if layer.name in self._sizes
            and not layer.takes_input
            and layer.calls[0].module in blocks
        }
        inside = (inner for block in measured for inner in block.modules())
        if not measured or any(measured.values()):
            return "post-ln" if measured and all(measured.values()) else ""
        return "pre-ln" if any(map(norm_weights, inside)) else ""

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


def norm_weights(module: nn.Module, rows: Tensor | None = None) -> list[Tensor]:
    """Copies of weight, and bias if there is one, of a module that has no more, as a norm, each as
    wide as these rows; nothing of others, and where a rank has a part of them.
    """
    named = dict(module.named_parameters(recurse=False))
    is_bare = not [*module.children(), *module.buffers(recurse=False)]
    if not is_bare or [*named] not in (["weight"], ["weight", "bias"]):
        return []
    width = named["weight"].shape[:1] if rows is None else rows.shape[-1:]
    placements = [at for each in named.values() for at in getattr(each, "placements", ())]
    if any(each.shape != width for each in named.values()) or not all(
        at.is_replicate() for at in placements
    ):
        return []
    at_hand: AbstractContextManager[None] = nullcontext()
    if hasattr(module, "_hf_hook"):  # accelerate may keep its weights elsewhere
        from accelerate.utils import align_module_device

        at_hand = align_module_device(module)
    with at_hand:
        weights = [each.detach() for each in module.parameters(recurse=False) if not each.is_meta]
        return [
            (each.to_local() if isinstance(each, DTensor) else each).clone() for each in weights
        ]


def _deviation(undone: Tensor, *, is_centered: bool, of_embeddings: bool) -> float:
    """The largest distance of rows without γ and β, shape (m, d), from a mean of squares of 1, and
    of those of a LayerNorm from a mean of 0.
    """
    sizes = undone.square().mean(1) - 1
    if is_centered:
        if of_embeddings:  # which may be small beside the norm's ε: means of 0 tell
            sizes = sizes.where((sizes > 0) | (sizes < -_SHRUNK), 0)
        sizes = torch.maximum(sizes.abs(), undone.mean(1).abs())
    return float(sizes.abs().max().nan_to_num(torch.inf, torch.inf)) if len(sizes) else torch.inf
