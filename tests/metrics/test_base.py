"""The base of the metrics: what a subclass declares and refuses, and what torchmetrics and
Lightning make of it.
"""

import pytest
import skdim.id
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from embedgeo.metrics import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments
from tests.data import assert_values, token_rows, updated
from tests.training.runs import TinyLM, fit

DIM, N = 4, 120


def rows(seed=0):
    return token_rows(N, DIM, mean=100.0, seed=seed)


def test_another_metric_or_one_with_other_arguments_is_not_merged():
    for metric, other, message in (
        (EmbeddingMoments(DIM), EmbeddingMoments(DIM + 1), "can only merge .* with dim=4; got .*5"),
        (Anisotropy(DIM, batch_size=9), Anisotropy(DIM, batch_size=8), r"got \[8\] for \[9\]"),
        (EmbeddingMoments(DIM), Anisotropy(DIM), "got a Anisotropy with dim=4"),
        (EmbeddingMoments(DIM), {"n": torch.tensor(1.0)}, "the same arguments; these states"),
        (TokenMoments(DIM), TokenMoments(DIM, count_range=(1, 5)), "the same arguments"),
        (Anisotropy(DIM, batch_size=5), Anisotropy(DIM), "the same arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            metric.merge_state(other)
    with pytest.raises(TypeError, match="a metric or its state; got 2"):
        EmbeddingMoments(DIM).merge_state(2)


def test_a_failure_within_the_context_leaves_the_states_of_this_rank(tmp_path):
    metric = updated(Anisotropy(DIM), rows()[0])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with (
            pytest.raises(RuntimeError, match="inside"),
            metric.sync_context(distributed_available=lambda: True),
        ):
            raise RuntimeError("inside")
        with metric.sync_context(distributed_available=lambda: True):
            assert metric.num_rows == N
            with (
                pytest.raises(TorchMetricsUserError, match="already been synced"),
                metric.sync_context(distributed_available=lambda: True),
            ):
                pass
    finally:
        dist.destroy_process_group()


OTHERS = {
    Anisotropy: {"spectrum": True, "batch_size": 7},
    IntrinsicDimension: {
        "batch_size": 20,
        "num_batches": 2,
        "estimator": skdim.id.lPCA(),
        "discard_fraction": 0.5,
        "seed": 100_000,
        "neighbors": "other_sequences",
    },
    TokenMoments: {"count_range": (2, 9), "regression_count_range": (2, 1000)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_collection_keeps_metrics_apart_that_differ_in_an_argument(kind):
    x, ids = token_rows(N, DIM)
    parts = [slice(0, 3), slice(3, 50), slice(50, N)]  # after the first their states are equal
    alone = {"default": kind(DIM)}
    alone |= {name: kind(DIM, **{name: value}) for name, value in OTHERS[kind].items()}
    together = MetricCollection({name: metric.clone() for name, metric in alone.items()})
    for part in parts:
        together.update(x[part], token_ids=ids[part])
        together["default"].half()
    for name, metric in alone.items():
        assert_values(together[name].compute(), updated(metric, x, ids, parts).compute(), rtol=0)


class Logs(TinyLM):
    """Logs two values of one metric, as the documentation says."""

    def __init__(self):
        super().__init__()
        self.moments = TokenMoments(DIM)
        self.share, self.size = self.moments["V_W_over_V_unbiased"], self.moments["Q"]

    def training_step(self, batch, _):
        x, ids = batch
        self.moments.update(x, token_ids=ids)
        self.log("share", self.share, on_step=False, on_epoch=True)
        self.log("size", self.size, on_step=False, on_epoch=True)
        return next(self.parameters()).sum()


def test_lightning_logs_the_values_of_a_metric_by_their_keys(tmp_path):
    x, ids = token_rows(N, DIM)
    data = DataLoader(list(zip(x, ids, strict=True)), batch_size=30)
    _, run = fit(tmp_path, module=Logs(), data=data, max_epochs=2)
    assert " Q(" in str(Logs())
    expected = updated(TokenMoments(DIM), x, ids).compute()
    names = {"V_W_over_V_unbiased": "share", "Q": "size"}
    logged = {key: run.callback_metrics[name] for key, name in names.items()}
    assert_values(logged, {key: expected[key] for key in logged}, rtol=1e-6)
