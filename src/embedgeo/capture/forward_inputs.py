"""Inputs of a model's forward passes: token ids and masks, in the order of the rows of a hidden
state.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.functional import pad

from embedgeo.capture import structure
from embedgeo.capture.calls import arguments_by_name, first_input
from embedgeo.capture.layers import Layer
from embedgeo.capture.torch_names import has_gradients, is_transformed, version
from embedgeo.functional.rows import (
    NO_TYPE,
    has_rows_without_type,
    is_integer,
    on_cpu,
    require_integers,
    require_marks,
    rows_without_type,
    sequence_numbers,
    sequence_positions,
)

T = TypeVar("T")

# a value for each token, or a function of the batch that returns it
PerToken = Tensor | Callable[[Any], Tensor]
# 1, True or, of one that is added to scores, 0 counts; of the second 1 may also be padding, and it
# is read beside token ids of its shape, for elsewhere it may be of pairs of positions
_MASKS = ("attention_mask", "mask")
_CLOSED = -100  # added to a score, so little or less leaves nothing of it
# of earlier positions
_CACHES = ("past_key_values", "cache_params", "mems")
# True, or −∞, is padding
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask")
# also of torch's attention, and of transformers' FSMT and XLNet
_PADDING_MASKS_OF_KNOWN = (
    *_PADDING_MASKS,
    "key_padding_mask",
    "decoder_padding_mask",
    "input_mask",
)
# elsewhere 1 may be padding or a token
_UNTOLD = re.compile(r"input_mask|(?!memory_)(\w+_)?pad(ding)?_mask")
_PAIRS_OF_TORCH = re.compile(r"(src_|tgt_|attn_)?mask")  # which may be of each head and sequence
# of others' models any mask may, and whatever has 0 and 1 alone, unless its name says what it is
_MASK = re.compile("mask|pad")
_NO_MASKS = (Mapping, list, tuple, str, int, float, type(None))
_UNTOLD_BY_OTHERS = re.compile(
    r"(?!.*(loss|label|special)|(\w+_)?head_mask)(.*(mask|pad)|(?!.*(target|type|segment))).*"
)
# integers that are no token ids
_NUMBERS = re.compile(r"labels|positions?(_ids)?|.*(type|segment)(_id)?s?")
# the ends of packed texts, from 0 on
_TEXT_ENDS = re.compile(r"cu_seq_?lens?(_q)?")
READ_MASKS = {*_MASKS, *_PADDING_MASKS_OF_KNOWN}


class SeveralStreamsError(ValueError):
    """A hidden state has a row for each token in each of several residual streams."""


def require_exclusions(skip_first_positions: int, ignore_token_ids: Sequence[int]) -> None:
    """Raise TypeError if what to leave out is no integer, ValueError if the number is negative."""
    if isinstance(skip_first_positions, bool) or not hasattr(skip_first_positions, "__index__"):
        raise TypeError(f"skip_first_positions must be an integer; got {skip_first_positions!r}.")
    # an iterator would be empty when it is read again
    if isinstance(ignore_token_ids, int | Iterator) or not all(
        isinstance(token, int) for token in ignore_token_ids
    ):
        raise TypeError(
            f"ignore_token_ids must be a list of integers, such as tokenizer.all_special_ids; got "
            f"{ignore_token_ids!r}."
        )
    if skip_first_positions < 0:
        raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")


class RowTokens(NamedTuple):
    """Tokens of the rows of a hidden state: tensors of the rows' shape (...), on the CPU, or
    None.
    """

    token_ids: Tensor | None
    mask: Tensor | None  # True = count this row; None if all rows count
    word_ids: Tensor | None
    prepared: dict[torch.device, Any]

    def prepared_once(self, device: torch.device, make: Callable[[], T]) -> T:
        """The value of ``make`` for all layers of the forward pass on a device."""
        if device not in self.prepared:
            self.prepared[device] = make()
        kept: T = self.prepared[device]
        return kept


class LayerRows(NamedTuple):
    """The rows of a layer's hidden state; the shape is the hidden state's without its last
    dimension.
    """

    layer: Layer
    shape: torch.Size

    def fit(self, tensor: Tensor, *, is_batch_first: bool = False) -> Tensor | None:
        """Token ids or a mask in the order of the rows, turned if need be; None if there is not one
        for each row.
        """
        if (
            self.layer.positions_first
            and not is_batch_first
            and tensor.ndim == 2
            and tensor.T.shape == self.shape
        ):
            return tensor.T
        is_flat = len(self.shape) == 1 and tensor.numel() == self.shape[0]
        return tensor if tensor.shape == self.shape or is_flat else None

    def require_fit(self, tensor: Tensor, name: str, *, is_batch_first: bool = False) -> Tensor:
        """The tensor that `fit` gives; raises ValueError, which names it, instead of None."""
        fitted = self.fit(tensor, is_batch_first=is_batch_first)
        if fitted is None:
            raise ValueError(
                f"layer {self.layer.name!r} must have a row for each token; its rows have shape "
                f"{tuple(self.shape)}, the {name} {tuple(tensor.shape)}. Leave the layer out, or "
                "give token_ids= and mask= in the order of its rows, or, under sequence "
                "parallelism, device_mesh=."
            )
        return fitted


class _Padding(NamedTuple):
    """What a call is told about padding."""

    mask: Tensor | None = None  # (batch, positions), True = count; those before them are in a cache
    source: Tensor | None = None  # the argument that it is read from
    untold: str = ""  # what that does not tell, with its name
    # token ids that are given with it, and are not those that it is of
    foreign: Sequence[Tensor] = ()


class _RunningCall(NamedTuple):
    """A call of a module that has not returned, and what its arguments say about the rows of hidden
    states.
    """

    module: nn.Module
    # its only argument, if that is given without a name, otherwise the arguments by name
    batch: Any
    padding: _Padding
    others: list[tuple[str, Any]]  # arguments that may be masks, where 1 may be padding or a token
    num_cached: int | None  # positions in a cache that it is given; −1: the cache does not tell
    position_ids: Tensor | None  # (batch or 1, positions)
    # input_ids, or the first argument that may be token ids, before any hidden state
    token_ids: Tensor | None
    integers: list[Tensor]  # those of its arguments that may be token ids, (batch, positions)
    embeddings: Tensor | None  # in place of those of token ids: (batch, positions, d)
    has_gradients: bool  # when it began

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_RunningCall":
        given = arguments_by_name(module, args, kwargs)
        told = [*_tensors(given)]
        arguments = dict(told) | given
        again = [name for name, each in told if name in READ_MASKS and arguments[name] is not each]
        of_rows = [
            each
            for name, each in arguments.items()
            if name not in READ_MASKS
            and not _NUMBERS.fullmatch(name)
            and isinstance(each, Tensor)
            and each.ndim == 2 + each.is_floating_point()
            and (each.is_floating_point() or is_integer(each))
        ]
        embeddings = _tensor(arguments, "inputs_embeds", 3)
        input_ids = _tensor(arguments, "input_ids", 2)
        first = next(iter(of_rows), None) if input_ids is None else input_ids
        num_cached = _num_cached(arguments)
        tokens = first if embeddings is None else embeddings
        shape = torch.Size((0, 0)) if tokens is None else tokens.shape[:2]
        padding = _padding_of_call(module, arguments, shape, is_cached=num_cached is not None)
        if again:
            padding = _Padding(untold=f"{again[0]} is given twice")
        integers = [each for each in of_rows if each.ndim == 2]
        foreign = [each for each in integers[1:] if not _equal(each, integers[0])]
        return cls(
            module=module,
            batch=args[0] if len(args) == 1 and not kwargs else given,
            padding=padding._replace(foreign=foreign),
            others=_unread_masks(module, arguments, padding),
            num_cached=num_cached,
            position_ids=_positions_of_call(arguments),
            token_ids=None if first is None or first.ndim == 3 else first,
            integers=integers,
            embeddings=embeddings,
            has_gradients=has_gradients(),
        )


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an argument, also of a batch that is one: a dict, a named tuple or another
    object has them by name, a list by place.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors({each.name: getattr(value, each.name) for each in fields(value)})
    elif isinstance(value, Mapping) or hasattr(value, "_asdict"):
        items = value if isinstance(value, Mapping) else value._asdict()
        for key, each in items.items():
            yield from _tensors(each, str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")
    elif hasattr(value, "__dict__"):
        yield from (each for each in vars(value).items() if isinstance(each[1], Tensor))


def _tensor(arguments: Mapping[str, Any], name: str, ndim: int) -> Tensor | None:
    """The argument of that name, if it is a tensor of so many dimensions."""
    value = arguments.get(name)
    return value if isinstance(value, Tensor) and value.ndim == ndim else None


def _positions_of_call(arguments: Mapping[str, Any]) -> Tensor | None:
    """The position ids that a call is given, (batch or 1, positions), or that the ends of packed
    texts tell.
    """
    positions = arguments.get("position_ids")
    if positions is None:
        # torchtitan's name; elsewhere it may be of coordinates
        own = _tensor(arguments, "positions", 2)
        positions = None if own is None or own.is_floating_point() else own
    if isinstance(positions, Tensor) and 0 < positions.ndim < 4:
        return _text_positions(positions) if positions.ndim == 3 else torch.atleast_2d(positions)
    for name, ends in arguments.items():
        if isinstance(ends, Tensor) and _TEXT_ENDS.fullmatch(name):
            if ends.numel() > ends.shape[-1]:
                raise ValueError(
                    f"{name} must be of one row of texts; got shape {tuple(ends.shape)}. Give "
                    "position_ids, (batch, positions)."
                )
            return _packed_positions(ends.flatten())
    return None


def _padding_of_call(
    module: nn.Module,
    arguments: Mapping[str, Any],
    shape: torch.Size,
    *,
    is_cached: bool,
) -> _Padding:
    """What a call is told about padding: by a mask of padding, else by one of attention. The
    ``shape`` of its tokens is (batch, positions).
    """
    known = _PADDING_MASKS_OF_KNOWN if _is_known(module) else _PADDING_MASKS
    given = next((name for name in known if arguments.get(name) is not None), None)
    query, key = (_tensor(arguments, name, 3) for name in ("query", "key"))
    if given is not None and query is not None and not _equal(query, key):  # of an attention
        if key is None or query.shape != key.shape:
            return _Padding()
        return _Padding(untold=f"{given} may be of other rows: its queries are not its keys")
    if given is not None and (source := _tensor(arguments, given, 2)) is not None:
        return _Padding(source.logical_not(), source)
    padding = _Padding()
    for name in _MASKS:
        mask = arguments.get(name)
        if isinstance(mask, Mapping):  # of transformers, by the kind of attention
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if not isinstance(mask, Tensor) or not 0 < mask.ndim < 5:
            continue
        is_of_pairs = mask.ndim > 2 and shape[1] in (0, mask.shape[-1])
        is_of_tokens = mask.shape == shape and structure.library(module) != "torch"
        if name == "attention_mask" or is_of_tokens or is_of_pairs:
            padding = _read_mask(name, mask, shape, is_cached=is_cached, is_known=_is_known(module))
            if padding.mask is not None or padding.untold:
                return padding
    return padding


def _is_known(module: nn.Module) -> bool:
    """Tell whether the names of a module's arguments say what they are."""
    return structure.library(module) in ("transformers", "torch")


