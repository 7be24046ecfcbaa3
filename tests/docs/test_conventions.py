"""Both definitions of every line of the last table of docs/definitions.md, from formulas of their
own.
"""

import math

import numpy as np
import pytest
import skdim
import torch
from scipy import linalg

from embedgeo import observe
from embedgeo.functional import (
    biased_cka,
    debiased_cka,
    linearity,
    procrustes_distance,
    row_scatter,
    spectrum_values,
    two_nearest_distances,
)
from embedgeo.metrics import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments
from tests import references
from tests.data import gaussian, spectral, token_rows, updated
from tests.docs.page import CONVENTIONS
from tests.models import gpt_neox, token_batch

X = 2 + spectral(403, [9, 4, 3, 2, 1, 1, 0.5, 0.1])
N, DIM = X.shape
WIDE = 0.1 + spectral(500, [i**-0.9 for i in range(1, 151)])
_ROWS, _IDS = token_rows(600, 5)
REPEATED = torch.from_numpy(references.in_count_range(_IDS, (2, 600)))
TOKEN_ROWS, TOKEN_IDS = _ROWS[REPEATED], _IDS[REPEATED]
"""Every token type has two rows or more."""


def equal(value, expected):
    assert float(value) == pytest.approx(float(expected), rel=1e-9)


def differ(value, other):
    assert abs(float(value) / float(other) - 1) > 1e-4


def spectrum(x, **options):
    return updated(Anisotropy(x.shape[1], spectrum=True, **options), x).compute()


def tokens(**options):
    return updated(TokenMoments(5, **options), TOKEN_ROWS, TOKEN_IDS).compute()


def dimension(x, **options):
    return updated(IntrinsicDimension(x.shape[1], **options), x).compute()["intrinsic_dimension"]


def ascending_log_mu(x):
    first, second = references.nearest(x, 2).T
    return np.sort(np.log(second / first))


def regression(log_mu, ranks, fitted):
    """Least squares through the origin of -log(1 - F) on log μ, over the smallest ratios."""
    x, y = log_mu[:fitted], -np.log(1 - ranks[:fitted])
    return (x * y).sum() / (x * x).sum()


def entropy_rank(values):
    share = values[values > 1e-12 * values.max()] / values.sum()
    return np.exp(-(share * np.log(share)).sum())


