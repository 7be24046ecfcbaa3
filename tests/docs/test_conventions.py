"""What a metric computes by the last part of docs/definitions.md, from formulas of their own, and
what other packages do.
"""

import numpy as np
import pytest
import torch

from embedgeo import observe
from embedgeo.metrics import EmbeddingMoments, TokenMoments
from tests import references
from tests.data import token_rows, updated
from tests.models import gpt_neox, token_batch


def assert_equal(*pairs):
    for value, expected in pairs:
        assert float(value) == pytest.approx(float(expected), rel=1e-9)


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
