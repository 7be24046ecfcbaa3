"""GeometryCallback in a real transformers.Trainer."""

import weakref

import pandas as pd
import pytest
import torch
import transformers as hf

from embedgeo.training.transformers import GeometryCallback
from tests.files import events_of
from tests.models import gpt_neox
from tests.training.hf_runs import hf_trainer, rows
from tests.training.runs import (
    OPTIONS,
    assert_same_values,
    by_step,
    in_one_process,
    moments,
    n_at,
    steps,
)

BATCH = 2 * 12


def held_out():
    return torch.utils.data.DataLoader(rows(8, "left", seed=1), batch_size=4)


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_values_charts_and_images_are_logged_at_the_step_they_were_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback = GeometryCallback(3, on_error="raise")
    held = GeometryCallback(4, prefix="held", probe=held_out())
    trainer = hf_trainer(tmp_path / "run", callback, held, report_to="tensorboard")
    trainer.train()
    assert sum("loss" in row for row in trainer.state.log_history) == 7
    (folder,) = {path.parent for path in (tmp_path / "tb").rglob("events*")}
    events = events_of(folder)
    assert [event.step for event in events.Scalars("train/geometry.V/block.01")] == [0, 3, 6, 7]
    layout = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    for shown in (b"geometry: at a glance", b"held: at a glance", rb"^train/geometry\.M_over_Q\/"):
        assert shown in layout
    assert [image.step for image in events.Images("geometry.heatmap/M_over_Q")][-1] == 7
    assert events.Images("held.profile/anisotropy")


def test_training_whose_ranks_repeat_rows_is_refused(tmp_path):
    class Parallel(hf.Trainer):
        # from here on, as if it ran one model on two ranks
        def set_initial_training_values(self, *args):
            values = super().set_initial_training_values(*args)
            self.get_cp_size = lambda: 2
            return values

    trainer = hf_trainer(tmp_path, GeometryCallback(2), kind=Parallel)
    with pytest.raises(ValueError, match="runs one model on several ranks"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_log_history_still_ends_with_the_summary_and_has_an_epoch_in_each_entry(tmp_path):
    trainer = hf_trainer(tmp_path, GeometryCallback(3, metrics=moments), max_steps=24)
    trainer.train()
    history = trainer.state.log_history
    assert "train_runtime" in history[-1]
    means = {each["step"]: each["epoch"] for each in history if "geometry.V/mean" in each}
    # twelve steps are an epoch
    assert means == {step: pytest.approx(step / 12) for step in range(0, 25, 3)}


class WithoutLogs(hf.Trainer):
    def log(self, logs, *args, **kwargs):
        super().log({}, *args, **kwargs)


class OfPrinter(hf.TrainerCallback):
    """Takes a value out of the last log, as the callback that prints logs does."""

    def on_log(self, args, state, control, logs=None, **_):
        logs.pop("total_flos", None)


BEST_AT_END = {
    "max_steps": 6,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the worst: the one after two steps
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


class OutOfMemory(hf.Trainer):
    """Fails at its third step with more than a sequence in a batch."""

    def training_step(self, model, inputs, *args):
        if len(inputs["input_ids"]) > 1 and self.state.global_step == 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args)


def test_attempts_of_auto_find_batch_size_leave_one_history(tmp_path):
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    for _ in range(2):
        callback = GeometryCallback(1, **OPTIONS)
        hf_trainer(tmp_path, callback, kind=OutOfMemory, **options).train()
        kept = pd.read_parquet(tmp_path / "history.parquet")
        assert sorted({*kept["step"]}) == steps(callback) == [*range(8)]
    # that of another run is kept
    assert sorted(path.name for path in tmp_path.glob("history*")) == [
        "history.1.parquet",
        "history.parquet",
    ]


@pytest.mark.parametrize(
    "options",
    [{"kind": WithoutLogs}, {"include_num_input_tokens_seen": "all"}],
)
def test_the_end_is_known_whatever_logs_tell(tmp_path, options):
    callback = GeometryCallback(3, window=2, **OPTIONS)
    hf_trainer(tmp_path, callback, **options).train()
    assert n_at(callback) == {0: 2 * BATCH, 3: 2 * BATCH, 6: BATCH, 7: 2 * BATCH}


def test_the_best_weights_are_not_taken_for_the_last_ones(tmp_path):
    callback = GeometryCallback(100, metrics=moments)
    trainer = hf_trainer(tmp_path, callback, kind=WithoutLogs, eval_dataset=rows(4), **BEST_AT_END)
    with pytest.warns(UserWarning, match="last step, 6, are not measured.*best ones"):
        trainer.train()
    assert steps(callback) == [0]


def test_the_last_weights_are_measured_before_the_best_ones_are_loaded(tmp_path):
    callback = GeometryCallback(100, probe=held_out(), **OPTIONS)
    trainer = hf_trainer(tmp_path, OfPrinter(), callback, eval_dataset=rows(4), **BEST_AT_END)
    trainer.train()
    assert steps(callback) == [0, 6]
    assert trainer.state.best_global_step == 2
    last = gpt_neox().eval()
    last.load_state_dict(type(last).from_pretrained(tmp_path / "checkpoint-6").state_dict())
    expected = in_one_process(last, held_out(), metrics=moments)
    assert_same_values(by_step(callback.history)[6], expected, rel=1e-6)


def test_a_trainer_is_freed_as_soon_as_nobody_has_it(tmp_path):
    trainer = hf_trainer(tmp_path, GeometryCallback(2))
    freed = weakref.ref(trainer)
    trainer.train()
    del trainer
    assert freed() is None


class ActsOnLogs(hf.TrainerCallback):
    """Ends training at its fourth log, and needs a loss in each."""

    num_logs = 0

    def on_log(self, args, state, control, logs=None, **_):
        assert {"loss", "train_loss"} & logs.keys()
        self.num_logs += 1
        control.should_training_stop |= self.num_logs == 4


def test_other_callbacks_do_not_get_what_is_logged(tmp_path):
    callback = GeometryCallback(1, **OPTIONS)
    trainer = hf_trainer(tmp_path, callback, ActsOnLogs(), logging_steps=2, max_steps=12)
    trainer.train()
    assert trainer.state.global_step == 8


class StopsEpochs(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


def test_the_last_weights_are_measured_where_epochs_are_stopped(tmp_path):
    monitor = GeometryCallback(2, **OPTIONS)
    trainer = hf_trainer(tmp_path, monitor, StopsEpochs(), max_steps=-1, num_train_epochs=3)
    trainer.train()
    assert steps(monitor) == [0, 2, 3]


class StopsOnce(hf.TrainerCallback):
    """An interrupt between two batches of the first run, and a log with a name of the end's."""

    has_stopped = False

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"train_steps_per_second": 1.0})
        if state.global_step == 3 and not self.has_stopped:
            self.has_stopped = True
            raise KeyboardInterrupt


