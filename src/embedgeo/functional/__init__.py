"""The mathematics: pure functions of tensors, and states that merge over batches and ranks."""

from embedgeo.functional.dimension import estimated_dimension, merge_duplicates, twonn_dimension
from embedgeo.functional.moments import Moments, merge_parts, moment_values, row_moments
from embedgeo.functional.neighbors import two_nearest_distances
from embedgeo.functional.plane import type_plane
from embedgeo.functional.processing import (
    Affine,
    PrincipalAxes,
    pca_whitening,
    principal_axes,
    processed_values,
    top_removal,
    z_scoring,
    zca_whitening,
)
from embedgeo.functional.regressions import (
    REGRESSION_COUNT_RANGE,
    coefficient_of_variation,
    least_squares,
    type_regressions,
    type_values,
)
from embedgeo.functional.sampling import Sample
from embedgeo.functional.spectrum import (
    Scatter,
    anisotropy,
    anisotropy_null,
    row_scatter,
    spectrum_values,
    top_eigenvalue,
)
from embedgeo.functional.split import unbiased_split, variance_split
from embedgeo.functional.tokens import TokenTable, token_table

__all__ = [
    "REGRESSION_COUNT_RANGE",
    "Affine",
    "Moments",
    "PrincipalAxes",
    "Sample",
    "Scatter",
    "TokenTable",
    "anisotropy",
    "anisotropy_null",
    "coefficient_of_variation",
    "estimated_dimension",
    "least_squares",
    "merge_duplicates",
    "merge_parts",
    "moment_values",
    "pca_whitening",
    "principal_axes",
    "processed_values",
    "row_moments",
    "row_scatter",
    "spectrum_values",
    "token_table",
    "top_eigenvalue",
    "top_removal",
    "two_nearest_distances",
    "twonn_dimension",
    "type_plane",
    "type_regressions",
    "type_values",
    "unbiased_split",
    "variance_split",
    "z_scoring",
    "zca_whitening",
]
