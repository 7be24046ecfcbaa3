"""What the metrics must give, written naively in float64 numpy: loops, full matrices, no batching,
no merging.
"""

import numpy as np

LINES = {"V_on_M_slope", "V_on_M_r2"}
"""Keys of slopes over token types, and of their R²."""
LINES |= {f"{key}_freq_{what}" for key in "QMV" for what in ("slope", "r2")}


def wide(x):
    return np.asarray(x, dtype=np.float64)


def m_and_v(x):
    return (x.mean(0) ** 2).sum(), ((x - x.mean(0)) ** 2).mean(0).sum()


def row_values(x):
    """Keys of the moments of all rows of ``x``, shape (n, d), each of which is a sequence."""
    x = wide(x)
    norms = np.array([np.sqrt((row**2).sum()) for row in x])
    units = [row / norm for row, norm in zip(x, norms, strict=True) if norm > 0]
    gram = np.array(units) @ np.array(units).T
    pairs = len(units) * (len(units) - 1)
    m, v = m_and_v(x)
    m_of_others, v_of_others = m_and_v(np.delete(x, (x**2).sum(0).argmax(), axis=1))
    return {
        "n": float(len(x)),
        "Q": np.mean([(row**2).sum() for row in x]),
        "M": m,
        "V": v,
        "M_over_V": m / v,
        "M_over_Q": m / (m + v),
        "mean_cosine": (gram.sum() - np.trace(gram)) / pairs,
        "norm_mean": norms.mean(),
        "norm_cv": norms.std() / norms.mean(),
        "norm_max": norms.max(),
        "top_dim_share": x.var(0).max() / v,
        "first_positions_share": np.nan,
        "V_without_top_dim": v_of_others,
        "M_over_Q_without_top_dim": m_of_others / (m_of_others + v_of_others),
    }


def token_loop(x, token_ids):
    """The paper's Algorithm 1: n, mean and V of every token type, one type after the other."""
    x, token_ids = wide(x), np.asarray(token_ids)
    table = {}
    for token_id in sorted(set(token_ids.tolist())):
        rows = x[token_ids == token_id]
        mean = rows.mean(0)
        table[token_id] = (len(rows), mean, ((rows - mean) ** 2).sum(1).mean())
    return table


def token_values(x, token_ids, regression_count_range=(10, 100_000)):
    """Keys that need token ids, over all rows given, apart from the unbiased split."""
    x = wide(x)
    table = token_loop(x, token_ids)
    n, mean = len(x), x.mean(0)
    m, v = m_and_v(x)
    within = sum(count / n * variance for count, _, variance in table.values())
    between = sum(count / n * ((center - mean) ** 2).sum() for count, center, _ in table.values())
    values = {
        "token_types": float(len(table)),
        "V_W": within,
        "V_B": between,
        "V_W_over_V": within / v,
        "V_over_Q": v / (m + v),
        "V_W_over_Q": within / (m + v),
        "V_B_over_Q": between / (m + v),
    }
    lo, hi = regression_count_range
    used = [row for row in table.values() if lo <= row[0] <= hi]
    count = np.array([row[0] for row in used], dtype=np.float64)
    m = np.array([(row[1] ** 2).sum() for row in used])
    v_t = np.array([row[2] for row in used])
    values["token_types_regressed"] = float(len(used))
    values["Q_t_cv"] = (m + v_t).std() / (m + v_t).mean() if used else np.nan
    values["V_on_M_slope"], values["V_on_M_r2"] = line(m, v_t)
    for key, value in (("Q", m + v_t), ("M", m), ("V", v_t)):
        values[f"{key}_freq_slope"], values[f"{key}_freq_r2"] = line(
            np.log10(count), np.log10(1 + value)
        )
    return values


