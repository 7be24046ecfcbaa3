"""Names of layers: which layers are blocks, on which side of the model they lie, and how deep."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product, takewhile

from embedgeo.results.wording import printable

_LAYER = re.compile(r"(encoder\.|decoder\.|)(embed|block\.(\d+)|final_norm|mean\(last\d+\))")
_LONGEST = 11
"""Letters in the label of a layer."""


def side(layer: str) -> str:
    """``"encoder."`` or ``"decoder."`` where the name of a layer starts with it, else the empty string.

    >>> side("decoder.block.03"), side("block.03"), side("encoder.layer.03.attention")
    ('decoder.', '', '')
    """
    match = _LAYER.fullmatch(layer)
    return match[1] if match else ""


def blocks_by_side(layers: Iterable[str]) -> dict[str, list[str]]:
    """The blocks among the layers, by the prefix of their side; empty where no layer is a block.

    >>> blocks_by_side(["encoder.embed", "encoder.block.00", "decoder.block.00", "decoder.final_norm"])
    {'encoder.': ['encoder.block.00'], 'decoder.': ['decoder.block.00']}
    """
    blocks: dict[str, list[str]] = {}
    for layer in layers:
        match = _LAYER.fullmatch(layer)
        if match and match[3]:
            blocks.setdefault(match[1], []).append(layer)
    return blocks


def relative_depths(layers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Relative depths of layers, by side: 0 is the input of the first block, 1 the output of the last one.

    Layers off the row of blocks, such as ``final_norm``, are left out. Where no layer is a block, all layers count as
    equally far apart.

    >>> relative_depths(["embed", "block.00", "block.01", "final_norm"])
    {'': {'embed': 0.0, 'block.00': 0.5, 'block.01': 1.0}}
    >>> relative_depths(["a", "b", "c"])
    {'': {'a': 0.0, 'b': 0.5, 'c': 1.0}}
    """
    depths: dict[str, dict[str, float]] = {}
    for prefix, blocks in blocks_by_side(layers).items():
        numbers = {block: 1 + int(block.rpartition(".")[2]) for block in blocks}
        first = {embed: 0.0} if (embed := f"{prefix}embed") in layers else {}
        depths[prefix] = first | {block: number / max(numbers.values()) for block, number in numbers.items()}
    return depths or {"": {layer: i / max(1, len(layers) - 1) for i, layer in enumerate(layers)}}


def layer_labels(layers: Sequence[str]) -> tuple[list[str], str]:
    """Distinct labels of layers on an axis, and the pattern in which those of modules stand for the star.

    Blocks have their numbers, the other layers of a model short names. Names of modules lose the parts that all of them
    start and end with, and then letters; names that are alike even so are numbered.

    >>> layer_labels(["embed", "block.00", "block.07", "final_norm", "decoder.block.11"])
    (['embed', '0', '7', 'norm', 'dec 11'], '')
    >>> layer_labels(["gpt_neox.layers.0.attention.dense", "gpt_neox.layers.1.attention.dense"])
    (['0', '1'], 'gpt_neox.layers.*.attention.dense')
    >>> layer_labels(["layers.0.attention.dense", "layers.1.attention.dense", "block.01"])
    (['0.attentio…', '1.attentio…', '1'], '')
    """
    plain = {layer: printable(layer) for layer in layers}
    modules = [plain[layer].split(".") for layer in plain if layer and not _LAYER.fullmatch(layer)]
    most = min((len(parts) for parts in modules), default=1) - 1
    head = len(_common(modules)[:most])
    tail = len(_common([parts[::-1] for parts in modules])[: most - head])
    for right, shorten in product((tail, 0), (_end, _start)):
        labels = [_label(layer, plain[layer], head, right, shorten) for layer in layers]
        if len(set(labels)) == len(plain):
            return labels, ".".join([*modules[0][:head], "*", *modules[0][-right:]]) if right else ""
    return [f"#{i}" if layer else "" for i, layer in enumerate(layers)], ""


def _common(names: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all names start with."""
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))]


def _label(layer: str, plain: str, left: int, right: int, shorten: Callable[[str], str]) -> str:
    if not (match := _LAYER.fullmatch(layer)):
        parts = plain.split(".")
        return shorten(".".join(parts[left : len(parts) - right]))
    name = str(int(match[3])) if match[3] else match[2].removeprefix("final_")
    return f"{match[1][:3]} {name}".strip()


def _end(label: str) -> str:
    return label if len(label) <= _LONGEST else f"…{label[1 - _LONGEST :]}"


def _start(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def layer_ticks(layers: Sequence[str], most: int) -> list[int]:
    """At most ``most`` positions to name on an axis of layers: the first, the last, and blocks of round numbers.

    >>> layers = ["embed", *(f"block.{i:02d}" for i in range(32)), "final_norm"]
    >>> [layer_labels(layers)[0][i] for i in layer_ticks(layers, 9)]
    ['embed', '5', '10', '15', '20', '25', 'norm']
    """
    last = len(layers) - 1
    gap = next(gap for k in range(9) for gap in (10**k, 2 * 10**k, 5 * 10**k) if last <= gap * (most - 1))
    start = next((i for i, layer in enumerate(layers) if layer.endswith("block.00")), 0) % gap
    return sorted({0, *(i for i in range(start, last, gap) if gap / 2 < i < last - gap / 2), last})
