"""The base of the metrics: what a subclass declares and refuses, and what torchmetrics and
Lightning make of it.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import lightning
import pytest
import skdim.id
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from embedgeo.functional import Moments, row_moments
from embedgeo.metrics import (
    AfterProcessing,
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    NextTokenGeometry,
    TokenMoments,
    TokenSimilarity,
)
from embedgeo.metrics.base import GeometryMetric
from tests.data import assert_values, gaussian, token_rows, updated
from tests.metrics.other_torchmetrics import values_on

DIM, N = 4, 120


def rows(seed=0):
    return token_rows(N, DIM, mean=100.0, seed=seed)


def test_batches_that_are_pending_are_merged():
    x = gaussian(20, DIM)
    metrics_ = [updated(Anisotropy(DIM, batch_size=5), part) for part in (x[:8], x[8:])]
    metrics_[0].merge_state(metrics_[1])
    reordered = torch.cat((x[:5], x[8:18], x[5:8], x[18:]))
    assert_values(
        metrics_[0].compute(),
        updated(Anisotropy(DIM, batch_size=5), reordered).compute(),
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            EmbeddingMoments(DIM + 1),
            "can only merge a EmbeddingMoments with dim=4; got a EmbeddingMoments with dim=5",
        ),
        (Anisotropy(DIM), "got a Anisotropy with dim=4"),
        ({"n": torch.tensor(1.0)}, "the same arguments; these states differ"),
    ],
)
def test_another_metric_is_not_merged(other, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingMoments(DIM).merge_state(other)


def test_a_metric_with_other_arguments_is_not_merged():
    for metric, other in (
        (TokenMoments(DIM), TokenMoments(DIM, count_range=(1, 5))),
        (Anisotropy(DIM), Anisotropy(DIM, batch_size=5)),
    ):
        with pytest.raises(ValueError, match="the same arguments"):
            metric.merge_state(other)
        with pytest.raises(ValueError, match="the same arguments"):
            other.merge_state(metric)


def test_a_state_of_samples_from_before_the_sizes_of_batches_were_kept_is_merged():
    metric, other = (updated(IntrinsicDimension(DIM), rows(seed)[0]) for seed in (0, 1))
    saved = {name: state for name, state in other.metric_state.items() if name != "batches"}
    metric.merge_state(saved)
    whole = updated(IntrinsicDimension(DIM), rows(0)[0])
    whole.merge_state(other)
    assert_values(metric.compute(), whole.compute(), rtol=0)


class Largest(NamedTuple):
    """The largest coordinates of the rows: a state of the test's own, with a setting."""

    largest: Tensor
    unit: str

    def merge(self, other):
        return self._replace(largest=torch.maximum(self.largest, other.largest))

    def reductions(self, phase, found):
        return {"largest": self.largest} if phase == 0 else {}

    def of_ranks(self, found):
        return self._replace(largest=found["largest"])


class Range(GeometryMetric):
    """All that a new metric has to say."""

    def __init__(self, dim):
        super().__init__(dim)
        self.declare(Largest(torch.zeros(dim, dtype=torch.float64), "m"))
        self.declare(Moments.empty(dim), "moments_")

    def update_states(self, rows):
        self.extend(row_moments(rows.embeddings))
        held = self.load(Largest)
        for row in rows.embeddings:
            held = held.merge(held._replace(largest=row))
        self.store(held)

    def compute(self):
        largest = self.load(Largest)
        return {f"largest_{largest.unit}": largest.largest.max(), "n": self.load(Moments).n}


def test_a_metric_that_declares_states_and_updates_them_is_merged_cast_and_reset():
    x = rows()[0]
    metric, other = updated(Range(DIM), x[:50]), updated(Range(DIM), x[50:]).half()
    assert metric.metric_state.keys() == {
        "num_rows",
        "num_nonfinite",
        "settings",
        "largest",
        *(f"moments_{key}" for key in Moments._fields),
    }
    metric.merge_state(other)
    assert_values(metric.compute(), {"largest_m": x.max(), "n": float(N)}, rtol=0)
    assert metric.update_count == 2
    metric.reset()
    assert_values(updated(metric, x[:1]).compute(), {"largest_m": x[0].max(), "n": 1.0}, rtol=0)


def test_merging_clears_a_cached_value():
    x = rows()[0]
    metric = updated(Anisotropy(DIM, compute_with_cache=True), x[:50])
    before = metric.compute()["anisotropy"]
    metric.merge_state(updated(Anisotropy(DIM), x[50:]))
    assert metric.compute()["anisotropy"] != before


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, "4", None])
@pytest.mark.parametrize("kind", [EmbeddingMoments, TokenMoments, Anisotropy])
def test_a_wrong_dim_is_refused(kind, dim):
    with pytest.raises(ValueError, match="dim must be a positive integer"):
        kind(dim)


