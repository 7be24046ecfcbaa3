"""What a metric computes by the last part of docs/definitions.md, from formulas of their own, and
what other packages do.
"""

import numpy as np
import pytest
import torch

from embedgeo import observe
from embedgeo.functional import power_law
from embedgeo.metrics import Anisotropy, EmbeddingMoments, TokenMoments
from tests import references
from tests.data import spectral, token_rows, updated
from tests.models import gpt_neox, token_batch

X = 2 + spectral(403, [9, 4, 3, 2, 1, 1, 0.5, 0.1])
N, DIM = X.shape
WIDE = 0.1 + spectral(500, [i**-0.9 for i in range(1, 151)])


def assert_equal(*pairs):
    for value, expected in pairs:
        assert float(value) == pytest.approx(float(expected), rel=1e-9)


def spectrum(x, **options):
    return updated(Anisotropy(x.shape[1], spectrum=True, **options), x).compute()


def entropy_rank(values):
    share = values[values > 1e-12 * values.max()] / values.sum()
    return np.exp(-(share * np.log(share)).sum())


def test_spectra():
    values, variances = spectrum(X), references.variances(X)
    both = spectrum(torch.cat((X, -X)))  # of which the mean is zero
    squares = np.linalg.svd(X.numpy(), compute_uv=False) ** 2
    of_batches = [references.variances(batch) for batch in X[:400].split(100)]
    assert_equal(
        (values["anisotropy"], variances[0] / variances.sum()),
        (values["top1_share"], variances[0] / variances.sum()),
        (both["anisotropy"], squares[0] / squares.sum()),
        (values["effective_rank"], entropy_rank(np.sqrt(variances))),
        (values["effective_rank_eigenvalues"], entropy_rank(variances)),
        (values["rankme"], entropy_rank(np.sqrt(squares))),
        (values["isoscore"], references.isoscore(X)),
        (
            spectrum(X, batch_size=100)["anisotropy_batch_mean"],
            np.mean([each[0] / each.sum() for each in of_batches]),
        ),
    )
    wide = spectrum(WIDE)
    assert_equal(
        (wide["rankme"], references.rankme(WIDE)),
        *((wide[key], value) for key, value in references.alpha_req(WIDE, (11, 99)).items()),
        (
            power_law(updated(Anisotropy(WIDE.shape[1]), WIDE).eigenvalues(), (11, 100))[0],
            references.alpha_req(WIDE, (11, 100))["alpha_req"],
        ),
    )
    # with the ε of the paper it is a little more
    assert 1e-5 < references.rankme(WIDE, 1e-7) / wide["rankme"] - 1 < 1e-3


def test_variance_within_tokens():
    """Every row is a sequence of its own here."""
    rows, ids = token_rows(600, 5)
    is_repeated = torch.from_numpy(references.in_count_range(ids, (2, 600)))
    rows, ids = rows[is_repeated], ids[is_repeated]
    types = [rows[ids == token_id].numpy() for token_id in ids.unique()]

    def squares(of_types):
        return np.array([((each - each.mean(0)) ** 2).sum() for each in of_types])

    counts = np.array([len(each) for each in types])
    values = updated(TokenMoments(5), rows, ids).compute()
    pooled = values["V_W"] * values["n"] / (values["n"] - values["token_types"])
    kept = [each for each in types if 10 <= len(each) <= 100_000]
    whole = np.concatenate(kept)
    in_range = updated(TokenMoments(5, count_range=(10, 100_000)), rows, ids).compute()
    assert_equal(
        (values["V_W"], squares(types).sum() / len(rows)),
        (pooled, squares(types).sum() / (counts - 1).sum()),  # the analysis of variance's
        (
            values["V_W_unbiased"],
            (counts * squares(types) / (counts - 1)).sum() / counts.sum(),
        ),
        (in_range["Q"], (whole**2).sum(1).mean()),
        (in_range["M"], (whole.mean(0) ** 2).sum()),
        (in_range["V_W"], squares(kept).sum() / len(whole)),
    )


def test_layers_are_the_hidden_states_of_transformers_but_for_the_last_block():
    torch.manual_seed(0)
    model, batch = gpt_neox().eval(), token_batch()
    with observe(model, metrics=lambda dim: [EmbeddingMoments(dim)]) as geometry, torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    kept = batch["attention_mask"].bool()
    ours = {layer: values["Q"] for layer, values in geometry.compute().items()}
    for layer, state in zip(["embed", "block.00", "block.01", "final_norm"], states, strict=True):
        assert_equal((ours[layer], state[kept].double().square().sum(1).mean()))
    assert abs(ours["block.02"] / ours["final_norm"] - 1) > 1e-4
