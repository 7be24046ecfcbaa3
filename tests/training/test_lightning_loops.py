"""Every way to drive a Trainer: what is measured when, and at which step."""

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader, IterableDataset

from embedgeo import GeometryMonitor, observe
from tests.models import gpt_neox, hooks, token_batch
from tests.training.runs import (
    Manual,
    TinyLM,
    ValidatedLM,
    fit,
    loader,
    moments,
    n_at,
    steps,
    trainer,
)


class Stream(IterableDataset):
    def __iter__(self):
        batch = token_batch(64)
        yield from ({key: values[i] for key, values in batch.items()} for i in range(64))


def stream():
    return DataLoader(Stream(), batch_size=4)  # 16 batches, of which Lightning does not know


BATCH = 4 * 12


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (TinyLM, {"max_steps": 7}, {0: 1, 3: 1, 6: 1}),
        (TinyLM, {"max_epochs": 1, "limit_train_batches": 5}, {0: 1, 3: 1}),
        (TinyLM, {"max_epochs": 3, "limit_train_batches": 3}, {0: 1, 3: 1, 6: 1}),
        (
            TinyLM,
            {"max_epochs": 2, "limit_train_batches": 5, "accumulate_grad_batches": 2},
            {0: 2, 3: 2},
        ),
        (TinyLM, {"max_steps": 5, "data": stream()}, {0: 1, 3: 1}),
        (TinyLM, {"max_epochs": 1, "data": stream()}, {0: 1, 3: 1, 6: 1, 9: 1, 12: 1, 15: 1}),
        (TinyLM, {"fast_dev_run": 4}, {0: 1, 3: 1}),
        (TinyLM, {"fast_dev_run": True}, {0: 1}),
        (TinyLM, {"barebones": True, "log_every_n_steps": None, "max_steps": 4}, {0: 1, 3: 1}),
        (Manual, {"max_steps": 7}, {0: 1, 3: 1, 6: 1}),
        (lambda: Manual(accumulate=2), {"max_steps": 4}, {0: 2, 3: 2}),
        (lambda: Manual(optimizers=2), {"max_steps": 14}, {0: 1, 4: 1, 6: 1, 10: 1, 12: 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_each_loop_is_measured_at_its_optimizer_steps(tmp_path, module, options, expected):
    monitor = GeometryMonitor(3, metrics=moments, measure_last=False, on_error="raise")
    made, _ = fit(tmp_path, monitor, module=module(), **options)
    assert n_at(monitor) == {step: batches * BATCH for step, batches in expected.items()}
    assert hooks(made) == 0


def test_with_two_optimizers_a_window_covers_steps_of_both_and_the_next_one_is_not_lost(tmp_path):
    monitor = GeometryMonitor(3, window=3, metrics=moments, measure_last=False, on_error="raise")
    fit(tmp_path, monitor, module=Manual(optimizers=2), max_steps=16)
    assert n_at(monitor) == dict.fromkeys((0, 4, 8, 12), 2 * BATCH)


def test_the_last_probe_measurement_is_at_the_first_step_after_a_scheduled_one(tmp_path):
    monitor = GeometryMonitor(5, metrics=moments, probe=loader(4), on_error="raise")
    fit(tmp_path, monitor, module=Manual(optimizers=2), max_steps=6)
    assert steps(monitor) == [0, 6]


def test_a_window_goes_on_across_epochs_and_leaves_their_validation_out(tmp_path):
    monitor = GeometryMonitor(5, window=4, metrics=moments, measure_last=False, on_error="raise")
    options = {
        "max_epochs": 3,
        "limit_train_batches": 3,
        "val": loader(8),
        "num_sanity_val_steps": 2,
    }
    fit(tmp_path, monitor, module=ValidatedLM(), **options)
    assert n_at(monitor) == {0: 4 * BATCH, 5: 4 * BATCH}


def test_a_batch_that_the_module_skips_is_not_measured(tmp_path):
    class Skips(ValidatedLM):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self):
            assert hooks(self) == 0

    monitor = GeometryMonitor(1, metrics=moments, on_error="raise")
    options = {
        "max_epochs": 2,
        "val": loader(8),
        "check_val_every_n_epoch": 1,
        "num_sanity_val_steps": 0,
    }
    fit(tmp_path, monitor, module=Skips(), **options)
    assert n_at(monitor) == dict.fromkeys(range(4), BATCH)


def test_one_monitor_measures_one_run_after_the_other(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, max_steps=3)
    fit(tmp_path, monitor, module=TinyLM(num_hidden_layers=2), max_steps=3)
    assert [r["step"] for r in monitor.history if r["layer"] == "embed" and r["metric"] == "n"] == [
        0,
        2,
        3,
        0,
        2,
        3,
    ]


def test_two_monitors_at_once_see_what_each_would_see_alone(tmp_path):
    def monitors():
        first = GeometryMonitor(2, layers="block.*", metrics=moments, window=2, on_error="raise")
        probe = loader(8, seed=5, padding="left")
        return first, GeometryMonitor(
            3, layers="embed", metrics=moments, probe=probe, prefix="held", on_error="raise"
        )

    both, alone = monitors(), monitors()
    together, run = fit(tmp_path, *both, max_steps=8)
    plain, _ = fit(tmp_path, max_steps=8)
    for each in alone:
        fit(tmp_path, each, max_steps=8)
    for one, other in zip(both, alone, strict=True):
        pd.testing.assert_frame_equal(
            pd.DataFrame(one.history), pd.DataFrame(other.history), check_exact=True
        )
    assert steps(both[0]) == [0, 2, 4, 6, 8]
    assert steps(both[1]) == [0, 3, 6, 8]
    assert {"geometry.V/block.01", "held.V/embed"} <= run.callback_metrics.keys()
    assert all(
        torch.equal(a, b) for a, b in zip(together.parameters(), plain.parameters(), strict=True)
    )


def test_two_monitors_leave_a_compiled_model_as_they_found_it(tmp_path):
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    compiled(torch.zeros(1, 2))
    before = torch._dynamo.eval_frame._stance
    first = GeometryMonitor(2, metrics=moments, on_error="raise")
    fit(
        tmp_path,
        first,
        GeometryMonitor(3, metrics=moments, prefix="other", on_error="raise"),
        max_steps=7,
    )
    assert steps(first) == [0, 2, 4, 6, 7]
    assert torch._dynamo.eval_frame._stance is before


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_tensorboard_shows_the_charts_of_both_monitors(tmp_path):
    second = GeometryMonitor(2, layers="embed", metrics=moments, prefix="second", on_error="raise")
    first = GeometryMonitor(2, layers="block.*", metrics=moments, on_error="raise")
    loggers = [
        TensorBoardLogger(tmp_path, name="tb", version=""),
        CSVLogger(tmp_path, name="csv", version=""),
    ]
    fit(tmp_path, first, second, max_steps=3, logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0}).Reload()
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    )
    titles = [category.title for category in layout.category]
    assert {"geometry: at a glance", "second: at a glance"} <= set(titles)
    assert {title.split(":")[0] for title in titles} == {"geometry", "second"}


