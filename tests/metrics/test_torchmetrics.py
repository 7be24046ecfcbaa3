"""How the metrics get on with what torchmetrics and Lightning build from metrics."""

import inspect

import lightning
import pytest
import skdim.id
import torch
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from embedgeo.metrics import (
    AfterProcessing,
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    NextTokenGeometry,
    TokenMoments,
    TokenSimilarity,
)
from tests.data import assert_values, token_rows, updated

DIM, N = 4, 120
OTHERS = {
    AfterProcessing: {"top": 1, "sample_size": 100, "seed": 1},
    Anisotropy: {"spectrum": True, "batch_size": 7, "sketch": 8, "alpha_window": (2, 9)},
    EmbeddingMoments: {},
    IntrinsicDimension: {
        "batch_size": 20,
        "num_batches": 2,
        "estimator": skdim.id.lPCA(),
        "discard_fraction": 0.5,
        "duplicate_tolerance": 0.1,
        "seed": 100_000,
        "scales": (1, 2),
        "method": "mle",
    },
    TokenMoments: {"count_range": (2, 9), "regression_count_range": (2, 1000), "labels": "next"},
    NextTokenGeometry: {"min_count": 2, "max_types": 3},
    TokenSimilarity: {},
}
PAIRS = [(kind, {name: value}) for kind, others in OTHERS.items() for name, value in others.items()]


@pytest.mark.parametrize("kind", OTHERS)
def test_every_argument_is_tried(kind):
    assert inspect.signature(kind).parameters.keys() - {"dim", "kwargs"} == OTHERS[kind].keys()


@pytest.mark.parametrize(
    ("kind", "other"), PAIRS, ids=[f"{kind.__name__}-{next(iter(other))}" for kind, other in PAIRS]
)
def test_a_collection_keeps_metrics_apart_that_differ_in_an_argument(kind, other):
    x, ids = token_rows(N, DIM)
    arguments = {"seed": 100_001} if "seed" in other else {}
    alone = {"one": kind(DIM, **arguments), "two": kind(DIM, **other)}
    together = MetricCollection({name: metric.clone() for name, metric in alone.items()})
    for part in (slice(0, 3), slice(3, 50), slice(50, N)):  # after the first rows their states are equal
        together.update(x[part], token_ids=ids[part])
        together["one"].half()
    for name, metric in alone.items():
        updated(metric, x, ids, [slice(0, 3), slice(3, 50), slice(50, N)])
        assert_values(together[name].compute(), metric.compute(), rtol=0)


def test_a_collection_may_merge_equal_metrics():
    together = MetricCollection({"one": Anisotropy(DIM, spectrum=True), "two": Anisotropy(DIM, spectrum=True)})
    together.update(token_rows(N, DIM)[0])
    assert len(together.compute_groups) == 1


@pytest.mark.parametrize("kind", OTHERS)
def test_a_way_to_gather_states_is_refused(kind):
    with pytest.raises(ValueError, match=r"dist_sync_fn must be left out.*process_group"):
        kind(DIM, dist_sync_fn=lambda state, group: [state])


class Logs(lightning.LightningModule):
    """Logs two values of one metric, as the documentation says."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(DIM, DIM)
        self.moments = TokenMoments(DIM)
        self.share, self.size = self.moments["V_W_over_V_unbiased"], self.moments["Q"]

    def training_step(self, batch, _):
        x, ids = batch
        self.moments.update(x, token_ids=ids)
        self.log("share", self.share, on_step=False, on_epoch=True)
        self.log("size", self.size, on_step=False, on_epoch=True)
        return self.layer(x.float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_lightning_logs_the_values_of_a_metric_by_their_keys(tmp_path):
    x, ids = token_rows(N, DIM)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Logs(), DataLoader(list(zip(x, ids, strict=True)), batch_size=30))
    expected = updated(TokenMoments(DIM), x, ids).compute()
    logged = {"V_W_over_V_unbiased": trainer.callback_metrics["share"], "Q": trainer.callback_metrics["size"]}
    assert_values(logged, {key: expected[key] for key in logged}, rtol=1e-6)
