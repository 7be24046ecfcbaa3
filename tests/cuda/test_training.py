"""Training on a GPU: the monitors measure it and leave it as it is."""

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    GeometryMonitor,
    IntrinsicDimension,
    StepMonitor,
    observe,
)
from tests.cuda import GPU, deterministic, needs_gpu
from tests.data import KINDS, assert_values, metrics
from tests.models import gpt_neox, token_batch
from tests.training.runs import WithoutDropout, fit, loader, moments, steps, value

pytestmark = needs_gpu

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PRECISIONS = pytest.mark.parametrize("precision", AUTOCAST)


def on_gpu(batch):
    return {key: tensor.to(GPU) for key, tensor in batch.items()}


def trained(folder, *monitors, module=None, **options):
    """Train on the GPU, the same bits each time."""
    with deterministic():
        given = {"max_steps": 6, **options}
        return fit(folder, *monitors, module=module, accelerator="gpu", deterministic=True, **given)


def same_history(monitor, other):
    pd.testing.assert_frame_equal(
        pd.DataFrame(monitor.history), pd.DataFrame(other.history), check_exact=True
    )


@PRECISIONS
def test_training_is_bit_for_bit_what_it_is_without_the_monitor(tmp_path, precision):
    plain, _ = trained(tmp_path, precision=precision)
    monitor = GeometryMonitor(2, jackknife=2, on_error="raise")
    measured, _ = trained(tmp_path, monitor, precision=precision)
    assert steps(monitor) == [0, 2, 4, 6]
    assert torch.stack(measured.losses).equal(torch.stack(plain.losses))
    assert all(a.equal(b) for a, b in zip(measured.parameters(), plain.parameters(), strict=True))


@PRECISIONS
def test_what_is_logged_is_what_observe_gives(tmp_path, precision):
    monitor = GeometryMonitor(100, measure_last=False, on_error="raise")
    _, run = trained(
        tmp_path,
        monitor,
        module=WithoutDropout(),
        precision=precision,
        data=loader(16, 16),
        max_steps=1,
    )
    dtype = AUTOCAST[precision]
    module, batch = WithoutDropout().train().to(GPU), on_gpu(next(iter(loader(16, 16))))
    with (
        deterministic(),
        observe(module) as geometry,
        torch.autocast("cuda", dtype, enabled=dtype is not None),
    ):
        module.model(**batch, labels=batch["input_ids"])
    for layer, values in geometry.compute().items():
        for metric, expected in values.items():
            assert value(monitor, 0, layer, metric) == pytest.approx(
                expected, rel=1e-9, nan_ok=True
            ), (layer, metric)
    logged = run.callback_metrics["geometry.V/block.01"]
    assert float(logged) == value(monitor, 0, "block.01", "V")


def test_a_probe_is_measured_in_eval_mode_and_leaves_training_as_it_is(tmp_path):
    plain, _ = trained(tmp_path, precision="16-mixed")
    monitor = GeometryMonitor(3, probe=[token_batch(seed=9)], metrics=moments, on_error="raise")
    measured, _ = trained(tmp_path, monitor, precision="16-mixed")
    assert steps(monitor) == [0, 3, 6]
    assert all(a.equal(b) for a, b in zip(measured.parameters(), plain.parameters(), strict=True))


def test_a_failure_on_the_gpu_turns_the_monitor_off_and_training_goes_on(tmp_path):
    class Fails(EmbeddingMoments):
        def compute(self):
            return {"failed": self.mean.view(7) if self.num_rows else self.n}

    monitor = GeometryMonitor(2, metrics=lambda dim: [Fails(dim)])
    with pytest.warns(
        UserWarning, match="GeometryMonitor is off for the rest of this run"
    ) as caught:
        _, run = trained(tmp_path, monitor)
    assert sum("GeometryMonitor" in str(each.message) for each in caught) == 1
    assert run.global_step == 6


# ── NCCL: a world of one rank, as NCCL takes one rank a GPU
# ──────────────────────────────────────────────────────────


@pytest.fixture
def nccl(tmp_path):
    dist.init_process_group(
        "nccl", f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=GPU
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", [0, 900])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_reduced_over_nccl(nccl, kind, rows):
    x, ids = torch.randn(rows, 24, device=GPU), torch.arange(rows, device=GPU) % 50

    def values(**options):
        metric = metrics(24, **options)[kind].to(GPU)
        metric.update(x, ids, sequence_ids=torch.arange(rows, device=GPU) // 30)
        return metric.compute()

    assert_values(values(), values(sync_on_compute=False), rtol=1e-9, atol=1e-12)


def test_a_loop_over_nccl_gives_the_numbers_of_one_without(request):
    def run():
        torch.manual_seed(0)
        model = gpt_neox().to(GPU)
        monitor = StepMonitor(model, 2, jackknife=2, on_error="raise")
        with monitor:
            for step in range(4):
                with monitor.step(step, batch := on_gpu(token_batch(seed=step))):
                    model(**batch)
        return monitor

    alone = run()
    request.getfixturevalue("nccl")
    among = run()
    assert steps(among) == steps(alone)
    for record, expected in zip(among.history, alone.history, strict=True):
        assert record["value"] == pytest.approx(
            expected["value"], rel=1e-6, abs=1e-12, nan_ok=True
        ), record


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_sharded_by_fsdp2(nccl, dtype):
    def history(shard):
        torch.manual_seed(0)
        model = gpt_neox().to(GPU)
        if shard:
            mesh, policy = init_device_mesh("cuda", (1,)), MixedPrecisionPolicy(param_dtype=dtype)
            for block in model.gpt_neox.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        monitor = StepMonitor(
            model, 1, layers=["blocks"], metrics=few, on_error="raise", measure_last=False
        )
        with monitor, monitor.step(0, batch := on_gpu(token_batch(16, 12))):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        return {(r["layer"], r["metric"]): r["value"] for r in monitor.history}

    def few(dim):
        return [EmbeddingMoments(dim), Anisotropy(dim), IntrinsicDimension(dim)]

    plain, sharded = history(False), history(True)
    assert plain.keys() == sharded.keys()
    for key in plain:
        if dtype is None or key[1] in ("Q", "M", "V"):
            rel = 1e-4 if dtype is None else 0.05
            assert sharded[key] == pytest.approx(plain[key], rel=rel, abs=1e-6, nan_ok=True), key
