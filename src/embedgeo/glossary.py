"""Names, units, meanings and order of what is measured, as metrics declare them."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedgeo.formatting import printable

GROUPS = (
    "at a glance",
    "size and variance",
    "norms",
    "shape",
    "token types",
    "rows counted",
    "more",
)
"""Groups of metrics, in the order of TensorBoard's custom-scalars tab; those of the first are the
headlines.
"""
GAUSSIAN = "Gaussian rows"  # the name of their values, beside measured ones


class Term(NamedTuple):
    """Name, unit and meaning of a metric, for people.

    Attributes:
        name: short, for titles and axes.
        unit: unit and, where there are several, the estimator.
        meaning: one or two sentences.
        ranges: its values may span orders of magnitude.
        is_drawn: the report has figures of it; else it is only in the table, in the flags or a
            dashed line.
        group: one of `embedgeo.glossary.GROUPS`; metrics of the first are shown first everywhere.
        order: place among all metrics, ascending; those of one place stand as they were declared.
        gaussian: its value for isotropic Gaussian rows, where that does not depend on their number,
            width or size.
        spread: the key of its standard deviation over batches of rows, drawn as a band where errors
            are unknown.
        is_scalar: monitors log it, as they log the headlines, unless told otherwise: see
            ``scalars`` of `embedgeo.GeometryMonitor`.
        follows: the key whose figures its own come after in the report, whatever its order.
    """

    name: str
    unit: str
    meaning: str
    ranges: bool = False
    is_drawn: bool = True
    group: str = "more"
    order: int = 1000
    gaussian: float | None = None
    spread: str = ""
    is_scalar: bool = False
    follows: str = ""

    def is_logarithmic(self, values: NDArray[np.float64]) -> bool:
        """Tell whether values go on a logarithmic scale: all of them positive, over more than a
        factor of 10.
        """
        finite = values[np.isfinite(values)]
        return bool(
            self.ranges and finite.size and 1e-200 < 10 * finite.min() < finite.max() < 1e200
        )


# gives the term of a key made from a metric's arguments, None of another key
Family = Callable[[str], Term | None]


class Glossary:
    """Terms by key, and families of keys."""

    def __init__(self) -> None:
        self.terms: dict[str, Term] = {}
        self.families: list[Family] = []

    def find(self, key: str) -> Term | None:
        """The term of a key, None of an unknown one."""
        return self.terms.get(key) or next(
            filter(None, (family(key) for family in self.families)), None
        )


OWN, FOREIGN = Glossary(), Glossary()
"""Terms of this package, and those of metrics from elsewhere; a key of both is this package's."""


def in_group(group: str, order: int, /, **terms: Term) -> dict[str, Term]:
    """Terms by key, of one group and at one place; tables of them have name and unit in a line, the
    meaning below.
    """
    return {key: each._replace(group=group, order=order) for key, each in terms.items()}


def register(
    terms: Mapping[str, Term], family: Family | None = None, *, is_own: bool = False
) -> None:
    """Add terms, and the family of further keys."""
    for key, each in terms.items():
        if each.group not in GROUPS:
            raise ValueError(
                f"the group of a term must be one of {', '.join(GROUPS)}; {key} has {each.group!r}."
            )
    glossary = OWN if is_own else FOREIGN
    glossary.terms.update(terms)
    if family is not None:
        glossary.families.append(family)


def term(key: str) -> Term:
    """The term of a metric; a metric that is not in the glossary keeps its key as its name."""
    return (
        OWN.find(key) or FOREIGN.find(key) or Term(printable(key), "value", "A metric of your own.")
    )


def known_terms() -> dict[str, Term]:
    """All terms by key, in the order in which to look at them; without those of families."""
    terms = OWN.terms | {key: each for key, each in FOREIGN.terms.items() if key not in OWN.terms}
    return dict(sorted(terms.items(), key=lambda item: item[1].order))