def ratios_fitted():
    log_mu, ranks = ascending_log_mu(X), np.arange(1, N + 1) / N
    lowest_fifth = regression(log_mu, ranks, N // 5)
    equal(dimension(X), regression(log_mu, ranks, math.floor(0.9 * N)))
    equal(dimension(X, discard_fraction=0.8), lowest_fifth)
    differ(dimension(X), lowest_fifth)
    log_mu, ranks = ascending_log_mu(X[:400]), np.arange(1, 401) / 400
    equal(dimension(X[:400], discard_fraction=0.8), regression(log_mu, ranks, 400 // 5))
    one_fewer = skdim.id.TwoNN(discard_fraction=0.8).fit(X[:400].numpy()).dimension_
    equal(regression(log_mu, ranks, 400 // 5 - 1), one_fewer)
    differ(dimension(X[:400], discard_fraction=0.8), one_fewer)


def ranks():
    log_mu, fitted = ascending_log_mu(X), math.floor(0.9 * N)
    equal(dimension(X), regression(log_mu, np.arange(1, N + 1) / N, fitted))
    equal(dimension(X), skdim.id.TwoNN().fit(X.numpy()).dimension_)
    first, second = two_nearest_distances(X).unbind(1)
    from_zero = regression((second / first).log().sort().values.numpy(), np.arange(N) / N, fitted)
    equal(from_zero, regression(log_mu, np.arange(N) / N, fitted))
    differ(dimension(X), from_zero)


def maximum_likelihood():
    likelihood = dimension(X, method="mle")
    equal(likelihood, (N - 1) / ascending_log_mu(X).sum())
    differ(dimension(X), likelihood)


def batches():
    shares = [
        references.variances(batch)[0] / references.variances(batch).sum()
        for batch in X[:400].split(100)
    ]
    equal(spectrum(X, batch_size=100)["anisotropy_batch_mean"], np.mean(shares))
    differ(spectrum(X)["anisotropy"], np.mean(shares))
    metric = updated(IntrinsicDimension(DIM, batch_size=100, num_batches=4), X)
    drawn = metric.rows[metric.keys.argsort()].double().split(100)
    fits = [regression(ascending_log_mu(batch), np.arange(1, 101) / 100, 90) for batch in drawn]
    equal(metric.compute()["intrinsic_dimension"], np.mean(fits))
    differ(dimension(X, batch_size=100), np.mean(fits))


def centring():
    squares = np.linalg.svd(X.numpy(), compute_uv=False) ** 2
    centred = np.linalg.svd((X - X.mean(0)).numpy(), compute_uv=False) ** 2
    equal(spectrum(X)["anisotropy"], centred[0] / centred.sum())
    equal(spectrum(torch.cat((X, -X)))["anisotropy"], squares[0] / squares.sum())
    differ(centred[0] / centred.sum(), squares[0] / squares.sum())


def stable_rank():
    variances = references.variances(X)
    centred = (X - X.mean(0)).numpy()
    equal(1 / spectrum(X)["anisotropy"], np.sum(variances / variances[0]))
    equal(
        1 / spectrum(X)["anisotropy"],
        np.linalg.norm(centred) ** 2 / np.linalg.norm(centred, 2) ** 2,
    )
    equal(spectrum(X)["top1_share"], variances[0] / variances.sum())


def effective_rank():
    variances = references.variances(X)
    equal(spectrum(X)["effective_rank"], entropy_rank(np.sqrt(variances)))
    equal(spectrum(X)["effective_rank_eigenvalues"], entropy_rank(variances))
    differ(entropy_rank(variances), entropy_rank(np.sqrt(variances)))


def rankme():
    singular = np.linalg.svd(X.numpy(), compute_uv=False)
    equal(spectrum(X)["rankme"], entropy_rank(singular))
    equal(spectrum(torch.cat((X, -X)))["effective_rank"], entropy_rank(singular))
    differ(spectrum(X)["effective_rank"], entropy_rank(singular))


def rankme_epsilon():
    s = torch.linalg.svdvals(WIDE)
    p = s / s.sum() + 1e-7
    published = torch.exp(-(p * p.log()).sum())
    equal(published, references.rankme(WIDE, 1e-7))
    equal(spectrum(WIDE)["rankme"], references.rankme(WIDE))
    assert 1e-5 < published / spectrum(WIDE)["rankme"] - 1 < 1e-3


def alpha_window():
    longer = references.alpha_req(WIDE, (11, 100))["alpha_req"]
    equal(spectrum(WIDE)["alpha_req"], references.alpha_req(WIDE, (11, 99))["alpha_req"])
    equal(spectrum(WIDE, alpha_window=(11, 100))["alpha_req"], longer)
    differ(spectrum(WIDE)["alpha_req"], longer)


def alpha_r2():
    metric = updated(Anisotropy(WIDE.shape[1], spectrum=True), WIDE)
    i, values = torch.arange(11, 100).double(), metric.compute()
    residual = metric.eigenvalues()[10:99].log() + values["alpha_req"] * i.log()
    residual -= (residual / i).sum() / (1 / i).sum()
    logarithms, x = np.log(references.variances(WIDE)[10:99]), -np.log(np.arange(11, 100))
    unweighted = 1 - residual.square().mean() / logarithms.var()
    fit = np.polyval(np.polyfit(x, logarithms, 1, w=np.exp(x / 2)), x)
    equal(unweighted, 1 - np.square(logarithms - fit).mean() / logarithms.var())
    equal(values["alpha_req_r2"], references.alpha_req(WIDE)["alpha_req_r2"])
    differ(values["alpha_req_r2"], unweighted)


def isoscore():
    values = spectrum(X)
    equal(values["isoscore"], references.isoscore(X))
    equal(values["isoscore"], (values["participation_ratio"] - 1) / (DIM - 1))


def shrunk_isoscore():
    shrinkage, target = 0.3, torch.diag(torch.arange(1.0, DIM + 1, dtype=torch.float64))
    covariance = (1 - shrinkage) * np.cov(X.T) + shrinkage * target.numpy()
    values = np.linalg.svd(covariance, compute_uv=False)
    defect = np.linalg.norm(np.sqrt(DIM) * values / np.linalg.norm(values) - 1) / np.sqrt(
        2 * (DIM - np.sqrt(DIM))
    )
    expected = ((DIM - defect**2 * (DIM - np.sqrt(DIM))) ** 2 - DIM) / (DIM * (DIM - 1))
    s = row_scatter(X)
    shrunk = s._replace(scatter=(1 - shrinkage) * s.scatter + shrinkage * (s.n - 1) * target)
    equal(spectrum_values(shrunk, full=True)["isoscore"], expected)
    differ(spectrum(X)["isoscore"], expected)


def sample_variance():
    V = updated(EmbeddingMoments(DIM), X).compute()["V"]
    equal(V, np.var(X.numpy(), axis=0).sum())
    equal(V * N / (N - 1), np.var(X.numpy(), axis=0, ddof=1).sum())


def rows_of_types():
    return [TOKEN_ROWS[t == TOKEN_IDS].numpy() for t in TOKEN_IDS.unique()]


def plug_in():
    plugged_in = sum(((rows - rows.mean(0)) ** 2).sum() for rows in rows_of_types()) / len(
        TOKEN_ROWS
    )
    values = tokens()
    equal(values["V_W"], plugged_in)
    differ(values["V_W_unbiased"], plugged_in)


def analysis_of_variance():
    """Every row is a sequence of its own here."""
    squares = [((rows - rows.mean(0)) ** 2).sum() for rows in rows_of_types()]
    counts = [len(rows) for rows in rows_of_types()]
    values = tokens()
    pooled = values["V_W"] * values["n"] / (values["n"] - values["token_types"])
    equal(pooled, sum(squares) / sum(count - 1 for count in counts))
    pairs = sum(
        count * square / (count - 1) for count, square in zip(counts, squares, strict=True)
    ) / sum(counts)
    equal(values["V_W_unbiased"], pairs)
    differ(pooled, pairs)


def independent_rows():
    return gaussian(1024, 512, seed=1), gaussian(1024, 512, seed=2)


def cka_bias():
    x, y = (each - each.mean(0) for each in independent_rows())
    expected = (x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    equal(biased_cka(x, y), expected)
    assert float(expected) == pytest.approx(0.33, abs=0.005)
    assert abs(float(debiased_cka(x, y))) < 0.01


def procrustes_power():
    x, y = (each.numpy() for each in (X, X**2))
    x, y = ((each - each.mean(0)) / np.linalg.norm(each - each.mean(0)) for each in (x, y))
    rotation, _ = linalg.orthogonal_procrustes(y, x)
    equal(procrustes_distance(X, X**2).sqrt(), np.linalg.norm(x - y @ rotation))


def linearity_score():
    lower, upper = X, X**2 + X[:, :1]
    x, y = ((each - each.mean(0)).numpy() for each in (lower, upper))
    expected = 1 - ((x @ np.linalg.lstsq(x, y)[0] - y) ** 2).sum() / (y**2).sum()
    equal(linearity(lower, upper, adjusted=False), expected)
    equal(linearity(lower, upper), 1 - (1 - expected) * (N - 1) / (N - 1 - DIM))
    x, y = independent_rows()
    assert float(linearity(x[:, :256], y[:, :8], adjusted=False)) == pytest.approx(0.25, abs=0.02)
    assert float(linearity(x[:, :256], y[:, :8])) == pytest.approx(0, abs=0.02)


def pairs_of_rows():
    units = (X / X.norm(dim=1, keepdim=True)).numpy()
    cosines = units @ units.T
    mean_cosine = updated(EmbeddingMoments(DIM), X).compute()["mean_cosine"]
    equal(mean_cosine, cosines[~np.eye(N, dtype=bool)].mean())
    equal(((N - 1) * mean_cosine + 1) / N, cosines.mean())
    differ(mean_cosine, cosines.mean())


def types_counted():
    kept = [rows for rows in rows_of_types() if 10 <= len(rows) <= 100_000]
    rows = np.concatenate(kept)
    within = sum(((each - each.mean(0)) ** 2).sum() for each in kept) / len(rows)
    values = tokens(count_range=(10, 100_000))
    equal(values["Q"], (rows**2).sum(1).mean())
    equal(values["M"], (rows.mean(0) ** 2).sum())
    equal(values["V_W_over_V"], within / ((rows - rows.mean(0)) ** 2).sum(1).mean())
    differ(tokens()["Q"], values["Q"])


def types_by_string():
    strings = ["the", "Ġthe", "cat", "Ġcat", "##cat"]
    token_ids = torch.arange(len(X)) % len(strings)
    names = [string.removeprefix("##").removeprefix("Ġ") for string in strings]
    stem = torch.tensor([names.index(name) for name in names])
    rows_by_name = [X[[names[i] == name for i in token_ids]].numpy() for name in sorted(set(names))]
    within = sum(((rows - rows.mean(0)) ** 2).sum() for rows in rows_by_name) / N
    values = updated(TokenMoments(DIM), X, stem[token_ids]).compute()
    assert values["token_types"] == 2
    equal(values["V_W"], within)
    differ(updated(TokenMoments(DIM), X, token_ids).compute()["V_W"], within)


def layer_numbers():
    torch.manual_seed(0)
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model, metrics=lambda dim: [EmbeddingMoments(dim)]) as geometry, torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    kept = batch["attention_mask"].bool()
    expected = [float(state[kept].double().square().sum(1).mean()) for state in states]
    ours = {layer: values["Q"] for layer, values in geometry.compute().items()}
    assert list(ours) == ["embed", "block.00", "block.01", "block.02", "final_norm"]
    for layer, value in zip(["embed", "block.00", "block.01", "final_norm"], expected, strict=True):
        equal(ours[layer], value)
    differ(ours["block.02"], expected[-1])


LINES = {
    "TwoNN: ratios fitted": ratios_fitted,
    "TwoNN: ranks": ranks,
    "TwoNN: maximum likelihood": maximum_likelihood,
    "batches": batches,
    "anisotropy: centring": centring,
    "stable rank, NESum": stable_rank,
    "effective rank: of what": effective_rank,
    "RankMe": rankme,
    "RankMe: ε": rankme_epsilon,
    "α-ReQ: window": alpha_window,
    "α-ReQ: R²": alpha_r2,
    "IsoScore": isoscore,
    "IsoScore*": shrunk_isoscore,
    "variance": sample_variance,
    "variance within tokens: plug-in": plug_in,
    "variance within tokens: analysis of variance": analysis_of_variance,
    "CKA: bias": cka_bias,
    "Procrustes distance: power": procrustes_power,
    "linearity score": linearity_score,
    "mean cosine: pairs": pairs_of_rows,
    "token types: which": types_counted,
    "token types: what is one": types_by_string,
    "layer numbers": layer_numbers,
}


def test_every_line_has_a_test():
    assert list(LINES) == CONVENTIONS


@pytest.mark.parametrize("line", LINES)
def test_both_definitions(line):
    LINES[line]()
