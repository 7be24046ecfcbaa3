"""What the glossary says of the same rows over time and depth."""

from embedgeo.results.term import Term

_COMPARED = {"previous": "the measurement before", "first": "the first measurement", "below": "the layer below"}

DRIFT: dict[str, Term] = {
    f"{key}_to_{other}": Term(
        f"{name} {'layer ' * (other == 'below')}{other}", unit, f"{meaning} Of the same rows here and at {what}."
    )
    for key, name, unit, meaning in (
        (
            "cka",
            "CKA to",
            "linear, debiased",
            "How alike the geometry is, whatever the rotation and scale: 1 for copies, 0 for unrelated rows.",
        ),
        (
            "procrustes",
            "Procrustes to",
            "squared distance of rows centred and scaled to norm 1",
            "What is left between the rows after the best rotation: 0 for rotated and scaled copies, 2 at most.",
        ),
        (
            "neighbor_overlap",
            "overlap with",
            "share of the 30 nearest neighbours, mean over rows",
            "How much of a row's neighbourhood stays: 1 where all of it does, 30 / (rows − 1) for unrelated rows.",
        ),
    )
    for other, what in _COMPARED.items()
} | {
    "linearity": Term(
        "linearity",
        "R² of an affine map from the layer below, adjusted",
        "How much of a layer, the residual stream included, is an affine function of the one below: 1 if all of it is, "
        "0 for unrelated rows.",
    ),
    "linearity_without_residual": Term(
        "linearity without the residual",
        "R² of an affine map from the layer below, adjusted",
        "How much of what a layer adds to the one below is an affine function of that: 1 if all of it is.",
    ),
}
"""By metric, in the order in which to look at them."""
