"""Embedding matrices, against what was put into them."""

import pandas as pd
import pytest
import torch

from research import vocabulary
from tests.sweep.tiny import local_run


def test_copies_untrained_rows_and_the_spread_of_norms_are_found():
    x = 1 + torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    x[100:200] = x[:100] * (1 + 1e-7)
    x[3, 0] = torch.nan
    expected = torch.arange(4000)
    expected[100:200] = torch.arange(100)
    expected[103] = 103
    assert vocabulary.first_copies(x).equal(expected)
    x = x[200:]
    found, norms = vocabulary.about_centroid(x)
    assert norms.equal((x.double() - x.double().mean(0)).norm(dim=1))
    lengths = x.double().norm(dim=1)
    spread = float(lengths.std() / lengths.mean())
    assert found["norm_cv_gaussian"] == pytest.approx(spread, rel=0.03)
    unused = torch.tensor([5, 6, 7, 8])
    assert vocabulary.untrained_rows(x, unused) is None
    x[:9] *= 0.01
    assert vocabulary.untrained_rows(x, unused).nonzero().flatten().tolist() == [*range(9)]


@pytest.mark.slow
def test_the_checkpoints_of_a_run_have_tables_and_named_rows(tmp_path):
    model = str(local_run(tmp_path / "run", (0, 8)))
    vocabulary.main(["--model", model, "--out", str(tmp_path / "out")])
    table = pd.read_parquet(tmp_path / "out" / "step8.parquet").set_index("metric")
    assert (table.loc["n", ["input_embedding", "output_embedding"]] == 300).all()
    rows = pd.read_csv(tmp_path / "out" / "step8-rows.csv", keep_default_na=False)
    assert (rows["layer"].value_counts() >= 6).all()