def pairs_by_type(x, token_ids, sequence_ids, *, together):
    """For each token type, over the pairs of occurrences in one sequence, or in different ones: the
    sum of halves of squared distances, and the number of pairs; and the number of sequences.
    """
    squares, pairs, sequences = {}, {}, {}
    for token_id in set(token_ids.tolist()):
        rows, of = x[token_ids == token_id], sequence_ids[token_ids == token_id]
        counted = (of[:, None] == of) == together
        np.fill_diagonal(counted, False)
        squares[token_id] = sum(
            ((rows[i] - rows[j]) ** 2).sum() / 2 for i, j in np.argwhere(counted)
        )
        pairs[token_id], sequences[token_id] = counted.sum(), len(set(of.tolist()))
    return squares, pairs, sequences


def within_by_pairs(x, token_ids, sequence_ids=None):
    """The within-token variance from all pairs of occurrences in different sequences, one pair
    after the other.
    """
    x, token_ids = wide(x), np.asarray(token_ids)
    sequence_ids = np.arange(len(x)) if sequence_ids is None else np.asarray(sequence_ids)
    if len(set(sequence_ids.tolist())) == 1:
        sequence_ids = np.arange(len(x))
    squares, pairs, sequences = pairs_by_type(x, token_ids, sequence_ids, together=False)
    donors = [t for t in pairs if 2 <= sequences[t] <= 3] or [t for t in pairs if sequences[t] > 1]
    if not donors:
        return np.nan
    pooled = sum(squares[t] for t in donors) / sum(pairs[t] for t in donors)
    return np.mean([squares[t] / pairs[t] if pairs[t] else pooled for t in token_ids.tolist()])


def unbiased_values(x, token_ids, sequence_ids=None, within=None):
    """The estimate of V_W, what is left of V beside it, and the fraction."""
    x = wide(x)
    within = within_by_pairs(x, token_ids, sequence_ids) if within is None else within
    between = m_and_v(x)[1] - within * (len(x) - 1) / len(x)
    return {
        "V_W_unbiased": within,
        "V_B_unbiased": between,
        "V_W_over_V_unbiased": within / (within + between),
    }


def context_values(x, token_ids, sequence_ids, seen_in=None):
    """The split of V_W_unbiased from all pairs of occurrences, one token type and one pair after
    the other.

    ``seen_in`` has the number of sequences of each type by which types are alike; default: those
    given.
    """
    x, token_ids = wide(x), np.asarray(token_ids)
    sequence_ids = np.asarray(sequence_ids)
    squares, pairs, sequences = pairs_by_type(x, token_ids, sequence_ids, together=True)
    sequences = sequences if seen_in is None else seen_in

    def of_alike(token_id):
        donors = [t for t in pairs if pairs[t]]
        fewer = [sequences[t] for t in donors if sequences[t] <= sequences[token_id]]
        chosen = max(fewer) if fewer else min((sequences[t] for t in donors), default=None)
        alike = [t for t in donors if sequences[t] == chosen]
        return sum(squares[t] for t in alike) / sum(pairs[t] for t in alike) if alike else np.nan

    local = np.mean(
        [squares[t] / pairs[t] if pairs[t] else of_alike(t) for t in token_ids.tolist()]
    )
    within = within_by_pairs(x, token_ids, sequence_ids)
    text = within - local if len(set(sequence_ids.tolist())) > 1 else np.nan
    return {"V_W_local": local, "V_W_text": text, "V_W_text_over_V_W": text / within}


def line(x, y):
    """Slope and R² of the least-squares line."""
    if len(set(x)) < 2:
        return np.nan, np.nan
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - (slope * x + intercept)
    return slope, 1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum()


def in_count_range(token_ids, count_range):
    """Which rows belong to token types that occur lo to hi times."""
    token_ids = np.asarray(token_ids)
    counts = np.array([(token_ids == token_id).sum() for token_id in token_ids])
    return (counts >= count_range[0]) & (counts <= count_range[1])


def variances(x):
    """Eigenvalues of the covariance, descending, from the singular values of the centred rows."""
    x = wide(x)
    singular = np.linalg.svd(x - x.mean(0), compute_uv=False)
    return np.pad(singular**2, (0, max(0, x.shape[1] - len(singular)))) / len(x)