def renamed_torchmetrics(folder, *names):
    """A copy of torchmetrics in which these names are others everywhere."""
    source = Path(torchmetrics.__file__).parent
    shutil.copytree(source, folder / "torchmetrics", ignore=shutil.ignore_patterns("__pycache__"))
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in (folder / "torchmetrics").rglob("*.py"):
        path.write_text(pattern.sub(r"\1_of_another_version", path.read_text()))


def values_with_other_names(folder, *arguments):
    command = [sys.executable, "-m", "tests.metrics.other_torchmetrics", *arguments]
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


PRIVATE = [
    "_sync_dist",
    "_to_sync",
    "_should_unsync",
    "_is_synced",
    "_cache",
    "_filter_kwargs",
    "_defaults",
    "_device",
]


@pytest.mark.slow
def test_values_are_right_whatever_the_private_names_of_torchmetrics_are(tmp_path):
    renamed_torchmetrics(tmp_path, *PRIVATE)
    found = values_with_other_names(tmp_path)
    expected = values_on()
    for values in (found["one"], *found["ranks"]):
        assert values == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.slow
def test_states_gathered_one_by_one_are_refused_in_one_line(tmp_path):
    renamed_torchmetrics(tmp_path, "sync_context", "sync", "unsync")
    found = values_with_other_names(tmp_path, "alone")
    assert found["one"] == pytest.approx(values_on(), rel=1e-9, abs=1e-12, nan_ok=True)
    for refusal in found["ranks"]:
        assert re.fullmatch(
            r"the states of a metric must be reduced together.*torchmetrics \d.*an earlier one\.",
            refusal,
        )


def test_torchmetrics_reaches_other_ranks_by_its_public_context():
    entered = []

    class Enters(Anisotropy):
        def sync_context(self, **arguments):
            entered.append(arguments["should_sync"])
            return nullcontext()

    metric = updated(Enters(DIM), rows()[0])
    metric.compute()
    metric(rows()[0])
    assert entered == [True, False]


@pytest.mark.parametrize("call", ["unsync", "sync twice", "forward"])
def test_states_of_all_ranks_are_taken_once(call, tmp_path):
    metric = updated(Anisotropy(DIM), rows()[0])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if call != "unsync":
            metric.sync(distributed_available=lambda: True)
        with pytest.raises(TorchMetricsUserError):
            {
                "unsync": metric.unsync,
                "sync twice": metric.sync,
                "forward": lambda: metric(rows()[0]),
            }[call]()
    finally:
        dist.destroy_process_group()


def test_a_failure_within_the_context_leaves_the_states_of_this_rank(tmp_path):
    metric = updated(Anisotropy(DIM), rows()[0])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with (
            pytest.raises(RuntimeError, match="inside"),
            metric.sync_context(distributed_available=lambda: True),
        ):
            raise RuntimeError("inside")
        metric.sync(distributed_available=lambda: True)
        metric.unsync()
    finally:
        dist.destroy_process_group()


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
        "neighbors": "other_sequences",
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
    # after the first rows their states are equal
    for part in (slice(0, 3), slice(3, 50), slice(50, N)):
        together.update(x[part], token_ids=ids[part])
        together["one"].half()
    for name, metric in alone.items():
        updated(metric, x, ids, [slice(0, 3), slice(3, 50), slice(50, N)])
        assert_values(together[name].compute(), metric.compute(), rtol=0)


def test_a_collection_may_merge_equal_metrics():
    together = MetricCollection(
        {"one": Anisotropy(DIM, spectrum=True), "two": Anisotropy(DIM, spectrum=True)}
    )
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
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Logs(), DataLoader(list(zip(x, ids, strict=True)), batch_size=30))
    expected = updated(TokenMoments(DIM), x, ids).compute()
    logged = {
        "V_W_over_V_unbiased": trainer.callback_metrics["share"],
        "Q": trainer.callback_metrics["size"],
    }
    assert_values(logged, {key: expected[key] for key in logged}, rtol=1e-6)


class InParts(GeometryMetric):
    """A metric that adds the rows of an update part by part."""

    def __init__(self, dim):
        super().__init__(dim)
        self.declare(Moments.empty(dim))

    def update_states(self, rows):
        for part in rows.embeddings.split(3):
            self.extend(row_moments(part))

    def compute(self):
        return {"n_in_parts": self.load(Moments).n}


def test_a_state_may_be_extended_several_times_in_an_update():
    metric = InParts(DIM)
    for _ in range(2):
        metric.update(torch.ones(10, DIM))
    assert metric.compute() == {"n_in_parts": 20}
