"""Residual blocks: what the modules inside write into the stream of a block, and the check that its
output is the sum of just that.

A write is an output that no other module of the block reads: the block itself adds it. A module is
opened where its output is a sum already. A sum begins with what enters the block, or with the
output of a LayerNorm of another such sum.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import first_float, first_input
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import unwrapped
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
    """A call of a module inside of a block; what is not as wide as the stream has no rows."""

    module: nn.Module
    path: str
    entered: Tensor  # what it reads, shape (n, d): all rows for a LayerNorm, few for others
    rows: Tensor  # its output, shape (n, d)
    inside: list[str]  # the calls that it makes itself


# Terms of a hidden state inside of a block: of each call whose output is one, told by path and
# number, the name among `STREAMS`. The first is the norm that the sum begins with, or empty, which
# is what enters the block; what enters that norm is the next sum, and so on.
_Sums = list[dict[str, str]]


class ResidualBlock:
    """A block of a model, whose output is what enters plus outputs of modules inside, in one call
    after the other.

    Which these are is found at the first call of a measurement, and again where that no longer
    holds.
    """

    def __init__(self, layer: Layer) -> None:
        self._block = layer.calls[0].module
        self._given = dict(layer.writes)
        self.reset()

    def reset(self) -> None:
        """Begin a measurement."""
        self._found: _Sums = []
        self._middle: list[str] = []  # terms of what the MLP's write is added to, if it is read
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
            self._entered = _rows(hidden).clone()

    def leave(self) -> None:
        """Drop all that a call has left."""
        self._entered = torch.empty(0, 0)
        self._calls = dict[str, _Call]()
        self._outermost = list[str]()  # of these calls

    def _record(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
    ) -> None:
        """Keep what a module reads and writes: the model may overwrite its own."""
        read, written = self._stream(first_input(args, kwargs)), self._stream(first_float(returned))
        read = read if isinstance(module, nn.LayerNorm) else _few(read)
        key = f"{path} {sum(each.path == path for each in self._calls.values())}"
        inside = [each for each in self._outermost if each.startswith(f"{path}.")]
        self._outermost = [*(each for each in self._outermost if each not in inside), key]
        self._calls[key] = _Call(module, path, read.clone(), written.clone(), inside)

    def _stream(self, hidden: Tensor | None) -> Tensor:
        """Rows, shape (n, d), of what is as wide as the stream; none of others."""
        is_stream = (
            hidden is not None
            and hidden.numel() == self._entered.numel()
            and hidden.shape[-1:] == self._entered.shape[-1:]
        )
        return _rows(hidden) if hidden is not None and is_stream else torch.empty(0, 0)

    def streams(self, output: Tensor) -> dict[str, Tensor]:
        """Divide the block's output, shape (..., d), into what it is the sum of.

        Returns:
            The `STREAMS` side by side, which add up to it, shape (..., K d), as `LEDGER`; and those
            of `PARTS` that the block has, as they were written, before any norm of a sum, shape
            (..., d).

        Raises:
            ValueError: the output is no sum of what entered and of outputs of modules inside.
        """
        rows = self._stream(output)
        if not self._holds(self._found, rows):
            self._found = self._explained(_few(rows), self._outermost)
            if not self._holds(self._found, rows):
                raise ValueError(self._refusal(rows))
            self._middle = self._before_mlp()
        whole, narrow = _wide(rows), torch.promote_types(output.dtype, torch.float32)
        parts = dict.fromkeys(STREAMS, torch.zeros_like(whole))
        for name, term in self._terms():
            parts[name] = _wide((parts[name] + term).to(narrow))
        parts["rounding"] = whole - sum(parts.values(), torch.zeros_like(whole))
        every = torch.stack([parts[name].to(narrow) for name in STREAMS], 1)
        return {
            LEDGER: every.view(*output.shape[:-1], -1),
            **{
                name: term.to(output.dtype).view(output.shape)
                for name, term in self._written().items()
            },
        }

    def _terms_of(self, keys: Iterable[str]) -> list[Tensor]:
        return [self._calls[key].rows if key else self._entered for key in keys]

    def _holds(self, found: _Sums, rows: Tensor) -> bool:
        """Tell whether all rows are this sum."""
        for part in found:
            if not part.keys() <= {"", *self._calls} or not _is_sum(rows, self._terms_of(part)):
                return False
            rows = next(self._calls[key].entered if key else rows for key in part)
        return len(found) > 0

    def _terms(self) -> list[tuple[str, Tensor]]:
        """Streams by name that add up to the block's output."""
        terms = list[tuple[str, Tensor]]()
        for part in reversed(self._found):
            (base, _), *writes = part.items()
            terms = (
                _normed(self._calls[base], terms) if base else [("stream", _wide(self._entered))]
            )
            terms += [(name, _wide(self._calls[key].rows)) for key, name in writes]
        return terms

    def _written(self) -> dict[str, Tensor]:
        """The writes, as they are written, and the stream between attention and MLP."""
        written = dict[str, Tensor]()
        for key, name in (write for part in self._found for write in [*part.items()][1:]):
            rows = _wide(self._calls[key].rows)
            written[name] = written[name] + rows if name in written else rows
        if self._middle:
            written["middle"] = torch.stack([*map(_wide, self._terms_of(self._middle))]).sum(0)
        return written

    def _before_mlp(self) -> list[str]:
        """Terms of what the MLP's write is added to, where a module reads that, as it does not
        without the writes among them; else none.
        """
        names = {name for part in self._found for name in part.values()}
        if "mlp" not in names or names.isdisjoint({"attention", "other"}):
            return []
        part = next(part for part in self._found if "mlp" in part.values())
        keys = [key for key, name in part.items() if name != "mlp"]
        terms = [*map(_few, self._terms_of(keys))]
        reads = (_few(each.entered) for each in self._calls.values())
        read = (each for each in reads if _is_sum(each, terms))
        return keys if any(len(keys) == 1 or not _is_sum(each, terms[:1]) for each in read) else []

    def _explained(self, target: Tensor, calls: list[str]) -> _Sums:
        """Find the sum that a few rows are, given the calls before they were made; empty if they
        are none.
        """
        unread = self._unread(calls)
        for base in (*reversed(calls), ""):
            writes = [key for key in unread if not base or key in calls[calls.index(base) + 1 :]]
            terms = [*map(_few, self._terms_of([base, *writes]))]
            is_sum = (writes or not base) and _is_sum(target, terms)
            if is_sum and (found := self._made(base, calls) if base else [{"": "stream"}]):
                found[0].update((key, self._name(key, calls)) for key in writes)
                return found
        last = self._last(target, calls)
        return self._made(last, calls) if last else []

    def _made(self, key: str, calls: list[str]) -> _Sums:
        """Find the sum that a call's output is: of a norm, by its input; of others, once they are
        opened.
        """
        call, before = self._calls[key], calls[: calls.index(key)]
        # a class of its own may compute otherwise
        if type(call.module).forward is nn.LayerNorm.forward:
            inside = self._explained(_few(call.entered), before)
            return [{key: ""}, *inside] if inside else []
        return self._explained(_few(call.rows), [*before, *call.inside])

    def _last(self, rows: Tensor, calls: list[str]) -> str:
        """The last call whose output has these rows, a few; empty if none has."""
        outputs = ((key, _few(self._calls[key].rows)) for key in reversed(calls))
        return next((key for key, each in outputs if each.numel() and _equal(each, rows)), "")

    def _source(self, key: str, calls: list[str]) -> str:
        """The last call before this one whose output it reads."""
        return self._last(_few(self._calls[key].entered), calls[: calls.index(key)])

    def _unread(self, calls: list[str]) -> list[str]:
        """The writes among calls, whose outputs no other reads."""
        read = {self._source(key, calls) for key in calls}
        unread = [key for key in calls if key not in read and self._calls[key].rows.numel()]
        return [key for key in unread if self._name(key, calls)]

    def _name(self, key: str, calls: list[str]) -> str:
        """Name of a write: that of its module, or of the one whose output this reads; empty where
        others are given.
        """
        while key:
            call = self._calls[key]
            inner = {*call.module.modules()}
            given = (
                kind
                for outer, kind in self._given.items()
                if outer in inner or call.module in outer.modules()
            )
            if kind := next(given, "") if self._given else self._kind(call.path):
                return kind
            key = self._source(key, calls)
        return "" if self._given else "other"

    def _kind(self, path: str) -> str:
        """Tell what a module writes, by the first name on its path that says it; else empty."""
        *around, own = path.split(".")
        if _PASSING.search(_words(own)):
            return ""
        at = self._block
        for name in (*around, own):
            at = at.get_submodule(name)
            beside, kind = _BESIDE.get(name, ("", ""))
            if hasattr(unwrapped(self._block), beside):
                return kind
            words = _words(type(at).__name__ if "mixer" in _words(name).split("_") else name)
            for kind, pattern in _KINDS.items():
                if pattern.search(words):
                    return kind
        return ""

    def _refusal(self, rows: Tensor) -> str:
        """The sentence that names the write which is most like what is left of the block's output
        without the writes.
        """
        keys = self._unread(self._outermost) if rows.numel() else []
        few = [_wide(_few(each)).flatten() for each in (rows, *self._terms_of(["", *keys]))]
        left = few[0] - sum(few[2:], few[1]) if keys else few[0]
        likeness = {
            self._calls[key].path: abs(float(torch.cosine_similarity(left, write, dim=0)))
            for key, write in zip(keys, few[2:], strict=True)
        }
        return (
            "layers='residual' needs a block whose output is its input plus what modules inside "
            f"write; what {max(likeness, key=likeness.__getitem__, default='no module')!r} writes "
            "is not what is added (there may be a gate, a scale, or a dropout that is no module, "
            "which eval mode, probe= or observe turn off): name what writes by "
            "Residual(writes=…), or leave the block out."
        )


