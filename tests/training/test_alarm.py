"""GeometryAlarm: by hand, in each monitor, over a resumed run and on ranks."""

import json
import math
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from embedgeo import GeometryAlarm, GeometryMonitor, StepMonitor
from embedgeo.training.transformers import GeometryCallback
from tests.models import token_batch
from tests.ranks import on_two_ranks
from tests.training.hf_runs import hf_trainer
from tests.training.runs import TinyLM, fit, loader, moments

JUMP = 24
"""The step at which the weights are changed."""


def records(step, *, jump_at=50, blocks=4, metric="anisotropy", sign=1.0):
    """Values of a step: noise, and a jump of 8 standard deviations at all blocks."""
    random = np.random.default_rng(step)
    noise = random.standard_normal(blocks)
    values = sign * (10 + noise + (8 if step >= jump_at else 0))
    found = [
        {
            "layer": f"block.{i:02d}",
            "layer_index": i,
            "width": 8,
            "metric": metric,
            "value": value,
            "stderr": math.nan,
        }
        for i, value in enumerate(values.tolist())
    ]
    return [*found, found[0] | {"layer": "mean", "layer_index": -1, "value": float(values.mean())}]


def watched(alarm, steps, **options):
    """All alarms of a run."""
    for step in steps:
        for found in alarm.test(step, records(step, **options)):
            alarm.accept(found)
    return alarm.alarms


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_jump_is_said_once_with_where_and_since_when(sign):
    (found,) = watched(GeometryAlarm(), range(80), sign=sign)
    assert (found.step, found.since, found.metric) == (51, 50, "anisotropy")
    assert found.layers[0] == "mean"
    assert {*found.layers} >= {"block.00", "block.01", "block.02", "block.03"}
    assert math.copysign(1, found.standard_errors) == sign
    assert abs(found.standard_errors) > 5
    assert abs(found.value - sign * 18) < 2
    assert abs(found.expected - sign * 10) < 2
    verb = "rose" if sign > 0 else "fell"
    assert str(found).startswith(f"step 51: anisotropy {verb} at the mean over blocks (also block.")
    assert "since step 50" in str(found)


@pytest.mark.slow
def test_nothing_is_said_of_a_sound_run():
    assert watched(GeometryAlarm(), range(100), jump_at=1000) == []


def test_other_metrics_and_layers_are_not_watched():
    assert watched(GeometryAlarm(metrics=["M_over_Q"]), range(60)) == []
    assert watched(GeometryAlarm(layers=["embed"]), range(60)) == []
    (found,) = watched(GeometryAlarm(layers=["block.02"]), range(60))
    assert found.layers == ("block.02",)


def test_a_resumed_run_goes_on_and_a_step_counts_once():
    whole = watched(GeometryAlarm(), range(80))
    first, second = GeometryAlarm(), GeometryAlarm()
    watched(first, range(51))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    # resumed from a checkpoint before the last measurements
    assert watched(second, range(45, 80)) == whole


def test_blocks_and_their_means_are_watched_and_nothing_inside_of_them():
    names = ["encoder.block.00", "decoder.block.00", "encoder.mean", "decoder.mean"]
    others = [
        "encoder.block.00.mlp",
        "encoder.mlp.mean",
        "encoder.embed",
        "decoder.final_norm",
        "mean",
    ]
    alarm = GeometryAlarm()
    for step in range(60):
        (record,) = records(step, blocks=1)[:1]
        alarm_records = [record | {"layer": name} for name in [*names, *others]]
        for found in alarm.test(step, alarm_records):
            alarm.accept(found)
    (found,) = alarm.alarms
    assert {*found.layers} == {*names}


