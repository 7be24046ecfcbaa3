"""Residual blocks: the writes that a block adds to its stream, found in a forward pass and verified
in each.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import first_float, first_input
from embedgeo.functional.precision import accumulator_dtype
from embedgeo.layer_names import LEDGER

STREAMS = ("stream", "attention", "mlp", "other", "norm_bias", "rounding")
"""Terms of a block's output, which is their sum: what enters; the writes of attention, of the MLP
(or experts), and others (cross-attention, a state-space mixer); the biases of norms after a sum;
and rounding in the model's dtype.
"""

_OTHER = re.compile(r"cross|encdec|encoder_attn|mixer|mamba|ssm|rwkv", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MOST_WRITES = 3  # attention, cross-attention and MLP
_FEW_ROWS = 32  # tell which outputs are writes; all rows then have to agree
_ROUNDINGS = 4  # of the coarsest dtype that a sum of a few streams, and a norm of it, may leave
_LEAST_EPS = 2.0**-44  # norms are computed again in float64, in another order


class _Output(NamedTuple):
    """Input and output of a call of a module inside of a block, rows of shape (n, d)."""

    module: nn.Module
    path: str  # names and classes of the modules down to it
    entered: Tensor | None  # for a LayerNorm
    rows: Tensor


class _Sum(NamedTuple):
    """Terms of a hidden state inside of a block; outputs of modules are told by path and number of
    call.
    """

    base: str | None  # the norm whose output it is added to; None: what enters the block
    writes: tuple[tuple[str, str], ...]  # the name of each write among `STREAMS`, and its output
    inside: "_Sum | None" = None  # what enters this norm, where it is one of a sum
    # what enters the block, in float64, is rounded to float32 first, as Mamba's is
    is_cut: bool = False
    has_middle: bool = False  # the MLP reads what enters the block with what attention has written

    def parts(self) -> "Iterator[_Sum]":
        """This sum, and those inside."""
        yield self
        if self.inside is not None:
            yield from self.inside.parts()


class ResidualBlock:
    """A block of a model, whose output is what enters plus outputs of modules inside, in one call
    after the other.

    Which these are is found at the first call of a measurement, in training and in evaluation, and
    again where that no longer holds: a write that is too small for its dtype is told alike in all
    calls, and found once it has grown.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.reset()

    def reset(self) -> None:
        """Begin a measurement."""
        self._found = dict[bool, _Sum]()
        self.leave()

    def hooks(self) -> Iterator[tuple[nn.Module, bool, Callable[..., None]]]:
        """Hooks on the modules of the block that note what enters it, and what is written inside.

        Of each the module; whether it is called before the module, and then with its arguments, by
        position and by name, or after it, with its output, too; and the hook.
        """
        yield self._block, True, self._enter
        path = {"": ""}
        for name, module in self._block.named_modules():
            parent, _, own = name.rpartition(".")
            if name:
                path[name] = f"{path[parent]}.{own}:{type(module).__name__}"
                yield module, False, partial(self._record, path[name])

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object = None
    ) -> None:
        self.leave()
        if (hidden := first_input(args, kwargs)) is not None:
            self._shape = hidden.shape
            self._entered = _rows(hidden).clone()

    def leave(self) -> None:
        """Drop all that a call has left."""
        self._shape, self._entered = torch.Size(), torch.empty(0, 0)
        self._outputs = dict[str, _Output]()
        self._inputs = list[Tensor]()  # of modules, a few rows of each

    def _record(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
    ) -> None:
        """Keep a module's output if it can be a write: the model may overwrite its own."""
        entered, output = first_input(args, kwargs), first_float(returned)
        if entered is not None and self._is_alike(entered):
            self._inputs.append(_few(_rows(entered)).clone())
        if output is None or not self._is_alike(output):
            return
        before = (
            _rows(entered).clone()
            if isinstance(module, nn.LayerNorm) and entered is not None
            else None
        )
        number = sum(each.path == path for each in self._outputs.values())
        self._outputs[f"{path} {number}"] = _Output(module, path, before, _rows(output).clone())

    def _is_alike(self, hidden: Tensor) -> bool:
        return (
            len(self._shape) > 0
            and hidden.numel() == self._shape.numel()
            and hidden.shape[-1] == self._shape[-1]
        )

    def streams(self, output: Tensor) -> dict[str, Tensor]:
        """Divide the block's output, shape (..., d), into what it is the sum of.

        Returns:
            The `STREAMS` side by side, which add up to it, shape (..., K d), as `LEDGER`; and those
            of `PARTS` that the block has, as they were written, before any norm of a sum, shape
            (..., d).

        Raises:
            ValueError: the output is no sum of what entered and of outputs of modules inside.
        """
        if not self._is_alike(output):
            raise ValueError(_refusal(1.0))
        whole, is_training = _wide(_rows(output)), self._block.training
        finite = whole.isfinite().all(1, keepdim=True) & self._entered.isfinite().all(
            1, keepdim=True
        )
        narrow = torch.promote_types(output.dtype, torch.float32)
        for known in dict.fromkeys((self._found.get(is_training), None)):
            if known is not None and not all(key in self._outputs for key in _keys(known)):
                continue
            found = self._search(output, finite) if known is None else known
            parts = self._divided(found, whole, narrow)
            size = sum(torch.where(finite, rows, 0).square().sum() for rows in parts.values())
            share = float(
                (torch.where(finite, parts["rounding"], 0).square().sum() / size)
                .nan_to_num()
                .sqrt()
            )
            if share <= self._tolerance(found, output.dtype):
                self._found[is_training] = found
                break
        else:
            raise ValueError(_refusal(share))
        every = torch.stack([parts[name].to(narrow) for name in STREAMS], 1)
        written = {
            name: rows.to(output.dtype).view(output.shape)
            for name, rows in self._written(found).items()
        }
        return {LEDGER: every.view(*output.shape[:-1], -1), **written}

    def _divided(self, found: _Sum, whole: Tensor, narrow: torch.dtype) -> dict[str, Tensor]:
        """The `STREAMS` of all rows, each rounded to ``narrow``, which add up to the ``whole``."""
        parts = dict.fromkeys(STREAMS, torch.zeros_like(whole))
        for name, rows in self._terms(found):
            parts[name] = _wide((parts[name] + rows).to(narrow))
        parts["rounding"] = whole - sum(parts.values(), torch.zeros_like(whole))
        return parts

    def _terms(self, found: _Sum) -> list[tuple[str, Tensor]]:
        """Streams by name that add up to a sum."""
        writes = [(name, _wide(self._outputs[key].rows)) for name, key in found.writes]
        if found.base is None:
            return [("stream", _wide(self._entered)), *writes]
        assert found.inside is not None
        return [*_normed(self._outputs[found.base], self._terms(found.inside)), *writes]

    def _written(self, found: _Sum) -> dict[str, Tensor]:
        """The writes, as they are written, and the stream between attention and MLP."""
        written = dict[str, Tensor]()
        for part in found.parts():
            for name, key in part.writes:
                rows = _wide(self._outputs[key].rows)
                written[name] = written[name] + rows if name in written else rows
            if part.base is not None and any(name == "mlp" for name, _ in part.writes):
                written["middle"] = _wide(self._outputs[part.base].rows)
        if found.has_middle:
            before = (written[name] for name in ("attention", "other") if name in written)
            written["middle"] = sum(before, _wide(self._entered))
        return written

    def _tolerance(self, found: _Sum, dtype: torch.dtype) -> float:
        """The share of a sum that rounding may leave in the dtypes that it is computed in."""
        dtypes = {dtype, *(self._outputs[key].rows.dtype for key in _keys(found))}
        dtypes |= {torch.float32 for part in found.parts() if part.is_cut}
        return _ROUNDINGS * max(_LEAST_EPS, *(torch.finfo(each).eps for each in dtypes))

    def _search(self, output: Tensor, finite: Tensor) -> _Sum:
        """Find what the block's output is the sum of, on a few rows."""
        sample = finite.flatten().nonzero().flatten()
        sample = sample[:: max(1, len(sample) // _FEW_ROWS)][:_FEW_ROWS]
        few = _wide(_rows(output)[sample])
        found = self._explained(few, self._outputs, sample, output.dtype)
        return found._replace(has_middle=self._has_middle(found, output.dtype))

    def _explained(
        self, few: Tensor, outputs: Mapping[str, _Output], sample: Tensor, dtype: torch.dtype
    ) -> _Sum:
        """The sum that is nearest to these rows, of ``outputs`` of the modules called before they
        were made.

        It is what entered the block, or a norm's output, plus a few others; a norm's is what its
        input is made of.
        """
        entered = _wide(self._entered[sample])
        candidates = _distinct(outputs, sample)
        bases: list[tuple[str | None, bool, Tensor]] = [(None, False, entered)]
        if dtype == torch.float64:
            bases.append((None, True, _wide(entered.float())))
        bases += [
            (key, False, rows)
            for key, rows in candidates.items()
            if outputs[key].entered is not None
        ]
        sums = list[_Sum]()
        left = list[Tensor]()
        for base, is_cut, start in bases:
            others = [key for key in candidates if key != base]
            for chosen in chain.from_iterable(
                combinations(others, count) for count in range(_MOST_WRITES + 1)
            ):
                sums.append(_Sum(base, tuple(("", key) for key in chosen), is_cut=is_cut))
                left.append((few - sum((candidates[key] for key in chosen), start)).norm())
        nearest, best = torch.inf, sums[0]
        for distance, each in zip(torch.stack(left).tolist(), sums, strict=True):
            if distance < nearest * (1 - 1e-3):
                nearest, best = distance, each
        size = max(float(few.norm()), float(entered.norm()))
        if nearest > self._tolerance(best, dtype) * size:
            raise ValueError(
                _refusal(nearest / max(float(few.norm()), torch.finfo(few.dtype).tiny))
            )
        best = best._replace(writes=_named(best, [(key, outputs[key]) for key in candidates]))
        if best.base is None:
            return best
        norm = outputs[best.base]
        assert norm.entered is not None
        before = dict(takewhile(lambda each: each[0] != best.base, outputs.items()))
        return best._replace(
            inside=self._explained(_wide(norm.entered[sample]), before, sample, norm.entered.dtype)
        )

    def _has_middle(self, found: _Sum, dtype: torch.dtype) -> bool:
        """Tell whether the MLP reads the stream with what attention has written: a module inside
        was called with it.
        """
        names = {name for part in found.parts() for name, _ in part.writes}
        if found.base is not None or "mlp" not in names or names.isdisjoint({"attention", "other"}):
            return False
        middle = _wide(_few(self._written(found._replace(has_middle=True))["middle"]))
        entered = _wide(_few(self._entered))
        finite = middle.isfinite().all(1)
        far, limit = (
            (middle - entered)[finite].norm(),
            self._tolerance(found, dtype) * middle[finite].norm(),
        )
        distances = [(_wide(rows) - middle)[finite].norm() for rows in self._inputs]
        return any(bool((distance <= limit) & (2 * distance <= far)) for distance in distances)


def _keys(found: _Sum) -> list[str]:
    """The outputs that a sum is made of."""
    of_parts = ([part.base, *(key for _, key in part.writes)] for part in found.parts())
    return [key for keys in of_parts for key in keys if key is not None]


def _named(found: _Sum, outputs: Sequence[tuple[str, _Output]]) -> tuple[tuple[str, str], ...]:
    """The writes of a sum with their names, which modules called since the write or the norm before
    tell.
    """
    named = []
    writes = {key for _, key in found.writes}
    since = list[str]()
    earlier = list[nn.Module]()  # modules around them return later, and tell nothing new
    for key, each in outputs:
        if not earlier or set(each.module.modules()).isdisjoint(earlier):
            since += [] if "Norm" in type(each.module).__name__ else [each.path]
        if key in writes:
            path = " ".join([*since, each.path])
            kind = (
                "other"
                if _OTHER.search(path)
                else "attention"
                if _ATTENTION.search(path)
                else "mlp"
            )
            named.append((kind, key))
        if key in writes or key == found.base:
            since.clear()
            earlier.append(each.module)
    return tuple(named)


def _distinct(outputs: Mapping[str, _Output], sample: Tensor) -> dict[str, Tensor]:
    """A few rows of outputs, without those that a module further out or a dropout that is off
    returns again, or 0.
    """
    found = dict[str, Tensor]()
    for key, each in outputs.items():
        rows = _wide(each.rows[sample])
        if bool(rows.any()) and not any(torch.equal(rows, other) for other in found.values()):
            found[key] = rows
    return found


def _normed(norm: _Output, inside: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The streams of a LayerNorm's output, given those of its input: each row's scale, γ, and β
    apart.
    """
    module = norm.module
    assert isinstance(module, nn.LayerNorm)
    assert norm.entered is not None
    entered = _wide(norm.entered)
    scale = (entered.var(1, correction=0, keepdim=True) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight.detach().to(entered.dtype)
    streams = [(name, (rows - rows.mean(1, keepdim=True)) * scale) for name, rows in inside]
    if module.bias is not None:
        streams.append(("norm_bias", module.bias.detach().to(entered.dtype).expand_as(entered)))
    return streams


def _rows(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


def _few(rows: Tensor) -> Tensor:
    """A few rows of those of the block, from all of them."""
    return rows[:: max(1, len(rows) // _FEW_ROWS)]


def _wide(rows: Tensor) -> Tensor:
    return rows.to(accumulator_dtype(rows.device))


def _refusal(share: float) -> str:
    return (
        "layers='residual' needs a block whose output is its input plus outputs of modules inside "
        "it, with LayerNorms "
        f"of such sums; here {share:.1e} of it is left over. Dropout that is no module hides a "
        f"write while "
        "training: measure in eval mode, by probe= or observe; or leave the block out."
    )