def test_monitors_of_one_trainer_need_prefixes_of_their_own(tmp_path):
    with pytest.raises(
        RuntimeError, match="more than one stateful callback of type `GeometryMonitor`"
    ):
        fit(tmp_path, GeometryMonitor(2), GeometryMonitor(3, layers="embed"), max_steps=1)


class TwoTowers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = gpt_neox(), gpt_neox(num_hidden_layers=2, hidden_size=8)

    def training_step(self, batch, batch_idx):
        self.teacher(**batch)
        return self.student(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("with_probe", [False, True])
def test_a_monitor_on_a_module_inside(tmp_path, with_probe):
    data = loader(4, padding="left")
    student = GeometryMonitor(
        2, layers=lambda m: m.student, probe=data if with_probe else None, on_error="raise"
    )
    module, _ = fit(tmp_path, student, module=TwoTowers(), data=data, max_steps=2)
    with observe(module.student) as geometry, torch.no_grad():
        module.student(**next(iter(data)))
    for layer, expected in geometry.compute().items():
        got = {
            r["metric"]: r["value"]
            for r in student.history
            if r["step"] == 0 and r["layer"] == layer
        }
        assert got == pytest.approx(expected, nan_ok=True)
    assert {r["layer"] for r in student.history} == {
        "embed",
        "block.00",
        "block.01",
        "final_norm",
        "mean",
    }


def test_a_monitor_of_chosen_modules_by_name(tmp_path):
    layers = lambda m: {"head": m.student.gpt_neox.layers[1].mlp}  # noqa: E731
    monitor = GeometryMonitor(2, layers=layers, metrics=moments, on_error="raise")
    fit(tmp_path, monitor, module=TwoTowers(), data=loader(4), max_steps=1)
    assert {r["layer"] for r in monitor.history} == {"head"}


class Evaluated(ValidatedLM):
    def validation_step(self, batch, batch_idx):
        self.hooks_seen = hooks(self)
        return self.model(**batch).logits.mean()

    test_step = predict_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_monitor_does_nothing_in_evaluation_and_observe_measures_it(tmp_path, stage):
    monitor = GeometryMonitor(1, on_error="raise")
    run, module, data = (
        trainer(tmp_path, callbacks=[monitor]),
        Evaluated(),
        loader(16, padding="left"),
    )
    with observe(module) as geometry:
        getattr(run, stage)(module, data, **({} if stage == "predict" else {"verbose": False}))
    assert module.hooks_seen > 0
    assert monitor.history == []
    assert geometry.compute()["block.00"]["n"] == 16 * 9
    getattr(run, stage)(module, data, **({} if stage == "predict" else {"verbose": False}))
    assert module.hooks_seen == 0


class WithGeneration(TinyLM):
    """Samples and scores a reference in each step, without gradients; as in reinforcement learning
    and DPO.
    """

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.model.generate(**batch, max_new_tokens=2, do_sample=False)
            self.model(**batch)
        return super().training_step(batch, batch_idx)


def test_only_passes_with_gradients_count_unless_asked_for(tmp_path):
    monitors = [
        GeometryMonitor(2, metrics=moments, measure_last=False),
        GeometryMonitor(2, metrics=moments, measure_last=False, prefix="all", no_grad_passes=True),
    ]
    fit(tmp_path, *monitors, module=WithGeneration(), max_steps=3)
    assert n_at(monitors[0]) == {0: BATCH, 2: BATCH}
    assert all(n > 3 * BATCH for n in n_at(monitors[1]).values())


def test_a_probe_counts_although_it_is_run_without_gradients(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, probe=loader(rows=4), measure_last=False)
    fit(tmp_path, monitor, module=WithGeneration(), max_steps=1)
    assert n_at(monitor) == {0: BATCH}


class FrozenBackbone(TinyLM):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            states = self.model.gpt_neox(**batch).last_hidden_state
        return self.head(states).mean()


def test_a_backbone_that_is_run_without_gradients_is_named_once_with_the_way_out(tmp_path):
    monitor = GeometryMonitor(1, layers="block.*", metrics=moments)
    with pytest.warns(UserWarning, match="GeometryMonitor") as caught:
        fit(tmp_path, monitor, module=FrozenBackbone(), max_steps=3)
    reached = "only forward passes without gradients reached block.00, block.01, block.02"
    messages = [str(w.message) for w in caught if "GeometryMonitor" in str(w.message)]
    assert messages == [f"GeometryMonitor: {reached}: count them by no_grad_passes=True."]
    options = {"no_grad_passes": True, "measure_last": False}
    counting = GeometryMonitor(1, layers="block.*", metrics=moments, **options)
    fit(tmp_path, counting, module=FrozenBackbone(), max_steps=1)
    assert n_at(counting) == {0: BATCH}