def test_a_number_that_is_lost_is_an_alarm_once_and_one_that_was_never_safe_is_none():
    def run(lost, value=math.nan, steps=70, alarm=None):
        alarm = alarm or GeometryAlarm()
        for step in range(steps):
            found = records(step, jump_at=1000)
            found = [each | {"value": value} if step in lost else each for each in found]
            for each in alarm.test(step, found):
                alarm.accept(each)
        return alarm.alarms

    (found,) = run(range(60, 70))
    assert (found.step, found.since, found.standard_errors) == (61, 60, math.inf)
    assert found.layers == ("mean", "block.00", "block.01", "block.02", "block.03")
    assert "anisotropy is nan at the mean over blocks (also block.00" in str(found)
    assert str(found).endswith(f"since step 60; before that it was {found.expected:.4g}.")
    assert abs(found.expected - 10) < 2
    (found,) = run(range(60, 62), math.inf)  # and comes back
    assert "is inf at" in str(found)
    assert run({10, 60, 62, 64, 66, 67}) == []
    assert run(range(30, 70)) == []  # too early to know what it is
    half, resumed = GeometryAlarm(), GeometryAlarm()
    run({60}, steps=61, alarm=half)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert len(run(range(60, 70), alarm=resumed)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"false_alarms": 0}, "false_alarms must be more than 0 and less than 1"),
        ({"false_alarms": 1}, "false_alarms must be more than 0 and less than 1"),
        ({"warm_up": 10}, "warm_up must be at least 20"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        GeometryAlarm(**options)
    with pytest.raises(TypeError, match="must be lists of names"):
        GeometryAlarm(metrics="anisotropy")


def alarm_of_norms(call=None):
    return GeometryAlarm(call, metrics=["norm_mean"], warm_up=20)


def disturbed(model):
    """Change the weights as a step that is far too large would."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight += 1


class Disturbed(TinyLM):
    """Trained, and changed once."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == JUMP:
            disturbed(self.model)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def plain_loop(alarm, **options):
    """A loop whose model is changed once; gives the monitor."""
    torch.manual_seed(0)
    model = TinyLM().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with StepMonitor(
        model, 1, metrics=moments, alarm=alarm, **{"on_error": "raise", **options}
    ) as monitor:
        for step in range(JUMP + 6):
            if step == JUMP:
                disturbed(model)
            batch = token_batch(seed=step)
            with monitor.step(step, batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.slow
def test_a_loop_of_ones_own():
    called = []
    monitor = plain_loop(alarm_of_norms(called.append))
    (found,) = called
    assert (found.step, found.since) == (JUMP + 1, JUMP)
    assert monitor.alarm.alarms == called


@pytest.mark.slow
def test_lightning_says_it_and_saves_a_checkpoint(tmp_path, caplog):
    model, saved = Disturbed(), tmp_path / "alarm.ckpt"
    alarm = alarm_of_norms(lambda _: model.trainer.save_checkpoint(saved))
    monitor = GeometryMonitor(every_n_steps=1, metrics=moments, alarm=alarm, on_error="raise")
    logger = TensorBoardLogger(tmp_path / "logs")
    with caplog.at_level("INFO"):
        _, trainer = fit(
            tmp_path,
            monitor,
            module=model,
            data=loader(rows=4 * (JUMP + 8)),
            max_steps=JUMP + 4,
            logger=logger,
        )
    (found,) = alarm.alarms
    assert found.since == JUMP
    assert f"GeometryMonitor: {found}" in caplog.text
    assert saved.exists()
    state = torch.load(saved, weights_only=False)["callbacks"]
    assert state["GeometryMonitor{'prefix': 'geometry'}"]["alarm"]["alarms"] == [asdict(found)]
    trainer.test(model, loader(rows=4), verbose=False)
    assert alarm.alarms == [found]
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()["tensors"]
    assert f"geometry/alarm at step {JUMP + 1}/text_summary" in tags


def train_disturbed(trainer, **resume):
    """Train with the Hugging Face Trainer, and change the model once."""
    inner = trainer.training_step

    def changed(*args, **kwargs):
        if trainer.state.global_step == JUMP:
            disturbed(trainer.model)
        return inner(*args, **kwargs)

    trainer.training_step = changed
    trainer.train(**resume)


@pytest.mark.slow
def test_a_resumed_hugging_face_run_goes_on_from_its_history(tmp_path):
    def trained(max_steps, alarm, **resume):
        callback = GeometryCallback(every_n_steps=1, metrics=moments, alarm=alarm)
        trainer = hf_trainer(
            tmp_path, callback, max_steps=max_steps, save_strategy="steps", save_steps=JUMP
        )
        train_disturbed(trainer, **resume)

    trained(JUMP, alarm_of_norms())
    resumed = alarm_of_norms()
    trained(JUMP + 4, resumed, resume_from_checkpoint=True)
    assert [found.since for found in resumed.alarms] == [JUMP]


def test_a_function_that_fails_ends_neither_training_nor_the_monitor():
    def fails(alarm):
        raise OSError("no space left")

    with pytest.warns(UserWarning, match="what alarm= calls has failed at step .* no space left"):
        monitor = plain_loop(alarm_of_norms(fails), on_error="warn")
    assert max(record["step"] for record in monitor.history) >= JUMP + 4


def on_rank(rank):
    """Alarms of a run on this rank, of one whose logger fails on rank 0 at the step of the first,
    and what is said of an alarm on one rank.
    """

    def call(alarm):
        # as a sharded checkpoint has: it hangs unless every rank calls
        torch.distributed.barrier()
        called.append(alarm)

    def log(step, values):
        if rank == 0 and step >= JUMP + 1:
            raise OSError("the server is away")

    found = []
    for options in ({}, {"log": log, "on_error": "warn"}):
        called = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plain_loop(alarm_of_norms(call), **options)
        found.append([asdict(alarm) for alarm in called])
    with pytest.raises(ValueError, match=r"on every rank or on none, .*; got it on 0 of 2"):
        plain_loop(alarm_of_norms() if rank == 0 else None)
    return found


@pytest.mark.slow
def test_all_ranks_call_at_the_same_step_also_where_a_logger_fails_on_one(tmp_path):
    first, second = on_two_ranks(on_rank, tmp_path)
    assert first == second
    for called in first:
        assert [found["since"] for found in called] == [JUMP]


@pytest.mark.slow
def test_loggers_are_told_what_happened(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        monitor = plain_loop(None, log=writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (tag,) = [each for each in events.Tags()["tensors"] if "what happened" in each]
    last = events.Tensors(tag)[-1]
    told = last.tensor_proto.string_val[0].decode()
    assert last.step == max(record["step"] for record in monitor.history)
    assert "mean cosine rose from" in told
    assert f"by step {JUMP} (all 3 blocks)" in told
