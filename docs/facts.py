"""The facts of the keys in definitions.md, as the metrics know them, and the table of all that is
measured by default in numbers.md. mkdocs puts them there when it builds the site.

A new key needs a heading of definitions.md, such as ``### `key```, and a text; its facts come by
themselves.
"""

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchmetrics import Metric

from embedgeo.formatting import number
from embedgeo.functional import anisotropy_null
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import layer_values
from embedgeo.glossary import GROUPS, OWN, in_order, is_without, term
from embedgeo.metrics import IntrinsicDimension, default_metrics
from embedgeo.metrics.base import metric_classes
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from embedgeo.metrics.layer import LayerMetrics

PAGE = Path(__file__).parent / "definitions.md"
DEFAULTS = "<!-- table: measured by default -->"
"""Where numbers.md has the table of the keys that are measured by default."""
FAMILIES = {
    "headline": (
        *("V_W_over_V_unbiased", "M_over_Q", "anisotropy", "mean_cosine", "V_on_M_r2"),
        *("V", "V_on_M_slope", "intrinsic_dimension_between"),
    ),
    "other": ("previous", "first"),
}
"""Values of the words in braces, which stand for all keys of a family."""

_HEADING = re.compile(r"^### (`[\w{}]+`(?:, `[\w{}]+`)*)\n\n", re.MULTILINE)
_NUM_ROWS, _NUM_TYPES, _DIM = 65_536, 8_000, 768  # of the Gaussian rows whose values are told


def keys_of(heading: str) -> list[str]:
    """The keys that a heading names."""
    return [key for name in re.findall(r"`([\w{}]+)`", heading) for key in _family(name)]


