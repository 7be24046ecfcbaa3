"""What a sweep writes, against the hidden states of the models: values, tables, samples, losses."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import embedgeo
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import SCHEMA, TABLES
from tests.files import events_of
from tests.sweep.tiny import TEXT, model, tokenize_sequences, tokenizer_files, tokenizer_of

STEPS = {"step0": 0, "step2": 2, "step8": 8, "step9": 8}
"""Whose weights each checkpoint has."""


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(tokenizer_files())


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenize_sequences(["\n".join(TEXT * 8)], tokenizer, seq_len=16, num_tokens=512)


@pytest.fixture(scope="module")
def hidden(ids):
    """Hidden states at block.00 of step 2, shape (sequences, positions, 16)."""
    with torch.no_grad():
        return model(2)(ids, output_hidden_states=True).hidden_states[1].double()


def records_of(swept, name="step2"):
    return SweepFolder(swept).read(name).set_index(["layer", "metric"])


def test_values_and_their_errors_are_those_of_observe(swept, ids):
    make = partial(
        embedgeo.default_metrics,
        spectrum=True,
    )
    made, losses = model(2), []
    with torch.no_grad(), embedgeo.observe(made, metrics=make, jackknife=4) as geometry:
        for batch in ids.split(8):
            losses.append(made(batch, labels=batch).loss.item())
    expected = geometry.to_frame().set_index(["layer", "metric"])[["value", "stderr"]]
    for kind, table in geometry.layer_tables().items():
        written = pd.read_parquet(swept / kind / "step2.parquet")
        pd.testing.assert_frame_equal(written, table[[*written]], rtol=1e-6, atol=1e-9)
    found = records_of(swept)
    np.testing.assert_allclose(
        found.loc[expected.index, ["value", "stderr"]], expected, rtol=1e-9, atol=1e-12
    )
    others = {metric for _, metric in found.index.difference(expected.index)}
    assert all(metric.startswith(("l", "unseen")) or "_to_" in metric for metric in others)
    assert found.loc[("model", "loss"), "value"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert list(found.reset_index().columns.sort_values()) == sorted(SCHEMA.names)


def test_token_tables_are_of_each_types_rows(swept, ids, hidden, tokenizer):
    table = pd.read_parquet(swept / "tokens" / "step2.parquet")
    assert list(table) == TABLES["tokens"].names
    assert list(table["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
    table = table[table["layer"] == "block.00"]
    assert table["token_id"].tolist() == ids.unique().tolist()
    for row in table.itertuples():
        assert row.token == tokenizer.decode([row.token_id])
        x = hidden[ids == row.token_id]
        moments = [x.square().sum(1).mean(), x.mean(0).square().sum(), x.var(0, correction=0).sum()]
        np.testing.assert_allclose([row.Q, row.M, row.V], moments, rtol=1e-5, atol=1e-9)
        assert (row.n, row.num_tokens) == (len(x), 1)


def test_metrics_csv_and_tensorboard_follow_from_the_parquet_files(swept):
    table = pd.read_csv(swept / "metrics.csv")
    parts = [
        pd.read_parquet(swept / kind / f"{name}.parquet")
        for kind, names in (("checkpoints", STEPS), ("drift", [*STEPS][1:]))
        for name in names
    ]
    keys = ["revision", "layer", "metric"]
    joined = pd.concat(parts, ignore_index=True).set_index(keys).sort_index()
    written = table.set_index(keys).sort_index()
    # as far as pandas 2 reads
    for column in ("value", "stderr", "step"):
        np.testing.assert_allclose(written[column], joined[column], rtol=1e-11)
    # what TensorBoard calls the run
    (run,) = (swept / "tensorboard").iterdir()
    events = events_of(run)
    for tag in ("Q/embed", "anisotropy/block.00", "Q/mean", "loss/model"):
        steps = [event.step for event in events.Scalars(f"geometry.{tag}")]
        assert steps == [0, 2, 8, 9]
    blocks = written.xs("Q", level="metric").query("step == 9 and layer.str.startswith('block.')")
    mean = events.Scalars("geometry.Q/mean")[-1].value
    assert mean == pytest.approx(blocks["value"].mean())