def _unread_masks(
    module: nn.Module, arguments: Mapping[str, Any], padding: _Padding
) -> list[tuple[str, Any]]:
    """The arguments that may be masks, by name or as the values of others, but the one that is
    read.
    """
    names = _UNTOLD_BY_OTHERS
    if _is_known(module):
        if padding.mask is not None:
            return []
        names = _UNTOLD
    pairs = _PAIRS_OF_TORCH if structure.library(module) == "torch" else names
    return [
        (name, each)
        for i, (name, each) in enumerate(arguments.items())
        if each is not padding.source
        and not isinstance(each, _NO_MASKS)
        and (
            (names if each.ndim < 3 else pairs).fullmatch(name)
            if isinstance(each, Tensor)
            else _MASK.search(name)
        )
        and (i > 0 or _MASK.search(name))  # the first one is what the model is of
    ]


def _tells_padding(block: nn.Module) -> bool:
    """Tell whether a module may be told of padding, by the names of its arguments."""
    arguments = signature(block.forward).parameters.values()
    return any(re.search(r"^\*\*|mask|pad|bias", str(each)) for each in arguments)


def _has_marks(tensor: Tensor) -> bool:
    """Tell whether a tensor has 0 and 1, or 0 and what closes a score, and nothing else."""
    zeros = tensor == 0
    return any(
        bool((zeros | marks).all() & zeros.any() & marks.any())
        for marks in (tensor == 1, tensor < _CLOSED)
    )