def in_order(metrics: Iterable[str]) -> list[str]:
    """Distinct metrics in the order in which to look at them; unknown ones last, by name."""
    rank = {key: i for i, key in enumerate(known_terms())}
    return sorted(set(metrics), key=lambda key: (rank.get(key, len(rank)), key))


def headlines() -> tuple[str, ...]:
    """The metrics to look at first, in order."""
    return tuple(key for key, each in known_terms().items() if each.group == GROUPS[0])


def foreign_terms(metrics: Iterable[str]) -> str:
    """The terms of those metrics that are from elsewhere, as JSON for `learn`; empty where there
    are none.
    """
    found = {key: FOREIGN.find(key) for key in sorted(set(metrics)) if not OWN.find(key)}
    terms = {key: each._asdict() for key, each in found.items() if each}
    return json.dumps(terms, ensure_ascii=False) if terms else ""


def learn(written: str) -> None:
    """Take up terms that `foreign_terms` has written in another process; those of known keys stay
    as they are.
    """
    for key, fields in json.loads(written or "{}").items():
        if OWN.find(key) is None and FOREIGN.find(key) is None:
            known = Term(**{name: value for name, value in fields.items() if name in Term._fields})
            FOREIGN.terms[key] = known if known.group in GROUPS else known._replace(group="more")


_OTHERS = {
    "previous": "the measurement before",
    "first": "the first measurement",
    "below": "the layer below",
}


def _to_others(
    key: str, name: str, unit: str, meaning: str, gaussian: float | None = None
) -> dict[str, Term]:
    terms = {}
    for other, place in _OTHERS.items():
        title = f"{name} layer below" if other == "below" else f"{name} {other}"
        meaning_here = f"{meaning} Of the same rows here and at {place}."
        terms[f"{key}_to_{other}"] = Term(title, unit, meaning_here, gaussian=gaussian)
    return terms


DRIFT = in_group(
    "more",
    750,
    **_to_others(
        "cka",
        "CKA to",
        "linear, debiased",
        "How alike the geometry is, whatever the rotation and scale: 1 for copies, 0 for unrelated "
        "rows.",
        gaussian=0.0,
    ),
    **_to_others(
        "procrustes",
        "Procrustes to",
        "squared distance of rows centred and scaled to norm 1",
        "What is left between the rows after the best rotation: 0 for rotated and scaled copies, 2 "
        "at most.",
    ),
    **_to_others(
        "neighbor_overlap",
        "overlap with",
        "share of the 30 nearest neighbours, mean over rows",
        "How much of a row's neighbourhood stays: 1 where all of it does, 30 / (rows − 1) for "
        "unrelated rows.",
    ),
    linearity=Term(
        "linearity",
        "R² of an affine map from the layer below, adjusted",
        "How much of a layer, the residual stream included, is an affine function of the one "
        "below: 1 if all of it is, 0 for unrelated rows.",
        gaussian=0.0,
    ),
    linearity_without_residual=Term(
        "linearity without the residual",
        "R² of an affine map from the layer below, adjusted",
        "How much of what a layer adds to the one below is an affine function of that: 1 if all of "
        "it is.",
    ),
)
"""Comparisons of layers and steps by `embedgeo drift` and monitors, in the order in which to look
at them.
"""

_PARTS = {
    "without_offset": (
        "without offset",
        "their mean is taken away, which is one direction of them all",
    ),
    **{
        f"without_{k}_directions": (
            f"without top {k} directions",
            f"the {k} directions of largest variance are taken away, their mean stays",
        )
        for k in (1, 3, 10)
    },
    **{
        f"without_{k}_coordinates": (
            f"without top {k} coordinates",
            f"the {k} coordinates of largest variance are set to their means",
        )
        for k in (1, 3, 10)
    },
    "without_context": (
        "without context",
        "each is set to the mean of its token type, so that nothing tells of its context",
    ),
    "without_token": (
        "without token mean",
        "the mean of its token type, with the offset, is taken away from each",
    ),
    "as_noise": ("with Gaussian rows", "they are noise of the same mean and covariance"),
    "identity": ("with the same rows", "they are replaced by themselves; exactly 0"),
}


