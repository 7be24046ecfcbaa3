"""Names of layers: blocks, the side of the model that they lie on, their depths and labels."""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from embedgeo.formatting import printable

_LAYER = re.compile(
    r"(encoder\.|decoder\.|)(embed|block\.(\d+)|hidden\.(\d+)|final_norm|mean\(last\d+(?:_hidden|)\))"
)
_LONGEST = 11  # letters in the label of a layer


def side(layer: str) -> str:
    """Side of a layer in its name, ``"encoder."`` or ``"decoder."``; empty if it has none."""
    match = _LAYER.fullmatch(layer)
    return match[1] if match else ""


def is_along(layer: str) -> bool:
    """Tell a layer that lies along the model from a mean over several."""
    return "mean(" not in layer


def is_input(layer: str) -> bool:
    """Tell the layer that enters the first block from others."""
    match = _LAYER.fullmatch(layer)
    return match is not None and (
        match[2] == "embed" or (match[4] is not None and not int(match[4]))
    )


def blocks_by_side(layers: Iterable[str]) -> dict[str, list[str]]:
    """The blocks among the layers, by the prefix of their side; empty where no layer is a block.

    On a side without blocks, ``hidden.01``, ``hidden.02`` … stand for them, the last of which is
    after the final norm.
    """
    blocks: dict[str, list[str]] = {}
    hidden: dict[str, list[str]] = {}
    for layer in layers:
        match = _LAYER.fullmatch(layer)
        if match and match[3]:
            blocks.setdefault(side(layer), []).append(layer)
        elif match and match[4] and int(match[4]):
            hidden.setdefault(match[1], []).append(layer)
    return hidden | blocks


def relative_depths(layers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Relative depths of layers, by side: 0 is the input of the first block, 1 the output of the
    last one.

    Layers off the row of blocks are left out; where no layer is a block, all count as equally far
    apart.
    """
    depths: dict[str, dict[str, float]] = {}
    for prefix, blocks in blocks_by_side(layers).items():
        numbers = {
            block: int(re.findall(r"\d+", block)[-1]) + ("hidden." not in block) for block in blocks
        }
        first = {layer: 0.0 for layer in layers if is_input(layer) and side(layer) == prefix}
        depths[prefix] = first | {
            block: number / max(numbers.values()) for block, number in numbers.items()
        }
    return depths or {"": {layer: i / max(1, len(layers) - 1) for i, layer in enumerate(layers)}}


def layer_labels(layers: Sequence[str]) -> list[str]:
    """Distinct labels of layers on an axis.

    Blocks have their numbers, hidden states an h before theirs, other layers of a model short
    names. Names of modules lose the parts that all of them start with, and then letters; names that
    are alike even so are numbered.
    """
    plain = {layer: printable(layer) for layer in layers}
    modules = [plain[layer].split(".") for layer in plain if layer and not _LAYER.fullmatch(layer)]
    most = min((len(parts) for parts in modules), default=1) - 1
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    head = min(most, len([*alike]))
    labels = [_label(layer, plain[layer], head) for layer in layers]
    if len(set(labels)) == len(plain):
        return labels
    return [f"#{i}" if layer else "" for i, layer in enumerate(layers)]


def _label(layer: str, plain: str, left: int) -> str:
    match = _LAYER.fullmatch(layer)
    if match is None:
        label = ".".join(plain.split(".")[left:])
        return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
    name = match[2].removeprefix("final_")
    if match[3] or match[4]:
        name = f"h{int(match[4])}" if match[4] else str(int(match[3]))
    return f"{match[1][:3]} {name}" if match[1] else name


def layer_ticks(layers: Sequence[str], most: int) -> list[int]:
    """At most ``most`` positions to name on an axis of layers: the first, the last, and blocks of
    round numbers.
    """
    last = len(layers) - 1
    gap = next(
        gap for k in range(9) for gap in (10**k, 2 * 10**k, 5 * 10**k) if last <= gap * (most - 1)
    )
    start = next((i for i, layer in enumerate(layers) if layer.endswith("block.00")), 0) % gap
    return sorted({0, *(i for i in range(start, last, gap) if gap / 2 < i < last - gap / 2), last})
