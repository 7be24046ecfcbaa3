"""Names of layers: which layers are blocks, on which side of the model they lie, and how deep."""

import re
from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"(encoder\.|decoder\.|)(embed|block\.(\d+)|final_norm|mean\(last\d+\))")


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


def layer_label(layer: str) -> str:
    """The label of a layer on an axis: the number of a block, or a short name.

    >>> [layer_label(layer) for layer in ("block.07", "final_norm", "decoder.block.11", "gpt_neox.attention.dense")]
    ['7', 'norm', 'dec 11', '…tion.dense']
    """
    match = _LAYER.fullmatch(layer)
    if not match:
        return layer if len(layer) <= 11 else f"…{layer[-10:]}"
    name = str(int(match[3])) if match[3] else match[2].removeprefix("final_")
    return f"{match[1][:3]} {name}".strip()


def layer_ticks(layers: Sequence[str], most: int) -> list[int]:
    """At most ``most`` positions to name on an axis of layers: the first, the last, and blocks of round numbers.

    >>> layers = ["embed", *(f"block.{i:02d}" for i in range(32)), "final_norm"]
    >>> [layer_label(layers[i]) for i in layer_ticks(layers, 9)]
    ['embed', '5', '10', '15', '20', '25', 'norm']
    """
    last = len(layers) - 1
    gap = next(gap for k in range(9) for gap in (10**k, 2 * 10**k, 5 * 10**k) if last <= gap * (most - 1))
    start = next((i for i, layer in enumerate(layers) if layer.endswith("block.00")), 0) % gap
    return sorted({0, *(i for i in range(start, last, gap) if gap / 2 < i < last - gap / 2), last})