def _may_tell_padding(name: str, mask: Any, shape: torch.Size, told: Tensor | None) -> bool:
    """Tell whether an argument may be a mask of rows of that shape, of which no other one tells the
    same: with a value for each, or of pairs of positions that differ over sequences.
    """
    if not isinstance(mask, Tensor):
        return told is None
    has_name = _MASK.search(name) is not None
    length = shape[-1:]
    if told is not None:
        if not has_name or mask.numel() != told.numel():
            return False
        is_same = (mask == 0).flatten() == told.flatten().to(mask.device)
        return len(is_same.unique()) > 1  # otherwise it is the same, or its opposite
    if mask.ndim > 2 and mask.shape[-2:] == length + length:
        pairs = mask.flatten(0, -3)
        is_of_rows = bool((pairs != pairs[:1]).any())
    elif mask.numel() == shape.numel():
        is_of_rows = True
    elif mask.shape == length + length != shape:  # of pairs alone
        is_of_rows = False
    else:  # as one of more or fewer positions of each sequence, or of some sequences
        is_alike = mask.shape[:1] == shape[:1] or mask.shape[1:] == shape[1:]
        is_of_rows = has_name and mask.ndim > 1 and is_alike and _has_marks(mask)
    return is_of_rows and (has_name or _has_marks(mask))


def _read_mask(
    name: str, mask: Tensor, shape: torch.Size, *, is_cached: bool, is_known: bool
) -> _Padding:
    """The positions that count by an argument, see `_padding_mask`, or what it does not tell. A
    mask that is added to scores is 0 where it counts, and far below elsewhere.
    """
    is_added = mask.is_floating_point() and bool(((mask == 0) | (mask < _CLOSED)).all())
    if not is_added and not bool(((mask == 0) | (mask == 1)).all()):
        return _Padding(
            untold=f"{name} has other values than 0 and 1, as numbers of packed texts are"
        )
    # one that differs between queries, as a causal one does, is of attention
    is_of_keys = mask.ndim < 3 or bool((mask == mask[..., :1, :]).all())
    if name == "mask" and is_of_keys and not (is_added and bool((mask < 0).any())):
        return _Padding()
    allowed = mask == 0 if is_added else mask != 0
    kept = _padding_mask(allowed, shape, is_cached=is_cached, is_known=is_known)
    if kept is None:
        return _Padding(
            untold=f"{name}, of shape {tuple(mask.shape)}, does not tell padding from tokens"
        )
    # one of pairs that keeps all may be causal alone: others may tell of padding
    return _Padding(None if mask.ndim > 2 and bool(kept.all()) else kept, mask)


def _num_cached(arguments: Mapping[str, Any]) -> int | None:
    """Number of positions in the cache that a call is given; None: there is none, −1: it does not
    tell.
    """
    cache = next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)
    if cache is None:
        return None
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return -1


def _padding_mask(
    allowed: Tensor, shape: torch.Size, *, is_cached: bool, is_known: bool
) -> Tensor | None:
    """The positions that count, (batch, positions), of pairs that may attend, (batch, …, queries,
    keys): keys that no query attends to are padding. The ``shape`` is (batch, positions).

    A mask of two dimensions has them already, unless it is square, with one value on its diagonal,
    and may be of pairs: it is triangular, or ``is_known`` is false, as the names of the module's
    arguments do not say what they are. Of others the positions in a cache are kept before them, if
    there is one. None where the mask does not tell them: where it may be of pairs, or queries that
    count differ in more than being causal.
    """
    if allowed.ndim < 2:
        return None
    if allowed.ndim == 2:
        is_of_pairs = (
            len(allowed) == allowed.shape[1] > 1
            and bool((allowed.diagonal() == allowed[0, 0]).all())
            and (
                any(map(allowed.equal, (allowed.tril(), allowed.triu())))  # also of a window
                or not (is_known or bool(allowed.all()))
            )
        )
        return None if is_of_pairs else allowed
    num_queries, num_keys = allowed.shape[-2:]
    pairs = allowed.reshape(len(allowed), -1, num_queries, num_keys)
    pairs = pairs.expand(max(shape[0], len(pairs)), -1, -1, -1)
    counts = pairs.flatten(1, 2).any(1)
    if num_queries == 1 != shape[1]:
        return counts
    keys = torch.arange(num_keys, device=allowed.device)
    queries = torch.arange(num_queries, device=allowed.device)
    last = torch.where(pairs, keys, -1).amax(-1)  # that a query attends to
    # of the first query among the keys: others are in a cache, or a static one is not full
    first = max(0, int((last - queries).amax()))
    for is_causal, offset in ((True, first), (False, num_keys - num_queries)):
        seen = counts[:, None, None, :].expand_as(pairs)
        if is_causal:
            seen = seen & (keys <= queries[:, None] + offset)
        own = counts[:, offset : offset + num_queries]
        if own.shape[1] == num_queries and bool(
            (seen == pairs).where(own[:, None, :, None], True).all()
        ):
            return counts[:, 0 if is_cached else offset : offset + num_queries]
    return None


def _text_positions(several: Tensor) -> Tensor:
    """Positions within texts, (batch, positions), of ids of several axes, (axes, batch, positions),
    such as time, height and width of images: a text begins where none grows, nor is beyond the
    first ones, as those of the frames of a video are.
    """
    is_first = (several[..., 1:] <= several[..., :1]) & (several.diff(dim=2) <= 0)
    starts = pad(is_first.all(0), (1, 0), value=True)
    places = torch.arange(several.shape[2], device=several.device).expand_as(starts)
    return places - places.where(starts, 0).cummax(1).values


def _packed_positions(ends: Tensor) -> Tensor:
    """The position ids, shape (1, positions), of texts that end there, shape (1 + texts,)."""
    lengths = ends.diff()
    starts = ends[:-1].repeat_interleave(lengths)
    return (torch.arange(len(starts), device=ends.device) - starts)[None]