def with_facts(page: str) -> str:
    """The page with the facts of all keys as they are.

    Raises:
        LookupError: a heading has a key that no metric has.
    """
    return _HEADING.sub(lambda found: f"### {found[1]}\n\n{_facts(found[1])}\n", page)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The text of a page; mkdocs calls this for each."""
    if page.file.src_uri == "numbers.md":
        return markdown.replace(DEFAULTS, default_table())
    return with_facts(markdown) if page.file.src_uri == PAGE.name else markdown


def default_table() -> str:
    """The keys that are measured by default, by group, with their meaning."""
    lines = ["| key | meaning |", "|---|---|"]
    keys = _default_keys()
    for group in GROUPS:
        of_group = [key for key in keys if term(key).group == group and not is_without(key)]
        lines += [f"| **{group[0].upper()}{group[1:]}** | |"] if of_group else []
        lines += [f"| `{key}` | {term(key).meaning} |" for key in of_group]
    left = ", ".join(f"`{key}`" for key in keys if is_without(key))
    return "\n".join([*lines, f"| **Without a part** | {left} |"])


def _default_keys() -> list[str]:
    """The keys of a layer of the default metrics, some of whose rows are massive."""
    random = torch.Generator().manual_seed(0)
    num_sequences, length, dim = 16, 64, 8
    x = torch.randn(num_sequences, length, dim, generator=random)
    x[:, 0] *= 99
    ids = torch.randint(16, (num_sequences, length), generator=random)
    numbers = torch.arange(num_sequences)[:, None].expand_as(ids)
    layer = LayerMetrics(default_metrics, dim, device=torch.device("cpu"))
    layer.update(x, row_ids(x, ids, None, numbers))
    (values,) = layer_values([layer])
    return in_order(values)


def _family(name: str) -> list[str]:
    word = re.search(r"{(\w+)}", name)
    return [name.replace(word[0], str(value)) for value in FAMILIES[word[1]]] if word else [name]


def _facts(heading: str) -> str:
    lines = list[str]()
    places = dict[str, list[str]]()
    for name in re.findall(r"`(.+?)`", heading):
        keys = _family(name)
        if unknown := [key for key in keys if OWN.find(key) is None]:
            raise LookupError(
                f"a heading of definitions.md must be of keys that metrics have; got {unknown}."
            )
        term = OWN.find(keys[0])
        values = dict.fromkeys(
            number(float(f"{_gaussian()[key]:.3g}")).replace("-", "−")
            for key in keys
            if key in _gaussian()
        )
        gaussian = f" Gaussian rows give {', '.join(values)}." if values else ""
        word = re.search(r"{\w+}", name)
        of = f" for {', '.join(str(value) for value in FAMILIES[word[0][1:-1]])}" if word else ""
        lines.append(f"`{name}`{of}: **{term.name}**, {term.unit}.{gaussian}")
        places.setdefault(_place(keys[0]), []).append(f"`{name}`")
    for place, names in places.items():
        of = f"{', '.join(names)}: " if len(places) > 1 else ""
        lines.append(f"{of}{place[0].lower() if of else place[0].upper()}{place[1:]}.")
    marks = {"initial_indent": "> - ", "subsequent_indent": ">   "}
    return "".join(
        textwrap.fill(line, 150, **marks, break_long_words=False, break_on_hyphens=False) + "\n"
        for line in lines
    )


def _place(key: str) -> str:
    """Metrics that have a key, its group, and what it needs."""
    group = OWN.find(key).group
    kinds = sorted(
        f"`{kind.__name__}`" for kind in _classes() if key in kind.terms or kind.family_term(key)
    )
    needs = [
        what for what, defined in _without().items() if key in _values() and key not in defined
    ]
    return "; ".join(
        [
            *([f"From {', '.join(kinds)}"] if kinds else []),
            f"group *{group}*{' (a headline)' if group == GROUPS[0] else ''}",
            *([f"needs {' and '.join(needs)}"] if needs else []),
        ]
    )


def _classes() -> list[type]:
    return [kind for kind in metric_classes() if kind.__module__.startswith("embedgeo.metrics.")]


@cache
def _values() -> frozenset[str]:
    return frozenset(_defined(token_ids=True, sequence_ids=True))


@cache
def _without() -> dict[str, frozenset[str]]:
    """Keys that are defined without something."""
    return {
        "token ids": frozenset(_defined(token_ids=False, sequence_ids=True)),
        "sequences": frozenset(_defined(token_ids=True, sequence_ids=False)),
    }


def _defined(*, token_ids: bool, sequence_ids: bool) -> set[str]:
    """Keys that are no NaN where the rows of 16 sequences come with these."""
    random = torch.Generator().manual_seed(0)
    n, dim, num_types = 2_048, 8, 100
    ids = torch.multinomial(
        1 / torch.arange(1.0, num_types + 1), n, replacement=True, generator=random
    )
    centers = torch.randn(2, num_types, dim, generator=random)
    x = 1 + centers[0][ids] + centers[1][ids.roll(-1)] + torch.randn(n, dim, generator=random)
    metrics: list[Metric] = default_metrics(dim, spectrum=True, anisotropy_batch=512)
    metrics.append(IntrinsicDimension(dim, batch_size=512, num_batches=4))
    others = [kind for kind in _classes() if kind not in map(type, metrics) and _is_of_width(kind)]
    metrics += [kind(dim) for kind in others]
    known = {"token_ids": ids} if token_ids else {}
    known |= {"sequence_ids": torch.arange(n) // 128} if sequence_ids else {}
    found = set[str]()
    for metric in metrics:
        metric.update(x, **known)
        found |= {key for key, value in metric.compute().items() if not value.isnan()}
    return found


def _is_of_width(kind: type) -> bool:
    """Tell metrics that are made of the width alone."""
    try:
        kind(2)
    except TypeError:
        return False
    return True


@cache
def _gaussian() -> dict[str, float]:
    """What rows of N(0, I) give, by key."""
    null = float(anisotropy_null(torch.tensor(float(_NUM_ROWS), dtype=torch.float64), _DIM))
    known = {
        "n": _NUM_ROWS,
        "Q": _DIM,
        "token_types": _NUM_TYPES,
        "n_points": 4_096,
        "anisotropy_null": null,
    }
    measured = {key: np.array([float(value)]) for key, value in known.items()}
    rows = GaussianRows(frozenset(OWN.terms), measured, np.array([float(_DIM)]))
    return {
        key: float(value) for key, (value,) in baseline_values(rows).items() if not np.isnan(value)
    }
