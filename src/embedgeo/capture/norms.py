"""Layers that are the output of a norm, told by the rows that it gives with the weights that it
has.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, final_norm, find_stacks, unwrapped
from embedgeo.functional.lockstep import computed, on_host
from embedgeo.functional.precision import sent
from embedgeo.functional.rows import RowUnit

_ROWS = 16  # that are looked at
# deviation of the rows below which they are a norm's output; half the ε of their dtype if that is
# more
_CLOSE = 1e-3
_FAR = 0.5  # deviation from a norm's output with which later measurements do not look at it again
_SHRUNK = 0.5  # by which the mean of squares of embeddings of mean 0 may be below 1, for a norm's ε


class _Look(NamedTuple):
    """The rows of a layer, and the weights of the norms whose output they may be."""

    own: nn.Module | None  # the module whose output the layer is
    norms: dict[nn.Module, tuple[Tensor, ...]]  # weight, and bias if there is one, shape (d,)
    rows: Tensor  # shape (m, d); none where there are no such modules
    least: float  # deviation above which they are no norm's output


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
        self._is_output: dict[str, bool] = {}
        self._looks: dict[str, _Look] = {}  # by layer, that are not compared yet
        self._sizes: dict[str, float] = {}
        # a mask, and of the first rows that count
        self._places: tuple[Tensor, Tensor] | None = None

    def look(self, layer: Layer, hidden: Tensor, mask: Tensor | None = None) -> None:
        """Keep the first rows of a layer, and the weights that norms have now, for
        `expected_size`.

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
        norms = {
            module: tuple(each.clone() for each in vectors)
            for module in self._candidates[layer.name]
            if (vectors := norm_weights(module, width))
        }
        rows = self._first_rows(hidden, mask).clone() if norms else hidden.new_empty(0, width)
        least = max(_CLOSE, torch.finfo(hidden.dtype).eps / 2)
        self._looks[layer.name] = _Look(own, norms, rows, least)

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
        self._sizes.clear()
        self._places = None

    def _compare(self) -> None:
        """Compare the rows that have been looked at with the norms' weights; a device is waited
        for once.
        """
        looks = dict(self._looks)
        self._looks.clear()
        parts = [
            part
            for look in looks.values()
            for part in (look.rows, *(each for vectors in look.norms.values() for each in vectors))
        ]
        left = iter([each.double() for each in computed(on_host(*parts))])
        for name, look in looks.items():
            rows = next(left)
            norms = {
                module: tuple(next(left) for _ in vectors) for module, vectors in look.norms.items()
            }
            size = self._size(name, look, norms, rows[rows.isfinite().all(1)])
            self._is_output[name] = size is not None
            if size is not None:
                self._sizes[name] = size

    def _size(
        self,
        name: str,
        look: _Look,
        norms: dict[nn.Module, tuple[Tensor, ...]],
        rows: Tensor,
    ) -> float | None:
        """Size of the norm whose output a layer with these rows is, None if of none; later looks
        are at those near it alone.
        """
        # several norms fit while their weights are alike: the next measurement looks at them again
        near = []
        size, least = None, look.least
        for module, (weight, *bias) in norms.items():
            shift = bias[0] if bias else torch.zeros_like(weight)
            for scale in (weight, 1 + weight):
                found = _deviation(
                    (rows - shift) / scale,
                    is_centered=isinstance(module, nn.LayerNorm),
                    of_embeddings=module not in self._in_or_after_blocks,
                )
                if found < _FAR:
                    near.append(module)
                if found < (_FAR if module is look.own else least):
                    size, least = float(scale.square().sum() + shift.square().sum()), found
        if not norms or len(rows):
            self._candidates[name] = [*dict.fromkeys(near)]
        return size

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
        has_norms = any(norm_weights(inner) for block in measured for inner in block.modules())
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
        rows = rows.to_local() if isinstance(rows, DTensor) else rows
        return rows.float() if rows.dtype.itemsize == 1 else rows  # float8 has no arithmetic


def norm_weights(module: nn.Module, width: int | None = None) -> tuple[Tensor, ...]:
    """Weight, and bias if there is one, of a module that has no more, each of this width (or of
    any), as a norm has; else nothing.

    It is nothing where they are not on this rank, or in parts.
    """
    named = dict(module.named_parameters(recurse=False))
    vectors = tuple(
        each.to_local() if isinstance(each, DTensor) else each
        for each in (weight.detach() for weight in named.values())
        if not isinstance(each, DTensor) or all(at.is_replicate() for at in each.placements)
    )
    is_bare = not [*module.children(), *module.buffers(recurse=False)]
    is_whole = len(vectors) == len(named) and not any(each.is_meta for each in vectors)
    shapes = {each.shape for each in vectors}
    is_norm = is_bare and is_whole and [*named] in (["weight"], ["weight", "bias"])
    fits = len(shapes) == 1 and all(len(shape) == 1 and width in (None, *shape) for shape in shapes)
    return vectors if is_norm and fits else ()


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
