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

from embedgeo.functional.coordinates import (
    CoordinateMoments as CoordinateMoments,
    coordinate_shares as coordinate_shares,
    coordinate_table as coordinate_table,
    excess_kurtosis as excess_kurtosis,
    outlier_values as outlier_values,
    row_coordinates as row_coordinates,
)
from embedgeo.functional.dimension import (
    LabelledEstimates as LabelledEstimates,
    RowLabels as RowLabels,
    estimated_dimension as estimated_dimension,
    gride_dimensions as gride_dimensions,
    labelled_dimensions as labelled_dimensions,
    twonn_dimension as twonn_dimension,
)
from embedgeo.functional.moments import (
    Moments as Moments,
    merge_parts as merge_parts,
    moment_values as moment_values,
    row_moments as row_moments,
)
from embedgeo.functional.neighbors import (
    merge_duplicates as merge_duplicates,
    nearest_distances as nearest_distances,
    two_nearest_distances as two_nearest_distances,
)
from embedgeo.functional.processing import (
    Affine as Affine,
    PrincipalAxes as PrincipalAxes,
    pca_whitening as pca_whitening,
    principal_axes as principal_axes,
    processed_values as processed_values,
    top_removal as top_removal,
    z_scoring as z_scoring,
)
from embedgeo.functional.sampling import Sample as Sample
from embedgeo.functional.spectrum import (
    Scatter as Scatter,
    anisotropy as anisotropy,
    anisotropy_null as anisotropy_null,
    entropy_rank as entropy_rank,
    power_law as power_law,
    row_scatter as row_scatter,
    sampled_spectrum_values as sampled_spectrum_values,
    spectrum_values as spectrum_values,
    top_eigenvalue as top_eigenvalue,
)
from embedgeo.functional.tokens import (
    REGRESSION_COUNT_RANGE as REGRESSION_COUNT_RANGE,
    TokenTable as TokenTable,
    coefficient_of_variation as coefficient_of_variation,
    context_split as context_split,
    least_squares as least_squares,
    local_variance as local_variance,
    token_table as token_table,
    type_regressions as type_regressions,
    type_values as type_values,
    unbiased_split as unbiased_split,
    variance_split as variance_split,
    within_variance as within_variance,
)
