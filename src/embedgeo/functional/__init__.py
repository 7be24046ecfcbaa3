"""The mathematics: pure functions of tensors, and states that merge over batches and ranks.

A layer of attention by hand: three words, two coordinates, queries, keys and values that are the
rows themselves, and no scale. Attention moves the rows together: of their mean squared norm, Q, the
part that they have in common, M, becomes the larger share, and so the mean cosine grows.

>>> import torch
>>> words = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # The cat sat
>>> positions = torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.1, 0.1]])
>>> x = words + positions
>>> attended = (x @ x.T).softmax(-1) @ x
>>> attended
tensor([[0.9573, 0.6214],
        [0.6214, 0.9573],
        [0.8945, 0.8945]])
>>> for rows in (x, attended):
...     values = moment_values(row_moments(rows)) | {"anisotropy": anisotropy(rows)}
...     names = ("Q", "M", "V", "M_over_Q", "mean_cosine", "anisotropy")
...     print(*(f"{name} {float(values[name]):.3f}" for name in names))
Q 1.613 M 1.076 V 0.538 M_over_Q 0.667 mean_cosine 0.471 anisotropy 0.750
Q 1.402 M 1.359 V 0.043 M_over_Q 0.970 mean_cosine 0.957 anisotropy 0.884
"""

from embedgeo.functional.dimension import (
    LabelledEstimates,
    RowLabels,
    estimated_dimension,
    labelled_dimensions,
    twonn_dimension,
)
from embedgeo.functional.moments import (
    Moments,
    moment_values,
    row_moments,
)
from embedgeo.functional.neighbors import (
    merge_duplicates,
    two_nearest_distances,
)
from embedgeo.functional.sampling import Sample
from embedgeo.functional.spectrum import (
    Scatter,
    anisotropy,
    anisotropy_null,
    entropy_rank,
    row_scatter,
    sampled_spectrum_values,
    spectrum_values,
    top_eigenvalue,
)
from embedgeo.functional.tokens import (
    REGRESSION_COUNT_RANGE,
    TokenTable,
    coefficient_of_variation,
    context_split,
    least_squares,
    local_variance,
    token_table,
    type_regressions,
    type_values,
    unbiased_split,
    variance_split,
    within_variance,
)

__all__ = [
    "REGRESSION_COUNT_RANGE",
    "LabelledEstimates",
    "Moments",
    "RowLabels",
    "Sample",
    "Scatter",
    "TokenTable",
    "anisotropy",
    "anisotropy_null",
    "coefficient_of_variation",
    "context_split",
    "entropy_rank",
    "estimated_dimension",
    "labelled_dimensions",
    "least_squares",
    "local_variance",
    "merge_duplicates",
    "moment_values",
    "row_moments",
    "row_scatter",
    "sampled_spectrum_values",
    "spectrum_values",
    "token_table",
    "top_eigenvalue",
    "two_nearest_distances",
    "twonn_dimension",
    "type_regressions",
    "type_values",
    "unbiased_split",
    "variance_split",
    "within_variance",
]