def _is_sum(target: Tensor, terms: Sequence[Tensor]) -> bool:
    """Tell whether rows are a sum but for its rounding: at no place more than that of these terms
    there, in the dtype of the sum, and of the writes, which may be added to each other first.
    """
    if target.shape != terms[0].shape:
        return False
    dtypes = [each.dtype for each in terms]
    of_sum, of_writes = (
        max((torch.finfo(dtype).eps for dtype in added), default=0) / 2
        for added in ((target.dtype, reduce(torch.promote_types, dtypes)), dtypes[1:])
    )
    start, *wide = map(_wide, terms)
    of_sum += torch.finfo(start.dtype).eps  # terms are added here, too
    left = _wide(target) - sum(wide, start)
    written = sum((each.abs() for each in wide), torch.zeros_like(start))
    limit = len(dtypes) * (of_sum * start.abs() + (of_sum + of_writes) * written)
    return bool(((left.abs() <= limit) | ~left.isfinite().all(1, keepdim=True)).all())


def _equal(rows: Tensor, others: Tensor) -> bool:
    return torch.equal(_wide(rows), _wide(others))


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
    entered = _wide(norm.entered)
    scale = (entered.var(1, correction=0, keepdim=True) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * _whole(module.weight).to(entered.dtype)
    streams = [(name, (rows - rows.mean(1, keepdim=True)) * scale) for name, rows in inside]
    if module.bias is not None:
        streams.append(("norm_bias", _whole(module.bias).to(entered.dtype).expand_as(entered)))
    return streams


def _rows(hidden: Tensor) -> Tensor:
    return _whole(hidden).reshape(-1, hidden.shape[-1])


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this rank may have a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _few(rows: Tensor) -> Tensor:
    """A few rows of those of the block, from all of them."""
    return rows[:: max(1, len(rows) // _FEW_ROWS)]


def _wide(rows: Tensor) -> Tensor:
    return rows.to(accumulator_dtype(rows.device))
