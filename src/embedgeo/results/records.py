"""Records, the flat form of results; groups of models, and losses that lie apart."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypedDict

MODEL = "model"
"""Layer name of metrics of the whole model, such as its loss; their layer index is -1 and their width 0."""

_LEAST_JUMP = 0.5  # nats by which a loss has to lie outside the range of its neighbours to be an outlier


class Record(TypedDict):
    """The value of a metric at a layer.

    Attributes:
        step: optimizer step; of the records of training runs alone.
        layer: name of the layer.
        layer_index: its position in forward order, from 0.
        width: d, the width of its hidden state.
        metric: key of the metric.
        value: NaN where it is undefined.
        stderr: its standard error; NaN where it was not asked for.
    """

    step: NotRequired[int]
    layer: str
    layer_index: int
    width: int
    metric: str
    value: float
    stderr: float


def model_record(metric: str, value: float) -> Record:
    """A record of the whole model.

    >>> model_record("loss", 2.5)
    {'layer': 'model', 'layer_index': -1, 'width': 0, 'metric': 'loss', 'value': 2.5, 'stderr': nan}
    """
    return Record(layer=MODEL, layer_index=-1, width=0, metric=metric, value=value, stderr=nan)


def parse_groups(option: Any) -> dict[str, str]:
    """The group of each model that is named in an option, if any.

    It is a mapping from a group to its models; or ``group=model,model`` as a string, several with spaces between them,
    or a list of these.

    >>> parse_groups(["encoder=a,b", "decoder=c"]) == parse_groups({"encoder": ["a", "b"], "decoder": "c"})
    True
    >>> parse_groups("encoder=a,b decoder=c")
    {'a': 'encoder', 'b': 'encoder', 'c': 'decoder'}
    """
    if isinstance(option, Mapping):
        named = [(group, [models] if isinstance(models, str) else models) for group, models in option.items()]
    else:
        parts = option if isinstance(option, list | tuple) else [option] if option else []
        words = [word for part in parts for word in str(part).split()]
        named = [(group, models.split(",")) for group, _, models in (word.partition("=") for word in words)]
    groups: dict[str, str] = {}
    for group, models in named:
        are_names = isinstance(models, list | tuple) and models and all(isinstance(m, str) and m for m in models)
        if not (isinstance(group, str) and group and are_names):
            raise ValueError(
                "model_group must be groups with their models, as encoder=a,b decoder=c, or in YAML a mapping from a "
                f"group to a list of models; got {option!r}."
            )
        for model in models:
            _assign(groups, model, group)
    return groups


def groups_of(groups: Mapping[str, str], models: Iterable[str]) -> dict[str, str]:
    """The group of each of these models that is in one.

    `parse_groups` has them by the name of a model, by the end of it after the last slash if only one of the models has
    that, or by a pattern.

    >>> groups_of({"bert": "encoder", "lab/gpt-*": "decoder"}, ["google/bert", "lab/gpt-1", "lab/gpt-2", "lab/t5"])
    {'google/bert': 'encoder', 'lab/gpt-1': 'decoder', 'lab/gpt-2': 'decoder'}
    """
    known = list(dict.fromkeys(models))
    found: dict[str, str] = {}
    for name, group in groups.items():
        matches = [model for model in known if model == name or fnmatchcase(model, name)]
        if not matches:
            matches = [model for model in known if Path(model).name == name]
            if len(matches) != 1:
                why = f"is that of {', '.join(matches)}" if matches else f"is none of {', '.join(known)}"
                raise ValueError(f"model_group must name models that are there; {name} {why}.")
        for model in matches:
            _assign(found, model, group)
    return found


def _assign(groups: dict[str, str], model: str, group: str) -> None:
    if groups.setdefault(model, group) != group:
        raise ValueError(f"a model must be in one model_group; {model} is in {groups[model]} and in {group}.")


def loss_outliers(losses: Sequence[tuple[str, float]]) -> list[str]:
    """Names of the checkpoints whose loss lies much farther outside the range of its two neighbours than others do.

    The losses are those of one series, by step. One that is not finite is an outlier; the first, which has one
    neighbour, is not.

    >>> loss_outliers([("step1", 9.0), ("step2", 5.0), ("step3", 12.7), ("step4", 3.0)])
    ['step3']
    """
    finite = [(name, loss) for name, loss in losses if math.isfinite(loss)]
    outliers = {name for name, loss in losses if not math.isfinite(loss)}
    while len(finite) > 1:  # the farthest first: beside an outlier its neighbours look like outliers, too
        jumps = _jumps([loss for _, loss in finite])
        farthest = max(range(len(finite)), key=jumps.__getitem__)
        elsewhere = [0.0, *jumps[: max(0, farthest - 1)], *jumps[farthest + 2 :]]
        if jumps[farthest] <= max(_LEAST_JUMP, 5 * median(elsewhere)):
            break
        outliers.add(finite.pop(farthest)[0])
    return [name for name, _ in losses if name in outliers]


def _jumps(losses: Sequence[float]) -> list[float]:
    """Distance of each loss from the range of its two neighbours; the first may be anything, the last may fall."""
    jumps = [0.0]
    for before, loss, after in zip(losses, losses[1:], [*losses[2:], None], strict=False):
        highest = before if after is None else max(before, after)
        lowest = loss if after is None else min(before, after)
        jumps.append(max(0.0, loss - highest, lowest - loss))
    return jumps