# by which the cosines with embeddings as they are and turned must differ to tell them apart
_LIKE = 0.1


def _has_inside(ids: Tensor, given: Tensor) -> bool:
    """Tell whether token ids, (batch, positions), are others of the same batch with more, or none,
    around them.
    """
    length = given.shape[1]
    if len(given) != len(ids) or not 0 < length <= ids.shape[1]:
        return False
    return bool((ids.unfold(1, length, 1) == given[:, None]).all(2).all(0).any())


def _require_ids_of_call(ids: Tensor, arguments: Sequence[Tensor]) -> None:
    """Raise ValueError if a table is called with the token ids of a call in another order, or with
    others around them.
    """
    arguments = [each.to(ids) for each in arguments]
    if ids.is_meta or any(map(ids.equal, arguments)):
        return
    for given in arguments:
        is_sorted = given.shape == ids.shape and (
            given.unique(dim=0).equal(ids.unique(dim=0))
            or given.sort(1).values.equal(ids.sort(1).values)
        )
        if is_sorted or _has_inside(ids, given) or _has_inside(ids.T, given):
            raise ValueError(
                "the embedding table must be called with the token ids that the model is given, of "
                f"shape {tuple(given.shape)}; the model turns, sorts or pads them or adds a "
                f"prompt, {tuple(ids.shape)}. Give texts of a length that it does not pad, or "
                "measure a model that keeps them as they are."
            )


@dataclass
class ForwardPass:
    """A forward pass so far."""

    called: set[nn.Module]  # enclosing modules
    padding: _Padding = field(default_factory=_Padding)
    others: Sequence[tuple[str, Any]] = ()  # arguments that may be masks
    position_ids: Tensor | None = None
    num_cached: int | None = None
    token_ids: Tensor | None = None  # that the last of the calls was given
    attention: "_RunningCall | None" = None  # the first inside the blocks
    # by shape, positions_first and versions
    row_tokens: dict[Hashable, RowTokens] = field(default_factory=dict)
    # the place of the last layer that has one, in the encoder and in the decoder
    places: dict[str, int] = field(default_factory=dict)
    # by layer and number among its modules
    num_calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    # of calls to be averaged: number, sum
    sums: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    # by layer that follows others: which of these was called last
    before: dict[str, tuple[nn.Module, Tensor | None]] = field(default_factory=dict)
    # by layer and number among its modules: reads that call, once the outermost call ends, or that
    # attention begins
    held: dict[tuple[Layer, int], Callable[[], None]] = field(default_factory=dict)
    own: Tensor | None = None  # rows that are still those of the table; None: all, or none is
    has_rows: bool = False  # have been asked for
    shape: torch.Size | None = None  # of the rows of the last block so far


