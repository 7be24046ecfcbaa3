"""The lines of a page's figures as JSON, from which a script draws them again, for a reader who
points at them.
"""

import json
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from embedgeo.drawing import FEW, Array, FigureData, Lines
from embedgeo.layer_names import layer_labels

_DIGITS = 4  # of values; their errors have two
_PIXELS = 96 / 72  # CSS pixels in a point
_GREY = "#777777"


class Plots:
    """The figures of a page as JSON, in which what several of them share is there once."""

    def __init__(self) -> None:
        self._shared: dict[str, int] = {}  # place by JSON text
        self._figures: dict[str, str] = {}  # JSON text by name
        self.size = 0
        """Letters of the JSON so far."""
        self.choices: dict[str, dict[str, str]] = {"layer": {}, "run": {}}
        """Lines that a reader may choose among, by kind: their colours by name."""
        self.extent: tuple[float, float] | None = None
        """The first and the last step of any figure."""

    def add(self, name: str, data: FigureData) -> bool:
        """Add the lines of a figure under a name, if it has any."""
        lines = [each for each in data.lines if each.values.size]
        if not lines:
            return False
        ax = data.figure.axes[0]
        first, *_ = ax.get_xlabel().split(" ")
        over = {"optimizer": "step", "relative": "depth"}.get(first, "layer")
        subtitle: Any = data.figure.artists[0]
        ends = [float(f"{end:.{_DIGITS}g}") for end in ax.get_ylim()]
        written = {
            "title": data.figure.get_suptitle().strip(),
            "unit": subtitle.get_text().replace("\n", " "),
            "x": {"over": over, "isLog": ax.get_xscale() == "function"},
            "y": {"range": ends, "isLog": ax.get_yscale() == "log"},
            "lines": [self._lines(each, over) for each in lines],
        }
        text = json.dumps(written, separators=(",", ":"))
        self._figures[name] = text
        self.size += len(text) + len(name)
        return True

    def json(self) -> str:
        """All of it, as a ``<script>`` can hold it; empty where no figure has lines."""
        figures = ",".join(f"{json.dumps(name)}:{text}" for name, text in self._figures.items())
        whole = f'{{"shared":[{",".join(self._shared)}],"figures":{{{figures}}}}}'
        return whole.replace("<", "\\u003c") if figures else ""

    def _lines(self, lines: Lines, over: str) -> dict[str, Any]:
        values = lines.values.to_numpy(dtype=float)
        at = list(lines.values.index)
        names = [f"step {name:,}" if lines.kind == "step" else str(name) for name in lines.values]
        hexes = [to_hex(colour) for colour in lines.colours]
        for name, colour in zip(names, cycle(hexes), strict=False):
            if lines.kind in self.choices and name:
                self.choices[lines.kind].setdefault(name, colour)
        if over == "step":
            steps = [*at, *(self.extent or ())]
            self.extent = min(steps), max(steps)
        elif over == "layer":
            at = [*map(str, at)]
            for layer in filter(None, at):
                self.choices["layer"].setdefault(layer, _GREY)
        written: dict[str, Any] = {
            "kind": lines.kind,
            "at": self._share(at if over == "layer" else [round(float(x), _DIGITS) for x in at]),
            "names": self._share(names),
            "colours": self._share(hexes),
            "dashes": self._share([_in_pixels(each, lines.width) for each in lines.dashes]),
            "width": round(lines.width * _PIXELS, 2),
            "values": self._share_table(values, _DIGITS),
            "marks": lines.kind in ("run", "last")
            or (lines.kind in ("layer", "step") and values.size <= FEW),
        }
        if over == "layer":
            written["labels"] = self._share(layer_labels(at))
        if lines.errors is not None and lines.errors.notna().to_numpy().any():
            written["errors"] = self._share_table(lines.errors.to_numpy(dtype=float), 2)
        return written

    def _share(self, content: Sequence[Any]) -> int:
        return self._number(json.dumps(content, separators=(",", ":")))

    def _share_table(self, values: Array, digits: int) -> int:
        """The place of a table, a list for each column."""
        columns = (
            ",".join(f"{x:.{digits}g}" if np.isfinite(x) else "null" for x in column)
            for column in values.T.tolist()
        )
        return self._number(f"[{','.join(f'[{column}]' for column in columns)}]")

    def _number(self, text: str) -> int:
        if text not in self._shared:
            self.size += len(text) + 1
        return self._shared.setdefault(text, len(self._shared))


def _in_pixels(dashes: Any, width: float) -> list[float]:
    pattern = () if dashes == "-" else dashes[1]
    return [round(length * width * _PIXELS, 1) for length in pattern]
