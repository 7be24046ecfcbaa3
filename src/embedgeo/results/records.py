"""Records, the flat form of results, and outliers among losses."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

from embedgeo.glossary import is_without
from embedgeo.layer_names import blocks_by_side

MODEL = "model"
"""Layer name of metrics of the whole model, such as its loss; their layer index is -1 and their
width 0.
"""

MEANS = ("mean", "encoder.mean", "decoder.mean")
"""Layer names of means over blocks, those of an encoder and its decoder apart.

Their layer index is -1.
"""

# nats by which a loss has to lie outside the range of its neighbours to be an outlier
_LEAST_JUMP = 0.5


Deviations = Mapping[tuple[str, str], Sequence[float]]
"""Of the groups of the jackknife, by layer and metric: see `embedgeo.functional.jackknife`."""


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
        deviations: of the groups of the jackknife, of a mean over blocks.
    """

    step: NotRequired[int]
    layer: str
    layer_index: int
    width: int
    metric: str
    value: float
    stderr: float
    deviations: NotRequired[list[float]]


class Records(Sequence[Record]):  # noqa: PLW1641 (a list has no hash, either)
    """Records of steps without deviations, kept in columns of 28 bytes a record.

    An item is a new dict at each access, a slice is a list. They equal a list of the same records.

    >>> records = Records([{"step": 3, **model_record("loss", 2.5)}])
    >>> records[0]["step"], records[-1:] == records
    (3, True)
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._kinds = list[Record]()  # the first record of each layer and metric
        self._places = dict[Any, int]()  # of the kinds in their list
        # of records: the step, the place of the kind, the value, its standard error
        self._columns: Sequence[array[Any]] = array("q"), array("i"), array("d"), array("d")
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        """Add records at the end."""
        for record in records:
            kind = record["layer"], record["layer_index"], record["width"], record["metric"]
            place = self._places.setdefault(kind, len(self._kinds))
            if place == len(self._kinds):
                self._kinds.append(record.copy())
                self._kinds[-1].pop("deviations", None)
            row = record["step"], place, record["value"], record["stderr"]
            for column, item in zip(self._columns, row, strict=True):
                column.append(item)

    def __delitem__(self, index: int | slice) -> None:
        for column in self._columns:
            del column[index]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Record]:
        return map(self._record, *self._columns)

    def __getitem__(self, index: Any) -> Any:
        items = [column[index] for column in self._columns]
        return [*map(self._record, *items)] if isinstance(index, slice) else self._record(*items)

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, Records | list) else NotImplemented

    def __repr__(self) -> str:
        return repr([*self])

    def _record(self, step: int, place: int, *numbers: float) -> Record:
        # NaN is one object, which a dict takes for equal to itself
        value, stderr = (math.nan if math.isnan(each) else each for each in numbers)
        return {**self._kinds[place], "step": step, "value": value, "stderr": stderr}


def model_record(metric: str, value: float) -> Record:
    """A record of the whole model.

    >>> model_record("loss", 2.5)
    {'layer': 'model', 'layer_index': -1, 'width': 0, 'metric': 'loss', 'value': 2.5, 'stderr': nan}
    """
    return Record(layer=MODEL, layer_index=-1, width=0, metric=metric, value=value, stderr=math.nan)


def is_mean(record: Mapping[str, Any]) -> bool:
    """Test for a record of a mean over blocks: a layer may have the name of one."""
    return record["layer"] in MEANS and record["layer_index"] < 0


def is_of_model(records: Any) -> Any:
    """Test for a record of the whole model, or each in a table: a layer may have its name."""
    return (records["layer"] == MODEL) & (records["layer_index"] < 0)


def block_means(
    records: Iterable[Record],
    blocks: Iterable[str] = (),
    deviations: Deviations = MappingProxyType({}),
) -> list[Record]:
    """Records of the means over blocks of one measurement: see `MEANS`.

    Each is over the blocks with a record of the metric, and NaN where one of these is. There is no
    mean of blocks beside a layer with its name, nor of a side of which one of the ``blocks`` has no
    record. Standard errors are those of the blocks' mean ``deviations``, for blocks see the same
    rows; NaN without them.

    >>> blocks = [
    ...     {"layer": f"block.0{i}", "layer_index": i, "width": 8, "metric": "Q", "value": i}
    ...     for i in (1, 2)
    ... ]
    >>> block_means(blocks)
    [{'layer': 'mean', 'layer_index': -1, 'width': 8, 'metric': 'Q', 'value': 1.5, 'stderr': nan}]
    """
    records = list(records)
    layers = dict.fromkeys(record["layer"] for record in records)
    sides = _sides((*layers, *(dict.fromkeys(blocks) - layers.keys())))
    incomplete = {side for block, side in sides.items() if block not in layers}
    sides = {
        block: side
        for block, side in sides.items()
        if side not in incomplete and f"{side}mean" not in layers
    }
    together: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["layer"] in sides:
            together.setdefault((sides[record["layer"]], record["metric"]), []).append(record)
    means: list[Record] = []
    num_blocks = Counter(sides.values())
    for (side, metric), of_blocks in together.items():
        if is_without(metric) and len(of_blocks) < num_blocks[side]:
            continue  # some have no massive rows, and so no such record
        value = sum(record["value"] for record in of_blocks) / len(of_blocks)
        known = [deviations.get((record["layer"], metric), ()) for record in of_blocks]
        of_groups = [sum(each) / len(each) for each in zip(*known, strict=False)]
        mean = of_blocks[-1] | {"layer": f"{side}mean", "layer_index": -1, "value": value}
        mean["stderr"] = math.nan
        if of_groups:
            mean |= {"stderr": math.hypot(*of_groups), "deviations": of_groups}
        means.append(mean)
    return means


@cache
def _sides(layers: tuple[str, ...]) -> dict[str, str]:
    """The prefix of its side for each block among the layers."""
    return {block: side for side, blocks in blocks_by_side(layers).items() for block in blocks}


def shared_files(weights: Mapping[str, Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Weight files of checkpoints that otherwise differ: names of the file and of the checkpoints
    that share it.

    The weights are digests of their files by name, of each checkpoint.

    >>> shared_files(
    ...     {
    ...         "step1": {"a": "1", "b": "2"},
    ...         "step2": {"a": "1", "b": "3"},
    ...         "step4": {"a": "4", "b": "5"},
    ...     }
    ... )
    [('a', ['step1', 'step2'])]
    """
    holders: dict[tuple[str, str], list[str]] = {}
    for name, digests in weights.items():
        for file in digests.items():
            holders.setdefault(file, []).append(name)
    return [
        (file_name, names)
        for (file_name, _), names in holders.items()
        if any(weights[name] != weights[names[0]] for name in names)
    ]