def test_several_callbacks_measure_a_second_run_after_an_interrupt_between_batches(tmp_path):
    stops = StopsOnce()
    monitors = [GeometryCallback(2, prefix=prefix, **OPTIONS) for prefix in "ab"]
    trainer = stops.trainer = hf_trainer(tmp_path, *monitors, stops)
    training_step = trainer.training_step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    for monitor in monitors:
        assert n_at(monitor) == dict.fromkeys((0, 2, 4, 6, 7), BATCH)
    assert trainer.training_step == training_step
    assert all("epoch" in log for log in trainer.state.log_history if "loss" in log)


class OwnLoop(hf.Trainer):
    def train(self):
        self.model.train()
        events, told = self.callback_handler, (self.args, self.state, self.control)
        events.on_train_begin(*told)
        for self.state.global_step in range(1, 4):
            events.on_step_end(*told)
        events.on_train_end(*told)


def test_a_loop_that_gives_no_batches_is_said(tmp_path):
    monitor = GeometryCallback(2, metrics=moments)
    trainer = hf_trainer(tmp_path, monitor, kind=OwnLoop)
    with pytest.warns(UserWarning, match=r"no batch has come to it, so nothing was measured"):
        trainer.train()
    assert not monitor.history


def test_a_resumed_run_keeps_the_choice_of_metrics(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2}
    hf_trainer(tmp_path, GeometryCallback(2), max_steps=2, **saved).train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    path.write_text(path.read_text().replace('"bounds": []', '"bounds": ["type_tables"]'))
    resumed = GeometryCallback(2)
    trainer = hf_trainer(tmp_path, resumed, max_steps=4, **saved)
    trainer.train(resume_from_checkpoint=str(path.parent))
    assert steps(resumed) == [2, 4]
    assert "token_types" not in {record["metric"] for record in resumed.history}


def test_a_resumed_run_measures_the_rest_of_a_window_and_no_probe_again(tmp_path):
    def callbacks():
        window = GeometryCallback(3, window=2, metrics=moments, measure_last=False)
        held = GeometryCallback(4, prefix="held", probe=held_out(), metrics=moments)
        return window, held

    saved = {"save_strategy": "steps", "save_steps": 4}
    hf_trainer(tmp_path, *callbacks(), max_steps=4, **saved).train()
    window, held = callbacks()
    trainer = hf_trainer(tmp_path, window, held, max_steps=8, **saved)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert n_at(window) == {3: BATCH, 6: 2 * BATCH}
    assert steps(held) == [8]
