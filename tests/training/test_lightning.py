"""GeometryMonitor in a real Lightning Trainer."""

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from embedgeo import GeometryMonitor, observe
from tests.models import hooks
from tests.training.runs import (
    TinyLM,
    ValidatedLM,
    fit,
    loader,
    moments,
    random_state,
    steps,
    value,
)

LAYERS = ["embed", "block.00", "block.01", "block.02", "final_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("with_probe", [False, True])
def test_training_is_bit_for_bit_the_same_with_the_monitor(tmp_path, with_probe):
    def outcome(*callbacks):
        module, run = fit(tmp_path, *callbacks, max_steps=30, accumulate_grad_batches=2)
        optimizer = run.optimizers[0].state_dict()["state"]
        moments = [tensor for state in optimizer.values() for tensor in state.values()]
        return [*module.state_dict().values(), *moments, *module.losses], random_state()

    probe = loader(16, seed=1, shuffle=True) if with_probe else None
    monitor = GeometryMonitor(every_n_steps=5, probe=probe, on_error="raise")
    (plain, plain_state), (monitored, monitored_state) = outcome(), outcome(monitor)
    assert len(plain) == len(monitored) > 100
    assert all(torch.equal(a, b) for a, b in zip(plain, monitored, strict=True))
    assert torch.equal(plain_state[0], monitored_state[0])
    assert plain_state[1:] == monitored_state[1:]
    assert steps(monitor) == [*range(0, 30, 5), 30]


def test_no_hook_is_on_the_model_between_measured_steps(tmp_path):
    class Spy(L.Callback):
        def __init__(self):
            self.hooks = {}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.hooks[trainer.global_step] = hooks(pl_module)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert hooks(pl_module) == 0

    spy = Spy()
    fit(
        tmp_path,
        GeometryMonitor(every_n_steps=4, metrics=moments, on_error="raise"),
        spy,
        max_steps=10,
    )
    assert [step for step, count in spy.hooks.items() if count] == [0, 4, 8]


def test_a_window_pools_the_steps_it_covers(tmp_path):
    seen = []

    class Batches(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((trainer.global_step, batch["input_ids"]))

    monitor = GeometryMonitor(every_n_steps=5, window=3, on_error="raise")
    fit(tmp_path, monitor, Batches(), max_steps=10)
    assert steps(monitor) == [0, 5, 10]
    types = torch.cat([ids.flatten() for step, ids in seen if 5 <= step < 8]).unique()
    assert value(monitor, 5, "embed", "n") == 3 * 48
    assert value(monitor, 5, "embed", "token_types") == len(types)


def test_sequences_can_be_the_rows(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, rows="last", on_error="raise")
    fit(tmp_path, monitor, max_steps=3)
    assert {record["value"] for record in monitor.history if record["metric"] == "n"} == {4}


def test_an_unfinished_window_is_logged_when_training_ends(tmp_path):
    monitor = GeometryMonitor(every_n_steps=5, window=4, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=7)
    assert steps(monitor) == [0, 5, 7]
    assert value(monitor, 5, "embed", "n") == 2 * 48


def test_the_probe_equals_observe_on_the_weights_of_that_step(tmp_path):
    class Weights(L.Callback):
        def __init__(self):
            self.at = {}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.at.setdefault(
                trainer.global_step, {k: v.clone() for k, v in pl_module.state_dict().items()}
            )

    probe, weights = loader(16, 8, seed=1, padding="left"), Weights()
    monitor = GeometryMonitor(every_n_steps=4, probe=probe, on_error="raise")
    module, _ = fit(tmp_path, monitor, weights, max_steps=8, accumulate_grad_batches=2)
    weights.at[8] = module.state_dict()
    for step in (0, 4, 8):
        offline = TinyLM().eval()
        offline.load_state_dict(weights.at[step])
        with observe(offline.model) as geometry, torch.no_grad():
            for batch in probe:
                offline.model(**batch)
        for layer, expected in geometry.compute().items():
            got = {
                r["metric"]: r["value"]
                for r in monitor.history
                if r["step"] == step and r["layer"] == layer
            }
            assert got == pytest.approx(expected, rel=1e-6, nan_ok=True), (step, layer)
    assert value(monitor, 0, "embed", "n") == 16 * 9


def test_probe_forward_and_batch_callables_override(tmp_path):
    class Tokens(TinyLM):
        def forward(self, batch):
            self.called = True
            return self.model(inputs_embeds=self.model.get_input_embeddings()(batch["input_ids"]))

    monitor = GeometryMonitor(
        every_n_steps=2,
        probe=loader(8),
        probe_forward=lambda pl_module, batch: pl_module(batch),
        token_ids=lambda batch: batch["input_ids"] * 0 + 7,
        mask=lambda batch: batch["input_ids"] % 2 == 0,
        on_error="raise",
    )
    module, _ = fit(tmp_path, monitor, module=Tokens(), max_steps=2)
    even = sum(int((batch["input_ids"] % 2 == 0).sum()) for batch in loader(8))
    assert module.called
    assert value(monitor, 0, "block.00", "token_types") == 1
    assert value(monitor, 0, "block.00", "n") == even


def test_validation_and_sanity_checking_are_left_alone(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, on_error="raise")
    fit(
        tmp_path,
        monitor,
        module=ValidatedLM(),
        max_steps=6,
        val=loader(8),
        val_check_interval=2,
        num_sanity_val_steps=2,
    )
    assert {r["value"] for r in monitor.history if r["metric"] == "n"} == {48}


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_scalars_reach_every_logger_under_the_contracts_tags(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, on_error="raise")
    loggers = [
        TensorBoardLogger(tmp_path, name="tb", version=""),
        CSVLogger(tmp_path, name="csv", version=""),
    ]
    _, run = fit(tmp_path, monitor, max_steps=5, logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("geometry.")}
    metrics = {record["metric"] for record in monitor.history} - {"norm_Q_expected"}
    everywhere = {f"geometry.{metric}/{layer}" for metric in metrics for layer in [*LAYERS, "mean"]}
    assert tags == everywhere | {"geometry.norm_Q_expected/final_norm"}
    assert [event.step for event in events.Scalars("geometry.V/block.01")] == [0, 2, 4, 5]
    assert events.Scalars("geometry.V/block.01")[1].value == pytest.approx(
        value(monitor, 2, "block.01", "V")
    )
    blocks = [value(monitor, 5, f"block.0{i}", "V") for i in range(3)]
    assert events.Scalars("geometry.V/mean")[-1].value == pytest.approx(sum(blocks) / 3)
    table = pd.read_csv(tmp_path / "csv" / "metrics.csv").set_index("step")
    assert table["geometry.V/mean"].dropna().loc[5] == pytest.approx(sum(blocks) / 3)
    assert run.callback_metrics["geometry.V/block.01"].item() == value(monitor, 5, "block.01", "V")
    assert set(monitor.history[0]) == {
        "step",
        "layer",
        "layer_index",
        "width",
        "metric",
        "value",
        "stderr",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("number", [0, 1])
def test_each_tensorboard_gets_one_chart_per_metric(tmp_path, number):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, prefix="g", on_error="raise")
    loggers = [TensorBoardLogger(tmp_path, name=str(i), version="") for i in range(2)]
    fit(tmp_path, monitor, max_steps=5, logger=loggers)
    events = EventAccumulator(str(tmp_path / str(number))).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category][:2] == [
        "g: at a glance",
        "g: size and variance",
    ]
    charts = [chart for category in layout.category for chart in category.chart]
    shown = [tag for chart in charts for tag in chart.multiline.tag]
    assert sorted(shown) == sorted({rf"^g\.{r['metric']}\/" for r in monitor.history})
    assert shown[:3] == [r"^g\.V_W_over_V_unbiased\/", r"^g\.M_over_Q\/", r"^g\.mean_cosine\/"]
    assert [chart.title for chart in charts[1:3]] == ["M / Q (M_over_Q)", "mean cosine"]


def test_early_stopping_can_watch_the_geometry(tmp_path):
    stop = EarlyStopping("geometry.n/mean", patience=2, mode="max", check_on_train_epoch_end=False)
    options = {"max_steps": 50, "val": loader(4), "val_check_interval": 1}
    _, run = fit(
        tmp_path, GeometryMonitor(1, metrics=moments), stop, module=ValidatedLM(), **options
    )
    assert run.global_step < 10


@pytest.mark.parametrize("logger", [False, True])
def test_without_loggers_the_history_is_there(tmp_path, logger):
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path) if logger else False)
    assert steps(monitor) == [0, 2, 3]