class ForwardInputs:
    """Token ids and masks of the current forward pass, read from the arguments of module calls.

    Token ids are what an embedding table is called with. The mask and the position ids are
    arguments of the calls of the modules around the blocks, innermost first, and of torch's own
    attention inside the blocks. Where a model is given embeddings that end with those that were
    just looked up (prompt tuning), the positions in front are no tokens and do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        layers: Sequence[Layer] = (),
        whole: nn.Module | None = None,
    ) -> None:
        require_exclusions(skip_first_positions, ignore_token_ids)
        self._skip_first_positions = skip_first_positions
        self._ignore_token_ids = list(ignore_token_ids)
        measured = structure.measured_model(model)
        parts = [*structure.submodels(model).values()]
        self._is_hugging_face = structure.is_hugging_face(measured)
        self._widths = structure.config_widths(measured)
        self._inner_modules = set(measured.modules())
        self._modules = set(model.modules())
        self.tables = list(
            dict.fromkeys(table for part in parts for table in structure.token_embeddings(part))
        )
        self.num_token_types = max(
            (getattr(table, "num_embeddings", 2**62) for table in self.tables), default=2**62
        )
        self.other_towers = (
            structure.other_towers(parts[0], self.tables) if len(parts) == 1 else set()
        )
        of_parts = [structure.enclosing_modules(part) for part in parts]
        modules = [call.module for layer in layers for call in layer.calls]
        towers = structure.towers_around(modules, measured, [each[-1] for each in of_parts])
        enclosing = [*chain(*of_parts), *towers]
        stacks = structure.find_stacks(model)
        self.first_blocks = [stack.blocks[0] for stack in stacks]
        self.stacked = {
            module for stack in stacks for module in (*stack.blocks, *structure.final_norms(stack))
        }
        self._attention = {each for part in parts for each in structure.torch_attention(part)}
        self.enclosing_modules = list(dict.fromkeys([*enclosing, *self._attention]))
        # those around an encoder and its decoder, or around the measured model
        self.outer_modules = [
            module
            for module in (model if whole is None else whole).modules()
            if structure.unwrapped(module) is module
            and module not in self.enclosing_modules
            and structure.contains_any(module, parts)
        ]
        self.weights = [weight for part in parts for weight in part.parameters()]
        # the smallest position id of all passes until it is set back
        self.first_position: int | None = None
        # positions in a cache before and after the last call of each module
        self._last_cache = dict[nn.Module, tuple[int, int]]()
        self._warned_of_cache = False
        self.takes_no_grad = True  # passes without gradients count, too
        # that what is given for a batch was used for, its ids, and what was given
        self.first_pass: tuple[ForwardPass, list[Tensor], list[Any]] | None = None
        self.told = set[str]()  # what passes have told of their rows, beside token ids
        self.has_unread_ids = False  # a model was given integers, and no table looked them up
        self._warned_of_rows_without_type = False
        self._warned_of_padding = set[int]()
        self._embedding_modules = {
            m for m in self.enclosing_modules if structure.contains_any(m, self.tables)
        }
        self.reset()

    @property
    def is_sharded(self) -> bool:
        """Tell whether FSDP puts other parameters in place of the model's in a forward pass."""
        return any(
            isinstance(each, FSDPModule | FullyShardedDataParallel) for each in self._inner_modules
        )

    def reset(self) -> None:
        """Forget the current forward pass."""
        self.forward = ForwardPass(called=set())
        self.outer: _RunningCall | None = None  # of a module around the model, with a mask
        self._running: list[_RunningCall] = []  # the outermost call first
        # tables, their ids and rows, before any call
        self._lookups: list[tuple[nn.Module, Tensor, Tensor]] = []
        # by table, shape and number of those that differ
        self.token_ids: dict[tuple[nn.Module, torch.Size, int], Tensor] = {}
        self._later_ids: dict[tuple[nn.Module, torch.Size, int], Tensor] = {}  # of the next pass
        self._num_virtual = 0  # positions in front of the tokens
        self._square_rows: Tensor | None = None  # of the table, of as many sequences as positions
        self._may_be_turned = False
        self._has_new_ids = False  # since the last call of a module without a table

    @property
    def has_gradients(self) -> bool:
        """True if the running calls began with gradients on; if none is running, if they are on
        now.
        """
        return (
            all(call.has_gradients for call in self._running) if self._running else has_gradients()
        )

    @property
    def recorded(self) -> list[Tensor]:
        """The token ids and the mask that the model is given."""
        return [
            *self.token_ids.values(),
            *([] if self.forward.padding.mask is None else [self.forward.padding.mask]),
        ]

    def take_outer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the mask that a module around the model is called with, beside token ids. Those of
        transformers give the parts of a model what these need.
        """
        call = _RunningCall.of(module, args, kwargs)
        if module in self._modules:
            self.has_unread_ids |= bool(call.integers) and not self.tables
        if not (_is_known(module) or call.padding.mask is None or call.token_ids is None):
            self.outer = call

    def begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        """Record a call of an enclosing module; a forward pass begins with the outermost, or where
        one is repeated.
        """
        call = _RunningCall.of(module, args, kwargs)
        if module in self._attention:
            self._begin_attention(call)
            return
        # called again on the same tokens, a module is called in a loop
        has_table = module in self._embedding_modules
        is_again = module in self.forward.called and (has_table or self._has_new_ids)
        is_new = not self._running or is_again
        if is_new:
            self.read_held()
            self.forward = ForwardPass(called={each.module for each in self._running})
            # otherwise the token ids were looked up before this call
            self.token_ids |= self._later_ids
            self._later_ids = {}
            if has_table:
                self.token_ids = {}
                self._num_virtual = 0
        self._has_new_ids &= has_table
        self._running.append(call)
        self.forward.called.add(module)
        for each in self._running if is_new else [call]:
            self._take(each)
        # of several, other ones are among the rows in front
        if len(self._lookups) == 1 and call.embeddings is not None:
            table, ids, rows = self._lookups[0]
            given = call.embeddings[:, -rows.shape[1] :]
            if given.shape == rows.shape:
                own = (given == rows.to(given)).all(2)
                if bool(own.all()):
                    self._num_virtual = call.embeddings.shape[1] - rows.shape[1]
                    self.token_ids[table, ids.shape, 0] = ids
                elif bool((own & given.any(2)).any()):  # zeros are equal whatever they are times
                    self.forward.own = own.to(ids.device)

    def _take(self, call: _RunningCall) -> None:
        """Let what a call is told hold in place of what those around it are."""
        forward = self.forward
        forward.row_tokens = {}
        if call.token_ids is not None:
            before = forward.token_ids
            if before is not None and not _equal(before, call.token_ids):
                if forward.padding.mask is not None:
                    forward.padding = _Padding(
                        untold="attention_mask is of other token ids than "
                        f"{type(call.module).__name__}'s"
                    )
                forward.position_ids = None
            forward.token_ids = call.token_ids
        padding = call.padding
        is_of_rows = padding.source is not None and padding.source.ndim == 2
        if is_of_rows and _are_opposites(forward.padding.mask, padding.mask):
            padding = _Padding(untold="of padding is 1 where another one is 0")
        if is_of_rows or (
            forward.padding.mask is None and (padding.mask is not None or padding.untold)
        ):
            forward.padding = padding
        forward.others = [*(() if is_of_rows else forward.others), *call.others]
        if call.position_ids is not None:
            forward.position_ids = call.position_ids
        if call.num_cached is not None:
            forward.num_cached = call.num_cached
        self._warn_of_cache(call)

    def _begin_attention(self, call: _RunningCall) -> None:
        """Take the padding that torch's own attention inside the blocks is told of."""
        forward = self.forward
        padding = call.padding
        untold = ""
        if not self._running:
            if padding.mask is not None:
                untold = "of padding was given outside of a call of the model"
        elif forward.attention is None:
            forward.attention = call
            self._take(call)
            for waiting in [each for each in forward.held if not each[0].after]:
                forward.held.pop(waiting)()
        elif padding.mask is None:
            untold = "" if forward.padding.mask is not None else padding.untold
        elif not _equal(forward.attention.padding.source, padding.source):
            untold = "of padding differs between calls inside the blocks"
        if untold:
            forward.padding = _Padding(untold=untold)
            forward.row_tokens = {}
        self._running.append(call)

    @property
    def awaits_mask(self) -> bool:
        """True if rows must wait for the padding that the blocks are told of."""
        return bool(self._attention) and self.forward.attention is None

    def _warn_of_cache(self, call: _RunningCall) -> None:
        """Warn, once, where a text goes on from the last forward pass."""
        cached = call.num_cached or 0
        last, end = self._last_cache.get(call.module, (0, 0))
        tokens = call.token_ids if call.embeddings is None else call.embeddings
        if tokens is None:
            return
        self._last_cache[call.module] = cached, cached + tokens.shape[1]
        counts = self.takes_no_grad or call.has_gradients
        if last < cached <= end and counts and not self._warned_of_cache:
            self._warned_of_cache = True
            warnings.warn(
                "Forward passes that go on from a cache count as texts of their own: values that "
                "compare sequences (V_W_unbiased, V_W_local, V_W_text, same_sequence_neighbors, "
                "first_positions_share, standard errors) are of the passes. Run whole texts.",
                stacklevel=1,
            )

    def end_call(self, *call: Any) -> None:
        """Record that the enclosing module called last has returned; it raised without ``call``."""
        if call and self._running and not self.token_ids:
            self.has_unread_ids |= bool(self._running[0].integers)
        self._lookups = []
        del self._running[-1:]  # there is none after a `reset` inside the call

    @property
    def depth(self) -> int:
        """Number of enclosing modules that are being called, one inside the other."""
        return len(self._running)

    def read_held(self) -> None:
        """Read the hidden states that were held until the forward pass ended."""
        held = self.forward.held
        self.forward.held = {}
        for read in held.values():
            read()

    def aligned(self, layer: Layer, hidden: Tensor) -> Tensor:
        """A hidden state with a row for each token of the call, shape (batch, positions, d): it is
        turned if its shape says so, and loses the rows of virtual tokens. One of another shape is
        left as it is.

        Raises:
            ValueError: the hidden state is of several residual streams, or nothing tells its
                sequences from its positions.
        """
        tables = [ids for ids in self.token_ids.values() if ids.ndim == 2]
        if not tables and self._is_channels_first(hidden.shape):
            raise ValueError(
                f"layer {layer.name!r} must have its width last, one of "
                f"{sorted(self._widths)}; its hidden state has shape {tuple(hidden.shape)}, as "
                "feature maps with channels first. Measure modules that have channels last, by "
                "layers= with a pattern of their names."
            )
        for ids in tables:
            num_positions = self._num_virtual + ids.shape[1]
            if hidden.ndim == 3 and hidden.shape[:2] == (len(ids), num_positions):
                is_stacked = layer.calls[0].module in self.stacked
                if self._may_be_turned if is_stacked else self._looks_turned(hidden):
                    raise ValueError(
                        f"layer {layer.name!r} must have the order of its token ids, (batch, "
                        f"positions); with {hidden.shape[0]} of both its rows may be turned. Take "
                        "another batch size."
                    )
                return hidden[:, self._num_virtual :]
        for ids in tables:
            if hidden.ndim == 3 and hidden.shape[:2] == ids.T.shape:
                return hidden.transpose(0, 1)
            if hidden.ndim == 4 and ids.shape in (hidden.shape[:2], hidden.shape[1:3]):
                raise SeveralStreamsError(
                    f"has several residual streams, of shape {tuple(hidden.shape)} for "
                    f"{tuple(ids.shape)} tokens"
                )
        return hidden

    def record_token_ids(
        self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record the token ids that an embedding table is called with."""
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        ids = ids.full_tensor() if isinstance(ids, DTensor) else ids
        if isinstance(ids, Tensor) and not (ids.is_floating_point() or is_transformed(ids)):
            if ids.ndim == 2:
                integers = [each for call in self._running for each in call.integers]
                _require_ids_of_call(ids, integers)
            kept = ids.clone()  # the model may go on to make targets of them, in place
            self._take_ids(table, ids, kept)
            self._has_new_ids = True
            if not self._running:  # only blocks are called: a pass begins
                self.forward.num_calls.clear()
                self.forward.places.clear()
            if ids.ndim == 2:
                self._may_be_turned = False
                self._square_rows = None
                if ids.shape[0] == ids.shape[1] > 1 and isinstance(output, Tensor):
                    self._square_rows = output.detach()
            self.forward.row_tokens = {}
            if isinstance(output, Tensor) and ids.ndim == 2:
                self._lookups = [*self._lookups[-1:], (table, kept, output.detach())]

    def _take_ids(self, table: nn.Module, ids: Tensor, kept: Tensor) -> None:
        """Take ids that a table is called with, which are kept, beside others of their shape: those
        of an earlier call in the same pass, and those that the model is given and has replaced
        some of.
        """
        before = self.token_ids.get((table, ids.shape, 0))
        if before is not None and not _equal(before, ids):
            is_later = self.forward.has_rows
            if not self._running and is_later:  # the rows of those before have been read
                self.token_ids = {}
                self.forward.has_rows = False
            else:
                of_next, number = (self._later_ids, 0) if is_later else (self.token_ids, 1)
                of_next[table, ids.shape, number] = kept
                return
        self.token_ids[table, ids.shape, 0] = kept
        given = [call.token_ids.to(ids) for call in self._running if call.token_ids is not None]
        if given and given[-1].shape == ids.shape and not _equal(given[-1], ids):
            self.token_ids[table, ids.shape, 1] = given[-1]

    def sequence_ids(self, shape: torch.Size) -> Tensor:
        """The sequence of each row of a hidden state, whose shape is given."""
        given = (each for call in self._running for each in call.integers)
        ids = [*given, *self.token_ids.values()]
        return sequence_numbers(shape, self.forward.position_ids, ids)

    def row_tokens(
        self,
        layer: Layer,
        hidden: Tensor,
        token_ids: PerToken | None,
        mask: PerToken | None,
        word_ids: PerToken | None,
    ) -> RowTokens:
        """Token ids, mask and word ids of the rows of a hidden state, shape (..., d), batch first;
        given ones go first.

        With word ids, the token ids given are the types of the words; those to ignore are the
        model's. A device is waited for once a forward pass, and again after a change of ids or mask
        in place.
        """
        self.forward.has_rows = True
        told = {"mask": self.forward.padding.mask, "position ids": self.forward.position_ids}
        self.told |= {name for name, each in told.items() if each is not None}
        inputs = [*self.recorded, *filter(torch.is_tensor, (token_ids, mask, word_ids))]
        key = hidden.shape[:-1], layer.positions_first, *map(version, inputs)
        if key not in self.forward.row_tokens:
            rows = LayerRows(layer, hidden.shape[:-1])
            if self.recorded and layer.calls[0].module in self.other_towers:
                raise ValueError(
                    f"layer {layer.name!r} must be of the tokens that the model is given; it is "
                    "beside the blocks of the text, as those of images are. Measure that part "
                    "alone: layers=lambda model: model.vision_model."
                )
            values = {"token_ids": token_ids, "mask": mask, "word_ids": word_ids}
            given = {
                name: self._of_batch(value, name)
                for name, value in values.items()
                if value is not None
            }
            if given:
                asked = (values[name] for name in given)  # functions are of the outermost call
                self._require_one_pass(
                    [each if isinstance(each, Tensor) else self._running[0] for each in asked]
                )
            ids = self._fitting_token_ids(rows, given.get("token_ids"))
            tokens = ids
            words = given.get("word_ids")
            if words is not None:
                words = rows.require_fit(require_integers(words, "word_ids"), "word ids")
                tokens = self._fitting_token_ids(rows, None) if self._ignore_token_ids else ids
            kept = self._fitting_mask(rows, tokens, given.get("mask"), hidden.device)
            own = self.forward.own
            if (
                ids is not None
                and own is not None
                and own.shape == ids.shape
                and "token_ids" not in given
            ):
                ids = ids.where(own, NO_TYPE)  # images take the others
            positions = self._of_tokens(rows, self.forward.position_ids)
            ids, kept, words, positions = on_cpu(ids, kept, words, positions)
            if ids is not None and kept is None and "token_ids" not in given:
                self._warn_of_padding(ids)
            self.forward.position_ids = positions
            if positions is not None and positions.numel():
                before = self.first_position
                first = int(positions.min())
                self.first_position = first if before is None else min(first, before)
            if kept is not None and bool(kept.all()):
                kept = None
            if ids is not None and "token_ids" in given:
                self._require_types(ids, kept, words)
            ids, kept, words = (
                None if t is None else t.reshape(rows.shape) for t in (ids, kept, words)
            )
            self.forward.row_tokens[key] = RowTokens(ids, kept, words, {})
        return self.forward.row_tokens[key]

    def _warn_of_padding(self, ids: Tensor) -> None:
        """Say once that sequences begin or end with what a table has for padding, which counts."""
        tables: list[Any] = [table for table, *_ in self.token_ids if hasattr(table, "padding_idx")]
        for number in {table.padding_idx for table in tables} - {None, *self._warned_of_padding}:
            is_padding = ids == number
            if bool(torch.stack((is_padding[..., :2], is_padding[..., -2:])).all(-1).any()):
                self._warned_of_padding.add(number)
                warnings.warn(
                    f"id {number} must be told from tokens by a mask where it is padding, as the "
                    f"table's padding_idx; sequences begin or end with it, and its rows count. "
                    f"Give mask= or ignore_token_ids=[{number}].",
                    stacklevel=1,
                )

    def _require_types(self, ids: Tensor, kept: Tensor | None, words: Tensor | None) -> None:
        """Check token ids that were given, and say once that some are of no type."""
        counts = kept
        if words is not None:  # tokens of no word have no type
            counts = words >= 0 if kept is None else kept & (words >= 0)
        if has_rows_without_type(ids, counts) and not self._warned_of_rows_without_type:
            self._warned_of_rows_without_type = True
            warnings.warn(rows_without_type("token_ids"), stacklevel=1)

    def _require_one_pass(self, given: list[Any]) -> None:
        """Raise ValueError if what is given for a batch was for a pass on other token ids."""
        told = [ids for call in self._running[:1] for ids in call.integers]
        ids = [*self.token_ids.values()] or told
        if self.first_pass is None or [*map(id, given)] != [*map(id, self.first_pass[2])]:
            self.first_pass = self.forward, ids, given
        first, before, _ = self.first_pass
        if first is not self.forward and not (ids and all(map(_equal, before, ids))):
            raise ValueError(
                "mask= and token_ids= are of one forward pass of a batch; another one had other "
                "token ids. Give each a step of StepMonitor, or measure a probe; give observe "
                "functions of the batch."
            )

    def _of_batch(self, values: PerToken, name: str) -> Tensor:
        if isinstance(values, Tensor):
            return values
        if not self._running:
            raise ValueError(
                f"{name}= can be a function of the batch only where the model is called; its "
                "modules were called one by one. Give a tensor."
            )
        tensor = values(self._running[0].batch)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}= must return a tensor; got {type(tensor).__name__}.")
        return tensor

    def _fitting_token_ids(self, rows: LayerRows, token_ids: Tensor | None) -> Tensor | None:
        if token_ids is not None:
            return rows.require_fit(require_integers(token_ids, "token_ids"), "token ids")
        recorded = [*self.token_ids.values()]
        if not rows.layer.after:  # which may follow other look-ups
            recorded += self._later_ids.values()
        fitting = [fitted for ids in recorded if (fitted := rows.fit(ids)) is not None]
        if not fitting:
            return rows.require_fit(recorded[0], "token ids") if recorded else None
        if any(not torch.equal(ids, fitting[0]) for ids in fitting[1:]):
            raise ValueError(
                f"layer {rows.layer.name!r} must have one token id a row; several tensors "
                "of other ids fit, which embedding tables are called with, or which the model is "
                "given and replaces some of. Give token_ids=."
            )
        if rows.layer.positions_first and rows.shape == rows.shape[::-1] and rows.shape[0] > 1:
            raise ValueError(
                f"layer {rows.layer.name!r} must tell sequences from positions to find its token "
                f"ids; there are {rows.shape[0]} of both. Give token_ids= in the order of its "
                "rows, (positions, batch), or use batch_first=True."
            )
        return fitting[0]

    def _fitting_mask(
        self, rows: LayerRows, token_ids: Tensor | None, mask: Tensor | None, device: torch.device
    ) -> Tensor | None:
        shape = rows.shape if token_ids is None else token_ids.shape
        num_cached = self.forward.num_cached
        if mask is not None:
            mask = require_marks(rows.require_fit(mask, "mask")) != 0
        elif untold := self._untold(shape, token_ids):
            raise ValueError(
                f"layer {rows.layer.name!r} must tell padding from tokens; the model's argument "
                f"{untold}. Give mask=, or attention_mask (1 = token) or "
                "src_key_padding_mask (1 = padding), of shape (batch, positions)."
            )
        elif self.forward.padding.mask is not None:
            mask = self._of_tokens(rows, self.forward.padding.mask)
            assert mask is not None
            is_wider = shape[:-1] == mask.shape[:1] and mask.shape[1] > shape[-1]
            if num_cached is None or not is_wider:
                mask = rows.require_fit(mask, "mask", is_batch_first=True)
            elif num_cached >= 0:  # a mask may be of all places of the cache
                mask = mask[:, : num_cached + shape[-1]]
        elif (outer := self._outer_mask) is not None:
            mask = self._of_tokens(rows, outer)
            assert mask is not None
            mask = rows.require_fit(mask, "mask", is_batch_first=True)
        elif (
            not self.forward.called
            and (self._is_hugging_face or _tells_padding(rows.layer.calls[0].module))
            and rows.layer.calls[0].module in self._inner_modules
        ):
            raise ValueError(
                f"layer {rows.layer.name!r} was run outside of a call of the model, which would "
                "tell the attention mask. Call the model or its forward(), or give mask= (all "
                "ones if there is no padding)."
            )
        if self._skip_first_positions:
            mask = self._without_first_positions(rows, token_ids, mask, device)
        if self._ignore_token_ids:
            if token_ids is None:
                raise ValueError(
                    "ignore_token_ids needs token ids; the model was given none. Give token_ids=."
                )
            ignored = torch.tensor(self._ignore_token_ids, device=token_ids.device)
            kept = ~torch.isin(token_ids, ignored)
            # positions before those of this call are in a cache
            own = mask if mask is None else mask[..., -kept.shape[-1] :].to(kept.device)
            mask = kept if own is None else own & kept
        return None if mask is None else mask[..., -shape[-1] :]

    @property
    def _outer_mask(self) -> Tensor | None:
        """The mask of a call around the model on the same token ids."""
        outer = self.outer
        if outer and _equal(outer.token_ids, self.forward.token_ids):
            return outer.padding.mask
        return None

    def _untold(self, shape: torch.Size, token_ids: Tensor | None) -> str:
        """What the model is given that may tell padding of rows, and does not, with its name."""
        padding = self.forward.padding
        if padding.untold:
            return padding.untold
        is_foreign = any(_are_ids(each, token_ids) for each in padding.foreign)
        if padding.mask is None:  # a call around may be given the ids of what this one embeds
            mask = self.outer.padding.mask if self.outer and not self.token_ids else None
            is_foreign = mask is not None and mask.shape == shape and not mask.all()
        if is_foreign:
            return "attention_mask is of other token ids than the rows"
        for name, each in self.forward.others:
            if _may_tell_padding(name, each, shape, padding.mask) and not _are_ids(each, token_ids):
                return f"{name} does not tell whether 1 is padding"
        return ""

    def _is_channels_first(self, shape: torch.Size) -> bool:
        """Tell whether a feature map does not have its width last, as the configuration tells."""
        has_width_second = len(shape) > 1 and shape[1] in self._widths
        has_width = not self._widths or shape[-1] in self._widths
        if len(shape) == 4:
            return not has_width or has_width_second
        return len(shape) == 3 and not has_width and has_width_second

    def take_order(self, _: nn.Module, *given: Any) -> None:
        """Find the order of the rows that enter a first block."""
        self._may_be_turned = self._looks_turned(first_input(*given))

    def _looks_turned(self, hidden: Tensor | None) -> bool:
        """Tell whether a hidden state, of as many sequences as positions, is like the embeddings of
        its tokens once it is turned, or, in models that are not transformers', of unknown order,
        not unlike.
        """
        rows = self._square_rows
        likeness = 0.0
        if rows is None or hidden is None:
            return False
        if rows.shape == hidden.shape:
            wide = hidden.data.float()
            own = rows.float()
            turned = (wide * (own.transpose(0, 1) - own)).sum()
            likeness = float(turned / (wide.norm() * own.norm()))
        return likeness > (_LIKE if self._is_hugging_face else -_LIKE)

    def _of_tokens(self, rows: LayerRows, values: Tensor | None) -> Tensor | None:
        """A mask or position ids without those of virtual tokens in front of the rows."""
        num_virtual = self._num_virtual
        if values is None or len(rows.shape) != 2 or values.shape[1] != num_virtual + rows.shape[1]:
            return values
        return values[:, num_virtual:]

    def _without_first_positions(
        self, rows: LayerRows, token_ids: Tensor | None, mask: Tensor | None, device: torch.device
    ) -> Tensor:
        shape = rows.shape
        is_in_order = self._is_hugging_face or rows.layer.positions_first is not None
        if token_ids is not None:
            shape = token_ids.shape
            device = token_ids.device
            is_in_order = True
        if mask is None and is_in_order:
            mask = torch.ones(shape, dtype=torch.bool, device=device)
        if mask is None or mask.ndim != 2:
            raise ValueError(
                "skip_first_positions needs token ids or a mask of shape (batch, positions); "
                "found none. Give token_ids= or mask=."
            )
        num_cached = self.forward.num_cached or 0
        length = shape[1] if len(shape) == 2 else mask.shape[1]
        if num_cached < 0 and mask.shape[1] <= length:
            raise ValueError(
                "skip_first_positions must know how many positions are in the cache; the one that "
                "the model is given does not tell. Give a cache with get_seq_length(), or run "
                "whole texts."
            )
        mask = pad(mask, (max(0, num_cached + length - mask.shape[1]), 0), value=True)
        position_ids = self.forward.position_ids
        if position_ids is not None and position_ids.shape not in (mask.shape, (1, mask.shape[1])):
            position_ids = None
        return mask & (sequence_positions(mask, position_ids) > self._skip_first_positions)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _are_ids(given: Any, ids: Tensor | None) -> bool:
    return ids is not None and isinstance(given, Tensor) and torch.equal(given.to(ids), ids)


def _are_opposites(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and _equal(one.logical_not(), other.bool())


def whole_sequences(hidden: Tensor, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> Tensor:
    """The whole of a hidden state of which this rank has a part; any other one as it is. Every rank
    must call this.

    It is a part where it has one R-th of the positions of one of the ``inputs``, of the R ranks of
    a mesh, and is of no other input's shape. A ValueError if all ranks have equal rows but not
    equal inputs: it is shorter otherwise.
    """
    size = mesh.size()
    whole = [
        t
        for t in inputs
        if hidden.ndim == 3 and t.shape == (hidden.shape[0], size * hidden.shape[1])
    ]
    if not whole or isinstance(hidden, DTensor) or any(t.shape == hidden.shape[:2] for t in inputs):
        return hidden
    gathered = DTensor.from_local(
        hidden.contiguous(), mesh, [Shard(1)], run_check=False
    ).full_tensor()
    if _repeats(gathered, size) and not all(_repeats(t, size) for t in whole):
        raise ValueError(
            f"a layer must have a row for each token, or a part of them on each of {size} ranks; "
            f"its rows have shape "
            f"{tuple(hidden.shape[:2])} and are the same on all ranks. Leave the layer out."
        )
    return gathered


def _repeats(tensor: Tensor, num_parts: int) -> bool:
    first, *others = tensor.chunk(num_parts, 1)
    return all(torch.equal(first, other) for other in others)
