"""What is measured, as records and as TensorBoard sees it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

_FIRST_CHARTS = ("V_W_over_V_unbiased", "anisotropy", "M_over_Q", "intrinsic_dimension", "mean_cosine")
_BLOCK = re.compile(r"(encoder\.|decoder\.|)block\.\d+")


class Record(TypedDict):
    """One number: the value of a metric at a layer at a step."""

    step: int
    layer: str
    layer_index: int
    metric: str
    value: float


def tagged_scalars(values: Mapping[str, Mapping[str, float]], prefix: str = "geometry") -> dict[str, float]:
    """Scalars by tag, ``{prefix}.{metric}/{layer}``, and their mean over blocks, ``{prefix}.{metric}/mean``.

    Encoder and decoder have a mean each, ``{prefix}.{metric}/encoder.mean`` and ``…/decoder.mean``.

    Args:
        values: by layer and metric.
        prefix: of the tags.

    >>> tagged_scalars({"embed": {"V": 1.0}, "block.00": {"V": 2.0}, "block.01": {"V": 4.0}})
    {'geometry.V/embed': 1.0, 'geometry.V/block.00': 2.0, 'geometry.V/block.01': 4.0, 'geometry.V/mean': 3.0}
    """
    scalars = {f"{prefix}.{metric}/{layer}": v for layer, at in values.items() for metric, v in at.items()}
    of_blocks: dict[str, list[float]] = {}
    for layer, at in values.items():
        if block := _BLOCK.fullmatch(layer):
            for metric, value in at.items():
                of_blocks.setdefault(f"{prefix}.{metric}/{block[1]}mean", []).append(value)
    return {**scalars, **{tag: sum(v) / len(v) for tag, v in of_blocks.items()}}


def custom_scalars_layout(metrics: Iterable[str], prefix: str = "geometry") -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom-scalars page: a chart per metric, holding all layers; what to look at first comes first."""
    metrics = list(metrics)
    ordered = dict.fromkeys([*(first for first in _FIRST_CHARTS if first in metrics), *metrics])
    return {prefix: {metric: ["Multiline", [rf"^{re.escape(f'{prefix}.{metric}')}\/"]] for metric in ordered}}