def _change(name: str, part: str, what: str, suffix: str) -> Term:
    title = f"loss {part}{' after the first' if suffix else ''}"
    where = ", the first positions left as they are" if suffix else ""
    follows = (
        "M_over_Q"
        if name == "without_offset"
        else "anisotropy"
        if name == "without_1_directions"
        else ""
    )
    return Term(
        title,
        "change of the loss, nats per token",
        f"What the loss needs of the layer's rows{where}: {what}.",
        is_drawn=not suffix and name != "identity",
        follows="" if suffix else follows,
    )


_CHANGES = {
    f"loss_change_{name}{suffix}": _change(name, part, what, suffix)
    for suffix in ("", "_after_first")
    for name, (part, what) in _PARTS.items()
    if not (suffix and name == "identity")
}

_OF_MODELS = {
    **DRIFT,
    "norm_Q_expected": Term(
        "Q expected of the norm",
        "‖γ‖² + ‖β‖², squared embedding units",
        "Q at the output of this LayerNorm (of an RMSNorm ‖γ‖²), if rows are spread evenly over "
        "the coordinates.",
        ranges=True,
        is_drawn=False,
        order=760,
    ),
    **in_group("more", 765, **_CHANGES),
    "logit_lens_loss": Term(
        "loss by the logit lens",
        "mean loss on the text, nats per token, read at this layer",
        "How well the final norm and the head predict from what is there at a layer: what the "
        "blocks above it still do for the prediction.",
        order=766,
    ),
    **in_group(
        "more",
        770,
        duplicate_rows=Term(
            "rows with a copy",
            "rows of an embedding matrix",
            "Rows equal to another one but for rounding: tokens that the model cannot tell apart.",
            ranges=True,
        ),
        rows_without_token=Term(
            "rows without a token",
            "rows of an embedding matrix",
            "Rows of ids that the tokenizer does not have: padding of the vocabulary.",
            ranges=True,
        ),
        untrained_rows=Term(
            "rows that look untrained",
            "rows of an embedding matrix",
            "Rows as near to the mean of the unused rows as those are themselves: training has not "
            "moved them apart.",
            ranges=True,
        ),
        tied_embeddings=Term(
            "tied embeddings",
            "1: tied, 0: not",
            "Whether input and output embedding are one matrix.",
            is_drawn=False,
        ),
    ),
    **in_group(
        "more",
        780,
        loss=Term(
            "loss",
            "mean loss on the text, nats per token",
            "How well the model predicts the measured text.",
        ),
        training_loss=Term(
            "training loss",
            "as the training loop logged it",
            "How well the model predicts what it is trained on.",
            is_drawn=False,
        ),
        unseen_type_share=Term(
            "rows of unseen tokens",
            "share of the rows",
            "Rows whose token type is in one half of the sequences alone: an ablation leaves them "
            "their context and token.",
            is_drawn=False,
        ),
        tokens_seen=Term(
            "tokens seen",
            "tokens, as the name says",
            "How much the model was trained on.",
            ranges=True,
        ),
    ),
}

_REMOVED = re.compile(r"loss_change_(without_(\d+)_(directions|coordinates))(_after_first)?")


def _other_changes(key: str) -> Term | None:
    """The term of a change of the loss without another number of directions or coordinates."""
    found = _REMOVED.fullmatch(key)
    if found is None:
        return None
    part, what = (each.replace("3", found[2]) for each in _PARTS[f"without_3_{found[3]}"])
    return _change(found[1], part, what, found[4] or "")._replace(group="more", order=765)


def _alarm(key: str) -> Term | None:
    """The term of what an alarm adds to a monitor's history."""
    metric = key.removeprefix("alarm_")
    if metric == key:
        return None
    meaning = "By how many of its usual deviations the number was off when it alarmed."
    return Term(f"alarm: {term(metric).name}", "deviations", meaning, is_drawn=False)


register(_OF_MODELS, _other_changes, is_own=True)
register({}, _alarm, is_own=True)
