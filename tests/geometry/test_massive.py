"""``skip_massive=``: rows far beyond the median norm of their forward pass are left out, layer by
layer.
"""

import numpy as np
import pytest
import torch

from embedgeo import observe
from embedgeo.training.transformers import GeometryCallback
from tests.models import gpt_neox, token_batch
from tests.training.runs import observed_on

LAYERS = ["embed", "block.00", "block.01", "final_norm"]
TIMES = 1.1


def built(infinite=()):
    """A model of whose hidden states few rows, others at each layer, are massive."""
    torch.manual_seed(0)
    model = gpt_neox().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[3:6] *= 20
        model.get_input_embeddings().weight[[*infinite]] = torch.inf
    return model


def batch():
    given = token_batch(12, 12)
    given["attention_mask"][::3, :2] = 0
    return given


def hidden_rows(model, given):
    """The hidden states of a forward pass by layer, float64."""
    with torch.no_grad():
        states = model(**given, output_hidden_states=True).hidden_states
    return {name: each.double() for name, each in zip(LAYERS, states, strict=True)}


def counted(hidden, given, times):
    """Marks of the rows that count, by a loop over all of them."""
    marks = given["attention_mask"].bool().clone()
    marks &= torch.isfinite(hidden).all(-1)
    norms = sorted(float(row.norm()) for row in hidden[marks])
    median = norms[(len(norms) - 1) // 2]
    for i, j in marks.nonzero().tolist():
        if len(norms) >= 100 and float(hidden[i, j].norm()) > times * median:
            marks[i, j] = False
    return marks


@pytest.mark.parametrize("times", [True, TIMES])
@pytest.mark.parametrize("jackknife", [0, 4])
def test_values_are_those_of_the_rows_that_are_left(jackknife, times):
    model, given = built(), batch()
    hidden, options = hidden_rows(model, given), {"jackknife": jackknife}
    geometry = observed_on(model, [given], layers=LAYERS, skip_massive=times, **options)
    found = geometry.to_frame().set_index(["layer", "metric"])
    counts = set()
    for layer in LAYERS:
        mask = counted(hidden[layer], given, 4 if times is True else times)
        alone = observed_on(model, [given], layers=layer, mask=mask, **options)
        expected = alone.to_frame().set_index("metric")
        values = found.loc[layer]
        counts.add(values["value"]["n"])
        left_out = int(given["attention_mask"].sum() - mask.sum())
        assert (values["value"]["n"], values["value"]["n_massive"]) == (int(mask.sum()), left_out)
        # of which one row a type is drawn, by its number
        exact = expected.index[~expected.index.str.contains("massive|intrinsic_dimension")]
        for column in ("value", "stderr"):
            found_here, wanted = (table.loc[exact, column] for table in (values, expected))
            np.testing.assert_allclose(found_here, wanted, 1e-6, 1e-9)
        key = "intrinsic_dimension"  # of all rows
        assert values["value"][key] == pytest.approx(expected["value"][key], rel=1e-5)
    assert len(counts) > 1


def test_rows_that_are_not_finite_are_counted_apart():
    model, given = built(infinite=[7]), batch()
    geometry = observed_on(model, [given], layers="embed", skip_massive=True)
    values, ids = geometry.compute()["embed"], given["input_ids"][given["attention_mask"].bool()]
    assert values["n_nonfinite"] == int((ids == 7).sum()) > 0
    assert values["n_massive"] == int(torch.isin(ids, torch.tensor([3, 4, 5])).sum()) > 0
    assert values["n"] == len(ids) - values["n_nonfinite"] - values["n_massive"]


def test_all_layers_draw_from_the_same_rows_and_keep_their_numbers():
    model, given = built(), batch()
    marks = given["attention_mask"].bool()
    hidden = hidden_rows(model, given)
    geometry = observed_on(model, [given], layers=LAYERS, skip_massive=TIMES)
    for layer, sample in geometry.samples().items():
        kept = counted(hidden[layer], given, TIMES)[marks]
        numbers = sample.row_numbers
        assert set(numbers.tolist()) == set(kept.nonzero().flatten().tolist()), layer
        torch.testing.assert_close(sample.rows, hidden[layer][marks][numbers].to(sample.rows.dtype))


@pytest.mark.parametrize("wrong", [1, 0.5, -4.0, float("nan"), float("inf"), "4", None])
def test_other_numbers_are_refused(wrong):
    for start in (
        lambda: observe(built(), skip_massive=wrong).__enter__(),
        lambda: GeometryCallback(skip_massive=wrong),
    ):
        with pytest.raises(ValueError, match="massive must be"):
            start()
