"""Residual blocks: the writes that a block adds to its stream, found in a forward pass and verified."""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embedgeo.capture.layers import SUM
from embedgeo.functional.precision import accumulator_dtype

STREAMS = ("stream", "attention", "mlp", "other", "norm_bias", "rounding")
"""Terms of a block's output, which is their sum: what enters; the writes of attention, of the MLP (or experts), and
others (cross-attention, a state-space mixer); the biases of norms after a sum; and rounding in the model's dtype."""

_OTHER = re.compile(r"cross|encdec|encoder_attn|mixer|mamba|ssm|rwkv", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MOST_WRITES = 3  # attention, cross-attention and MLP
_FEW_ROWS = 32  # tell which outputs are writes; all rows then have to agree
_ROUNDINGS = 8  # of the model's dtype that a sum of a few streams, and a norm of it, may leave


class _Output(NamedTuple):
    """Input and output of a module inside of a block: (n, d) rows, in the accumulator's dtype."""

    module: nn.Module
    path: str  # names and classes of the modules down to it
    entered: Tensor | None  # for a norm
    rows: Tensor


class BlockCall:
    """One call of a block: what has entered it, and what the modules inside have returned."""

    def __init__(self, entered: Tensor) -> None:
        self._shape = entered.shape
        self._entered = self._rows(entered)
        self._outputs: list[_Output] = []
        self._inputs: list[Tensor] = []  # of modules, a few rows of each
        self._parts: dict[str, Tensor] = {}  # writes as they are written, and the stream between them

    def record(self, module: nn.Module, path: str, entered: Tensor | None, output: Tensor | None) -> None:
        """Keep a module's output if it can be a write: the model may overwrite its own."""
        if entered is not None and entered.shape == self._shape:
            self._inputs.append(self._rows(self._thinned(entered)))
        if output is None or output.numel() != self._shape.numel() or output.shape[-1] != self._shape[-1]:
            return
        is_norm = isinstance(module, nn.LayerNorm) and entered is not None
        before = self._rows(entered) if is_norm and entered is not None else None
        self._outputs.append(_Output(module, path, before, self._rows(output)))

    def streams(self, output: Tensor) -> dict[str, Tensor]:
        """What the block's output, shape (..., d), is the sum of.

        Returns:
            The `STREAMS` side by side, which add up to it, shape (..., K d), as `SUM`; and those of `PARTS` that the
            block has, as they were written, before any norm of a sum, shape (..., d).

        Raises:
            ValueError: the output is no sum of what entered and of outputs of modules inside.
        """
        whole = self._rows(output)
        finite = whole.isfinite().all(1) & self._entered.isfinite().all(1)
        sample = finite.nonzero().flatten()
        sample = sample[:: max(1, len(sample) // _FEW_ROWS)][:_FEW_ROWS]
        parts = dict.fromkeys(STREAMS, torch.zeros_like(whole))
        narrow = torch.promote_types(output.dtype, torch.float32)
        tolerance = _ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (output.dtype, torch.float32))  # Mamba's sums
        for name, rows in self._explained(whole, self._outputs, sample, tolerance):
            parts[name] = (parts[name] + rows).to(narrow).to(whole.dtype)
        parts["rounding"] = whole - sum(parts.values(), torch.zeros_like(whole))
        size = sum(rows[finite].square().sum() for rows in parts.values())
        left = parts["rounding"][finite].square().sum()
        if bool(left > tolerance**2 * size):
            raise ValueError(_refusal(float((left / size).sqrt())))
        every = torch.stack([parts[name].to(narrow) for name in STREAMS], 1)
        if "middle" not in self._parts and self._has_middle(tolerance):
            self._parts["middle"] = self._before_mlp(self._entered)
        found = {SUM: every.view(*output.shape[:-1], -1)}
        return found | {name: rows.to(output.dtype).view(output.shape) for name, rows in self._parts.items()}

    def _has_middle(self, tolerance: float) -> bool:
        """Tell whether the MLP reads the stream with what attention has written: a module inside was called with it."""
        before = [self._parts[name] for name in ("attention", "other") if name in self._parts]
        if not before or "mlp" not in self._parts:
            return False
        entered = self._thinned(self._entered)
        middle = self._before_mlp(entered)
        finite = middle.isfinite().all(1)
        far, limit = (middle - entered)[finite].norm(), tolerance * middle[finite].norm()
        distances = [(rows - middle)[finite].norm() for rows in self._inputs]
        return any(bool((distance <= limit) & (2 * distance <= far)) for distance in distances)

    def _before_mlp(self, entered: Tensor) -> Tensor:
        """The stream with what attention and cross-attention have written, where a few rows of it have entered, too."""
        writes = [self._parts[name] for name in ("attention", "other") if name in self._parts]
        return sum((rows if len(rows) == len(entered) else self._thinned(rows) for rows in writes), entered)

    def _explained(
        self, whole: Tensor, outputs: Sequence[_Output], sample: Tensor, tolerance: float
    ) -> list[tuple[str, Tensor]]:
        """Streams by name that add up to ``whole``; ``outputs`` are of the modules called before it was made.

        It is what entered the block, or a norm's output, plus a few others; a norm's is what its input is made of.
        """
        few = whole[sample]
        candidates = _distinct(outputs, sample)
        norms = [each for each in candidates if each.entered is not None]
        best: tuple[float, _Output | None, tuple[_Output, ...]] = (torch.inf, None, ())
        for base in (None, *norms):
            missing = few - (self._entered if base is None else base.rows)[sample]
            others = [each for each in candidates if each is not base]
            for count in range(_MOST_WRITES + 1):
                for chosen in combinations(others, count):
                    left = missing - sum((each.rows[sample] for each in chosen), torch.zeros_like(few))
                    distance = float(left.norm())
                    if distance < best[0] * (1 - 1e-3):
                        best = distance, base, chosen
        distance, base, writes = best
        if distance > tolerance * max(float(few.norm()), float(self._entered[sample].norm())):
            raise ValueError(_refusal(distance / max(float(few.norm()), torch.finfo(few.dtype).tiny)))
        named = self._named(base, writes, candidates)
        for name, rows in named:
            self._parts[name] = self._parts[name] + rows if name in self._parts else rows
        if base is not None and any(name == "mlp" for name, _ in named):
            self._parts["middle"] = base.rows
        if base is None or base.entered is None:
            return [("stream", self._entered), *named]
        before = outputs[: next(i for i, each in enumerate(outputs) if each.module is base.module)]
        inside = self._explained(base.entered, before, sample, tolerance)
        return [*_normed(base, inside), *named]

    def _named(
        self, base: _Output | None, writes: Sequence[_Output], outputs: Sequence[_Output]
    ) -> list[tuple[str, Tensor]]:
        """Writes with their names, which modules that were called since the write or the norm before tell."""
        named = []
        since = list[str]()
        earlier = list[nn.Module]()  # modules around them return later, and tell nothing new
        for each in outputs:
            if not earlier or set(each.module.modules()).isdisjoint(earlier):
                since += [] if type(each.module).__name__.endswith("Norm") else [each.path]
            is_write = any(each is write for write in writes)
            if is_write:
                path = " ".join([*since, each.path])
                kind = "other" if _OTHER.search(path) else "attention" if _ATTENTION.search(path) else "mlp"
                named.append((kind, each.rows))
            if is_write or each is base:
                since.clear()
                earlier.append(each.module)
        return named

    def _thinned(self, hidden: Tensor) -> Tensor:
        """A few rows of those of the block, from all of them."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return rows[:: max(1, len(rows) // _FEW_ROWS)]

    @staticmethod
    def _rows(hidden: Tensor) -> Tensor:
        return hidden.detach().reshape(-1, hidden.shape[-1]).to(accumulator_dtype(hidden.device), copy=True)


def _distinct(outputs: Sequence[_Output], sample: Tensor) -> list[_Output]:
    """Outputs without those that a module further out, or a dropout that is off, has returned again, and zeros."""
    found = list[_Output]()
    for each in outputs:
        rows = each.rows[sample]
        if bool(rows.any()) and not any(torch.equal(rows, other.rows[sample]) for other in found):
            found.append(each)
    return found


def _normed(norm: _Output, inside: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The streams of a LayerNorm's output, given those of its input: each row's scale, γ, and β apart."""
    module, entered = norm.module, norm.entered
    assert isinstance(module, nn.LayerNorm)
    assert entered is not None
    scale = (entered.var(1, correction=0, keepdim=True) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight.detach().to(entered.dtype)
    streams = [(name, (rows - rows.mean(1, keepdim=True)) * scale) for name, rows in inside]
    if module.bias is not None:
        streams.append(("norm_bias", module.bias.detach().to(entered.dtype).expand_as(entered)))
    return streams


def _refusal(share: float) -> str:
    return (
        "layers='residual' needs a block whose output is its input plus outputs of modules inside it, with LayerNorms "
        f"of such sums; here {share:.1e} of it is left over. Dropout that is no module hides a write while "
        "training: measure in eval mode, by probe= or observe; or leave the block out."
    )
