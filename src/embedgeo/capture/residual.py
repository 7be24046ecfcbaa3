"""Residual blocks: what the modules inside write into the stream of a block, and the check that its
output is the sum of just that.

A write is an output that no other module of the block reads: the block itself adds it. A module is
opened where its output is a sum already. A sum begins with what enters the block, or with the
output of a LayerNorm of another such sum.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import first_float, first_input
from embedgeo.capture.layers import Layer
from embedgeo.functional.precision import accumulator_dtype
from embedgeo.layer_names import LEDGER

STREAMS = ("stream", "attention", "mlp", "other", "norm_bias", "rounding")
"""Terms of a block's output, which is their sum: what enters; the writes of attention, of the MLP
(or experts), and others (cross-attention, a state-space mixer, a convolution); the biases of norms
after a sum; and rounding in the model's dtype.
"""

_KINDS = {  # of words, the first that fits
    "other": re.compile(r"(?:^|_)(cross|cross_?att(n|ention)|enc_?dec|encoder)(?:_|$)"),
    "attention": re.compile(r"(?:^|_)(attn|attention)(?:_|$)"),
    "mlp": re.compile(
        r"(?:^|_)(mlp|ffn?|feed_?forward|moe|experts|fc2|linear2|dense_relu_dense)(?:_|$)"
    ),
}
_PASSING = re.compile(r"(?:^|_)([a-z]*norm|ln|dropout)\d*(?:_|$)")  # named after what they follow
# names that say what a module is together with one beside it: BERT's, torch's decoder's
_BESIDE = {"output": ("intermediate", "mlp"), "multihead_attn": ("self_attn", "other")}
_FEW_ROWS = 32  # tell which outputs are writes; all rows then have to agree


class _Call(NamedTuple):
    """A call of a module inside of a block; rows have the shape (n, d)."""

    module: nn.Module
    path: str
    read: Tensor | None  # a few rows of its input, where it is as wide as the stream
    entered: Tensor | None  # all rows, for a LayerNorm
    written: Tensor | None  # a few rows of its output, where it is as wide as the stream
    rows: Tensor | None  # all rows


class _Sum(NamedTuple):
    """Terms of a hidden state inside of a block; calls are told by path and number."""

    base: str | None  # the norm whose output it is added to; None: what enters the block
    writes: tuple[tuple[str, str], ...]  # the name of each write among `STREAMS`, and its call
    inside: "_Sum | None" = None  # what enters this norm
    has_middle: bool = False  # the MLP reads the base with what attention and others have added

    def parts(self) -> "Iterator[_Sum]":
        """This sum, and those inside."""
        yield self
        if self.inside is not None:
            yield from self.inside.parts()


class ResidualBlock:
    """A block of a model, whose output is what enters plus outputs of modules inside, in one call
    after the other.

    Which these are is found at the first call of a measurement, in training and in evaluation, and
    again where that no longer holds.
    """

    def __init__(self, layer: Layer) -> None:
        self._block = layer.calls[0].module
        self._given = dict(layer.writes)
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
        for path, module in self._block.named_modules():
            if path:
                yield module, False, partial(self._record, path)

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
        self._calls = dict[str, _Call]()

    def _record(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
    ) -> None:
        """Keep what a module reads and writes: the model may overwrite its own."""
        entered, output = (
            _rows(each).clone() if each is not None and self._is_alike(each) else None
            for each in (first_input(args, kwargs), first_float(returned))
        )
        number = sum(each.path == path for each in self._calls.values())
        self._calls[f"{path} {number}"] = _Call(
            module,
            path,
            None if entered is None else _few(entered),
            entered if isinstance(module, nn.LayerNorm) else None,
            None if output is None else _few(output),
            output,
        )

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
        rows, is_training = _rows(output), self._block.training
        found = self._found.get(is_training)
        if found is None or not self._holds(found, rows):
            found = self._explained(_few(rows), self._inside()) if self._is_alike(output) else None
            if found is None or not self._holds(found, rows):
                raise ValueError(self._refusal(rows))
            found = found._replace(has_middle=self._has_middle(found))
        self._found[is_training] = found
        whole, narrow = _wide(rows), torch.promote_types(output.dtype, torch.float32)
        parts = dict.fromkeys(STREAMS, torch.zeros_like(whole))
        for name, term in self._terms(found):
            parts[name] = _wide((parts[name] + term).to(narrow))
        parts["rounding"] = whole - sum(parts.values(), torch.zeros_like(whole))
        every = torch.stack([parts[name].to(narrow) for name in STREAMS], 1)
        return {
            LEDGER: every.view(*output.shape[:-1], -1),
            **{
                name: term.to(output.dtype).view(output.shape)
                for name, term in self._written(found).items()
            },
        }

    def _holds(self, found: _Sum, rows: Tensor) -> bool:
        """Tell whether all rows are this sum."""
        for part in found.parts():
            keys = [key for _, key in part.writes]
            if not self._calls.keys() >= {*keys, *([part.base] if part.base else [])}:
                return False
            if not _is_sum(rows, self._start(part), [self._rows(key) for key in keys]):
                return False
            if part.base is not None:
                entered = self._calls[part.base].entered
                assert entered is not None
                rows = entered
        return True

    def _rows(self, key: str) -> Tensor:
        rows = self._calls[key].rows
        assert rows is not None
        return rows

    def _start(self, part: _Sum) -> Tensor:
        return self._entered if part.base is None else self._rows(part.base)

    def _terms(self, found: _Sum) -> list[tuple[str, Tensor]]:
        """Streams by name that add up to a sum."""
        writes = [(name, _wide(self._rows(key))) for name, key in found.writes]
        if found.base is None or found.inside is None:
            return [("stream", _wide(self._entered)), *writes]
        return [*_normed(self._calls[found.base], self._terms(found.inside)), *writes]

    def _written(self, found: _Sum) -> dict[str, Tensor]:
        """The writes, as they are written, and the stream between attention and MLP."""
        written = dict[str, Tensor]()
        for part in found.parts():
            for name, key in part.writes:
                rows = _wide(self._rows(key))
                written[name] = written[name] + rows if name in written else rows
        if found.has_middle:
            part, keys = _before_mlp(found)
            written["middle"] = sum(
                (_wide(self._rows(key)) for key in keys), _wide(self._start(part))
            )
        return written

    def _has_middle(self, found: _Sum) -> bool:
        """Tell whether a module is called with what the MLP's write is added to, and not with the
        same without the other writes.
        """
        names = {name for part in found.parts() for name, _ in part.writes}
        if "mlp" not in names or names == {"mlp"}:
            return False
        part, keys = _before_mlp(found)
        start, added = _few(self._start(part)), [_few(self._rows(key)) for key in keys]
        reads = [each.read for each in self._calls.values() if each.read is not None]
        return any(
            _is_sum(read, start, added) and not (added and _is_sum(read, start, []))
            for read in reads
        )

    def _explained(self, target: Tensor, calls: list[str]) -> _Sum | None:
        """What a few rows are the sum of, given the calls before they were made."""
        writes = self._unread(calls)
        for base in (*reversed(calls), None):
            later = calls if base is None else calls[calls.index(base) + 1 :]
            after = [key for key in writes if key in later]
            start = _few(self._entered) if base is None else self._calls[base].written
            if start is None or not (base is None or after):
                continue
            if _is_sum(target, start, [_few(self._rows(key)) for key in after]):
                inside = _Sum(None, ()) if base is None else self._made(base, calls)
                if inside is not None:
                    names = tuple((self._name(key, calls), key) for key in after)
                    return inside._replace(writes=(*inside.writes, *names))
        same = (key for key in reversed(calls) if _equal(self._calls[key].written, target))
        last = next(same, None)
        return None if last is None else self._made(last, calls)

    def _made(self, key: str, calls: list[str]) -> _Sum | None:
        """What a call's output is the sum of: of a norm, what its input is; of others, what is seen
        once they are opened.
        """
        call, before = self._calls[key], calls[: calls.index(key)]
        assert call.written is not None
        # a class that computes otherwise is no LayerNorm
        if call.entered is not None and type(call.module).forward is nn.LayerNorm.forward:
            inside = self._explained(_few(call.entered), before)
            return None if inside is None else _Sum(key, (), inside)
        if _equal(call.read, call.written):
            return self._explained(call.written, before)
        inner = self._inside(key)
        if self._kind(call.path):  # it writes once, after queries, keys and values
            ends = [
                each
                for each in self._unread(inner)
                if not _equal(self._calls[each].written, call.written)
            ]
            inner = [each for each in inner if each not in ends[:-1]]
        return self._explained(call.written, [*before, *inner]) if inner else None

    def _inside(self, key: str = "") -> list[str]:
        """The calls that a call, or the block, makes itself; those with given modules inside are
        opened.
        """
        keys = [*self._calls]
        path = self._calls[key].path if key else ""
        found = list[str]()
        for each in reversed(keys[: keys.index(key)] if key else keys):
            own = self._calls[each].path
            if own == path:
                break
            around = [f"{self._calls[other].path}." for other in found]
            if own.startswith(f"{path}." if path else "") and not own.startswith((*around,)):
                found.append(each)
        opened = list[str]()
        for each in reversed(found):
            module = self._calls[each].module
            inner = {*module.modules()} - {module}
            is_opened = module not in self._given and not inner.isdisjoint(self._given)
            opened += self._inside(each) if is_opened else [each]
        return opened

    def _source(self, key: str, calls: list[str]) -> str | None:
        """The last call before this one whose output it reads."""
        read = self._calls[key].read
        before = reversed(calls[: calls.index(key)])
        return next((each for each in before if _equal(self._calls[each].written, read)), None)

    def _unread(self, calls: list[str]) -> list[str]:
        """The writes among calls, whose output no other reads; of given modules if there are
        any.
        """
        read = {self._source(key, calls) for key in calls}
        return [
            key
            for key in calls
            if key not in read and self._calls[key].rows is not None and self._name(key, calls)
        ]

    def _name(self, key: str, calls: list[str]) -> str:
        """Name of a write: that of its module, or of the one whose output this reads."""
        at: str | None = key
        while at is not None:
            if kind := self._kind(self._calls[at].path):
                return kind
            at = self._source(at, calls)
        return "" if self._given else "other"

    def _kind(self, path: str) -> str:
        """What a module writes, by the first name on its path that tells; empty if none does."""
        names = path.split(".")
        for i, name in enumerate(names, 1):
            module = self._block.get_submodule(".".join(names[:i]))
            if self._given:
                if module in self._given:
                    return self._given[module]
                continue
            words = _words(name)
            if i == len(names) and _PASSING.search(words):
                return ""
            beside, kind = _BESIDE.get(name, ("", ""))
            if hasattr(self._block, beside):
                return kind
            if "mixer" in words.split("_"):
                words = _words(type(module).__name__)
            for kind, pattern in _KINDS.items():
                if pattern.search(words):
                    return kind
        return ""

    def _refusal(self, rows: Tensor) -> str:
        """The sentence that names the write which is not what is added."""
        keys = self._unread(self._inside()) if self._is_alike(rows) else []
        writes = {self._calls[key].path: _few(_wide(self._rows(key))) for key in keys}
        left = _few(_wide(rows)) - sum(writes.values(), _few(_wide(self._entered))) if keys else 0
        shares = {path: float((left * each).sum() / each.norm()) for path, each in writes.items()}
        path = max(shares, key=lambda each: abs(shares[each]), default="any module")
        return (
            "layers='residual' needs a block whose output is its input plus what modules inside "
            f"write; what {path!r} writes is not what is added (there may be a gate, a scale, or a "
            "dropout that is no module, which eval mode, probe= or observe turn off): name what "
            "writes by Residual(writes=…), or leave the block out."
        )


def _before_mlp(found: _Sum) -> tuple[_Sum, list[str]]:
    """The part of a sum that the MLP adds to, and the other writes that it has."""
    part = next(part for part in found.parts() if any(name == "mlp" for name, _ in part.writes))
    return part, [key for name, key in part.writes if name != "mlp"]


def _is_sum(target: Tensor, base: Tensor, writes: Sequence[Tensor]) -> bool:
    """Tell whether rows are a sum but for its rounding: at no place more than that of these terms
    there, in the dtype that they are added in.
    """
    terms = [base, *writes]
    of_sum = _coarsest(target.dtype, reduce(torch.promote_types, [each.dtype for each in terms]))
    of_writes = _coarsest(*(each.dtype for each in writes)) if len(writes) > 1 else 0.0
    wide = [_wide(each) for each in terms]
    left = _wide(target) - sum(wide[1:], wide[0])
    written = sum((each.abs() for each in wide[1:]), torch.zeros_like(left))
    size = written + wide[0].abs()
    own = torch.finfo(left.dtype).eps
    rounding = (of_sum / 2 + own) * size + of_writes / 2 * written + torch.finfo(target.dtype).tiny
    finite = left.isfinite().all(1, keepdim=True)
    return bool(((left.abs() <= len(terms) * rounding) | ~finite).all())


def _coarsest(*dtypes: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _equal(rows: Tensor | None, others: Tensor | None) -> bool:
    return rows is not None and others is not None and torch.equal(_wide(rows), _wide(others))


def _words(name: str) -> str:
    """A name's words in lower case."""
    found = re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*", name)
    return "_".join(found).lower()


def _normed(norm: _Call, inside: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
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