def loss_outliers(losses: Sequence[tuple[str, float]]) -> list[str]:
    """Names of the checkpoints whose loss lies much farther outside the range of its two neighbours
    than others do.

    The losses are those of one series, by step. One that is not finite is an outlier; the first,
    which has one neighbour, is not.

    >>> loss_outliers([("step1", 9.0), ("step2", 5.0), ("step3", 12.7), ("step4", 3.0)])
    ['step3']
    """
    finite = [(name, loss) for name, loss in losses if math.isfinite(loss)]
    outliers = {name for name, loss in losses if not math.isfinite(loss)}
    # the farthest first: beside an outlier its neighbours look like outliers, too
    while len(finite) > 1:
        jumps = _jumps([loss for _, loss in finite])
        farthest = max(range(len(finite)), key=jumps.__getitem__)
        elsewhere = [0.0, *jumps[: max(0, farthest - 1)], *jumps[farthest + 2 :]]
        if jumps[farthest] <= max(_LEAST_JUMP, 5 * median(elsewhere)):
            break
        outliers.add(finite.pop(farthest)[0])
    return [name for name, _ in losses if name in outliers]


def _jumps(losses: Sequence[float]) -> list[float]:
    """Distance of each loss from the range of its two neighbours; the first may be anything, the
    last may fall.
    """
    jumps = [0.0]
    for before, loss, after in zip(losses, losses[1:], [*losses[2:], None], strict=False):
        highest = before if after is None else max(before, after)
        lowest = loss if after is None else min(before, after)
        jumps.append(max(0.0, loss - highest, lowest - loss))
    return jumps
