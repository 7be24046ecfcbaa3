"""The mathematics: pure functions of tensors, without state, torchmetrics or Lightning."""

from embedgeo.functional.dimension import estimated_dimension, merge_duplicates, twonn_dimension
from embedgeo.functional.moments import Moments, VarianceMoments, merge, moment_values, pool, row_moments
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
from embedgeo.functional.sampling import Sample, extend_sample, merge_samples
from embedgeo.functional.spectrum import (
    Scatter,
    anisotropy,
    anisotropy_null,
    pool_scatter,
    row_scatter,
    spectrum_values,
    top_eigenvalue,
)
from embedgeo.functional.tokens import (
    REGRESSION_COUNT_RANGE,
    TokenTable,
    coefficient_of_variation,
    least_squares,
    token_table,
    type_regressions,
    type_values,
    unbiased_split,
    variance_split,
)

__all__ = [
    "REGRESSION_COUNT_RANGE",
    "Affine",
    "Moments",
    "PrincipalAxes",
    "Sample",
    "Scatter",
    "TokenTable",
    "VarianceMoments",
    "anisotropy",
    "anisotropy_null",
    "coefficient_of_variation",
    "estimated_dimension",
    "extend_sample",
    "least_squares",
    "merge",
    "merge_duplicates",
    "merge_samples",
    "moment_values",
    "pca_whitening",
    "pool",
    "pool_scatter",
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
