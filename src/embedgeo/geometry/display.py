"""What a `Geometry` says: a table in a notebook, and why there is nothing at some layers."""

from html import escape
from typing import TYPE_CHECKING

from embedgeo.functional.distributed import has_other_ranks
from embedgeo.results.glossary import HEADLINES, in_order, term
from embedgeo.results.wording import measured, reason

if TYPE_CHECKING:
    from embedgeo.geometry.layers import Geometry
    from embedgeo.geometry.results import Results

_MOST = 8
"""Columns where none of the metrics is among those to look at first."""


def html_table(geometry: "Results") -> str:
    """A row for each layer and a column for each metric to look at first, with standard errors where there are any.

    An undefined value is a dash. It never raises, and calls on no other process: where there are several, or nothing
    was measured yet, it is a sentence.
    """
    try:
        return _table(geometry)
    except Exception as error:  # a notebook would print the whole traceback
        return f"<p>Geometry: it cannot be computed ({escape(reason(error))}).</p>"


def why_silent(geometry: "Geometry") -> str:
    """See `Geometry.why_silent`."""
    silent = geometry.silent_layers()
    if not silent:
        return ""
    if geometry.probe.layers_without_gradients.issuperset(silent):
        return f"only forward passes without gradients reached {', '.join(silent)}: count them by no_grad_passes=True."
    if geometry.probe.is_stable:
        return f"no forward pass reached {', '.join(silent)}, at least in no graph compiled after prepare(model)."
    return f"no forward pass reached {', '.join(silent)}."


def _table(geometry: "Results") -> str:
    start = f"Geometry of {len(geometry.layers)} layers"
    if has_other_ranks():
        return f"<p>{start}, on several ranks: <code>to_frame()</code>, called on every rank, has the numbers.</p>"
    records = geometry.records()
    if not records:
        return f"<p>{start}: nothing was measured yet.</p>"
    found = in_order(record["metric"] for record in records)
    shown = [metric for metric in HEADLINES if metric in found] or found[:_MOST]
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        is_defined = record["value"] == record["value"]
        text = measured(record["value"], record["stderr"]) if is_defined else "–"
        cells.setdefault(record["layer"], {})[record["metric"]] = text
    titles = "".join(f'<th title="{escape(term(key).meaning)}">{escape(term(key).name)}</th>' for key in shown)
    rows = "".join(
        f"<tr><th>{escape(layer)}</th>" + "".join(f"<td>{of_layer.get(key, '–')}</td>" for key in shown) + "</tr>\n"
        for layer, of_layer in cells.items()
    )
    more = f"{len(found) - len(shown)} more metrics: <code>to_frame()</code>. " if len(found) > len(shown) else ""
    why = geometry.why_silent()
    caption = f"{start}. {more}{escape(why[:1].upper() + why[1:])}".strip()
    return f"<table>\n<caption>{caption}</caption>\n<tr><th>layer</th>{titles}</tr>\n{rows}</table>"