def spectrum(x):
    """Keys of the covariance spectrum of the rows of ``x``, apart from the Gaussian baseline."""
    x = wide(x)
    values = variances(x)
    singular = np.sqrt(values)
    varying = x[:, x.std(0) > 1e-12 * np.abs(x).max()]
    standardized = variances((varying - varying.mean(0)) / varying.std(0))
    return {
        "anisotropy": values[0] / values.sum(),
        "participation_ratio": values.sum() ** 2 / (values**2).sum(),
        "anisotropy_standardized": standardized[0] / standardized.sum(),
        "effective_rank": entropy_rank(singular),
        # Garrido et al. 2023, equations 1 and 2, without their ε: of the rows as they are
        "rankme": entropy_rank(np.linalg.svd(x, compute_uv=False)),
        "effective_rank_eigenvalues": entropy_rank(values),
        "isoscore": isoscore(x),
        "top5_share": values[:5].sum() / values.sum(),
        "anisotropy_without_top5": values[5] / values[5:].sum() if len(values) > 5 else np.nan,
    }


def entropy_rank(values):
    """exp of the entropy of the shares."""
    return np.exp(-sum(p * np.log(p) for p in values / values.sum() if p > 0))


def isoscore(x):
    """Rudman et al. 2022, Algorithm 1, step by step (their n is the dimension)."""
    x = wide(x)
    n = x.shape[1]
    _, axes = np.linalg.eigh(np.cov(x.T))
    reoriented = (x - x.mean(0)) @ axes
    diagonal = np.diag(np.cov(reoriented.T))
    normalised = np.sqrt(n) * diagonal / np.linalg.norm(diagonal)
    defect = np.linalg.norm(normalised - np.ones(n)) / np.sqrt(2 * (n - np.sqrt(n)))
    fraction_used = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n**2
    return (n * fraction_used - 1) / (n - 1)


def all_distances(x):
    """Between all rows, from differences; infinite between a row and itself."""
    x = wide(x)
    distances = np.sqrt(((x[:, None] - x) ** 2).sum(-1))
    np.fill_diagonal(distances, np.inf)
    return distances


def twonn(distances, used=None):
    """Facco et al. 2017 from the distances to two neighbours or more, shape (n, 2 or more), in
    order, of so many small ratios (default: nine tenths).
    """
    mu = np.sort(distances[:, 1] / distances[:, 0])
    m = int(np.floor(0.9 * len(mu) + 1e-9)) if used is None else used
    if m < 2:
        return np.nan
    x, y = np.log(mu[:m]), -np.log1p(-np.arange(1, m + 1) / len(mu))
    return (x @ y) / (x @ x)


def labelled_dimensions(x, token_ids, sequence_ids, order):
    """Keys of IntrinsicDimension that need labels, of rows that are all distinct, one row after the
    other.
    """
    token_ids, sequence_ids, order = (np.asarray(each) for each in (token_ids, sequence_ids, order))
    distances = all_distances(x)
    same_type, same_sequence = (each[:, None] == each for each in (token_ids, sequence_ids))
    nearest = distances.argmin(1)
    others = len(x) - 1
    drawn = [
        min(np.flatnonzero(token_ids == t), key=lambda i: order[i])
        for t in sorted(set(token_ids.tolist()))
    ]
    between = np.sort(distances[np.ix_(drawn, drawn)])
    within = np.where(same_type & ~same_sequence, distances, np.inf)
    within = np.sort(within[same_type.sum(1) >= 8], axis=1)[:, :2]
    within = within[np.isfinite(within).all(1)]
    return {
        "same_type_neighbors": np.mean(token_ids[nearest] == token_ids),
        "same_type_neighbors_null": np.mean((same_type.sum(1) - 1) / others),
        "same_sequence_neighbors": np.mean(sequence_ids[nearest] == sequence_ids),
        "same_sequence_neighbors_null": np.mean((same_sequence.sum(1) - 1) / others),
        "intrinsic_dimension_between": twonn(between),
        "n_points_between": float(len(between)),
        "intrinsic_dimension_within": twonn(within),
        "n_points_within": float(len(within)),
    }
