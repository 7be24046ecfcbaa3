"""StepMonitor in loops written by hand."""

import gc
import sys
from contextlib import ExitStack
from inspect import signature

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from embedgeo import EmbeddingMoments, GeometryMonitor, StepMonitor, log_spaced_steps
from embedgeo.demo import DemoSettings
from embedgeo.demo.command import LanguageModel, new_model, training_batches
from embedgeo.text import builtin_corpus, train_tokenizer
from embedgeo.training.monitor import MonitorOptions
from tests.models import gpt_neox, hooks, token_batch
from tests.training.loops import assert_same_history, loop
from tests.training.runs import (
    Breaks,
    BreaksLate,
    UserError,
    fit,
    loader,
    moments,
    random_state,
    steps,
    trainer,
    value,
)


@pytest.mark.slow
@pytest.mark.parametrize("with_probe", [False, True])
def test_the_demos_training_as_a_plain_loop_gives_exactly_the_numbers_of_the_lightning_monitor(
    tmp_path, with_probe
):
    settings = DemoSettings(
        max_steps=7, num_layers=2, hidden_size=32, vocab_size=300, seq_len=32, batch_size=2
    )
    text = "\n\n".join(builtin_corpus()[:3])
    tokenizer = train_tokenizer(text, settings.vocab_size)
    ids = tokenizer.encode(text)
    options = {
        "every_n_steps": 3,
        "extra_steps": log_spaced_steps(4),
        "jackknife": 2,
        "on_error": "raise",
    }
    if with_probe:
        options["probe"] = DataLoader(torch.tensor(ids[:320]).view(10, 32), batch_size=4)
        options["probe_forward"] = lambda module, batch: getattr(module, "model", module)(
            input_ids=batch
        )
    else:
        options["window"] = 1

    def module():
        L.seed_everything(0, verbose=False)
        return LanguageModel(
            new_model(settings, tokenizer), settings.learning_rate, settings.max_steps
        )

    online = GeometryMonitor(**options)
    trainer(tmp_path, callbacks=[online], max_epochs=1).fit(
        module(), training_batches(ids, settings)
    )
    by_hand = module()
    configured = by_hand.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    model = by_hand.model
    if not with_probe:  # the batches are bare tensors: it takes a word to run the last one again
        options["probe_forward"] = lambda module, batch: module(input_ids=batch)
    with StepMonitor(model, **options) as monitor:
        for step, batch in enumerate(training_batches(ids, settings)):
            with monitor.step(step, batch):
                model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert steps(monitor) == [0, 1, 2, 3, 4, 6, 7]
    pd.testing.assert_frame_equal(
        pd.DataFrame(monitor.history), pd.DataFrame(online.history), check_exact=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_inside", [False, True])
@pytest.mark.parametrize("with_probe", [False, True])
def test_training_is_bit_for_bit_the_same_with_the_monitor(optimizer_inside, with_probe):
    options = {"num_steps": 11, "accumulate": 2, "optimizer_inside": optimizer_inside}
    plain, _ = loop(**options)
    state, before = random_state(), len(_global_optimizer_post_hooks)
    probe = loader(8, seed=1) if with_probe else None
    monitored, monitor = loop(
        **options, every_n_steps=4, window=1 if with_probe else 2, probe=probe, on_error="raise"
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    weights = zip(
        plain.model.state_dict().values(), monitored.model.state_dict().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in weights)
    after = random_state()
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:]
    assert steps(monitor) == [0, 4, 8, 11]
    assert monitored.hooks == [0] * 12
    assert len(_global_optimizer_post_hooks) == before


def test_the_batches_of_one_optimizer_step_are_one_measurement():
    _, inside = loop(
        7, 3, optimizer_inside=True, every_n_steps=4, window=2, metrics=moments, on_error="raise"
    )
    _, outside = loop(7, 3, every_n_steps=4, window=2, metrics=moments, on_error="raise")
    assert steps(inside) == [0, 4, 7]
    assert {step: value(inside, step, "embed", "n") for step in (0, 4, 7)} == dict.fromkeys(
        (0, 4, 7), 2 * 3 * 48
    )
    assert_same_history(inside, outside)


def test_hooks_are_on_the_model_inside_of_measured_steps_alone():
    monitor = StepMonitor(model := gpt_neox(), 3, metrics=moments, on_error="raise")
    inside, contexts = {}, set()
    for step in range(8):
        with (context := monitor.step(step)):
            inside[step] = hooks(model)
            model(**token_batch())
        assert hooks(model) == 0
        contexts.add(id(context) if step % 3 == 2 else 0)
    assert [step for step, count in inside.items() if count] == [0, 3, 6]
    assert len(contexts) == 2


def test_an_unmeasured_step_is_a_comparison():
    monitor = StepMonitor(model := gpt_neox(), 10**6, metrics=moments)
    batch, calls = token_batch(), []
    with monitor.step(0, batch):
        model(**batch)
    with monitor.step(1, batch):  # completes the measurement
        pass
    assert steps(monitor) == [0]
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        for step in range(2, 20_002):
            with monitor.step(step, batch):
                pass
    finally:
        sys.setprofile(None)
    assert len(calls) <= 20_000 * 4 + 100  # step, the batch kept, into and out of a null context
    assert monitor.step(30_000, batch) is monitor.step(30_001, batch)


@pytest.mark.parametrize("close", [False, True])
def test_a_loop_that_just_ends_loses_the_last_weights_alone(close):
    logged = {}
    _, monitor = loop(
        5, close=close, every_n_steps=4, metrics=moments, log=logged.__setitem__, on_error="raise"
    )
    assert list(logged) == steps(monitor) == [0, 4, 5] if close else [0, 4]
    assert logged[4]["geometry.n/mean"] == 48


def test_without_an_optimizer_of_torchs_the_next_step_completes_a_measurement():
    monitor = StepMonitor(model := gpt_neox(), 2, metrics=moments, on_error="raise")
    logged = []
    for step in range(4):
        with monitor.step(step, batch := token_batch()):
            model(**batch)
        logged.append(steps(monitor))
    assert logged == [[], [0], [0], [0, 2]]
    other = torch.nn.Linear(2, 2)
    with monitor.step(4, batch):
        model(**batch)
    torch.optim.SGD(other.parameters()).step()
    assert steps(monitor) == [0, 2]
    monitor.close(step=4)
    assert steps(monitor) == [0, 2, 4]
    assert hooks(model) == 0
    with monitor.step(6, batch):
        model(**batch)
    monitor.close()
    assert steps(monitor) == [0, 2, 4]


class Run:
    """As a run of Weights & Biases."""

    def __init__(self):
        self.rows = {}

    def log(self, data, step=None):
        self.rows[step] = data


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_the_scalars_reach_whatever_is_given_as_the_log(tmp_path):
    values, run = {}, Run()
    csv, board = (
        CSVLogger(tmp_path, name="csv", version=""),
        TensorBoardLogger(tmp_path, name="board", version=""),
    )
    writer = SummaryWriter(tmp_path / "writer")
    for log in (values.__setitem__, run, csv, board, writer):
        _, monitor = loop(3, every_n_steps=2, metrics=moments, log=log, on_error="raise")
    writer.close()
    csv.save()
    board.finalize("success")
    assert list(values) == [0, 2, 3]
    pd.testing.assert_frame_equal(pd.DataFrame(values), pd.DataFrame(run.rows))
    table = pd.read_csv(tmp_path / "csv" / "metrics.csv").set_index("step")
    assert table["geometry.V/mean"].tolist() == pytest.approx(
        [row["geometry.V/mean"] for row in values.values()]
    )
    shown = []
    for folder in ("board", "writer"):
        events = EventAccumulator(str(tmp_path / folder), size_guidance={"scalars": 0}).Reload()
        tags = events.Tags()
        assert set(values[0]) <= set(tags["scalars"])
        assert events.Scalars("geometry.V/mean")[-1].value == pytest.approx(
            values[3]["geometry.V/mean"]
        )
        assert {"geometry.curves/M_over_Q", "geometry.shares/M, V_W, V_B"} <= set(tags["images"])
        assert "custom_scalars__config__" in tags["tensors"]
        shown.append((sorted(tags["images"]), sorted(tags["tensors"])))
        history = pd.read_parquet(tmp_path / folder / "history.parquet")
        pd.testing.assert_frame_equal(history, pd.DataFrame(monitor.history)[list(history)])
    assert shown[0] == shown[1]


@pytest.mark.usefixtures("unpainted")
def test_two_monitors_share_the_charts_of_a_writer(tmp_path):
    writer = SummaryWriter(tmp_path)
    model = gpt_neox()
    monitors = [
        StepMonitor(model, metrics=moments, log=writer, prefix=name, on_error="raise")
        for name in "ab"
    ]
    with monitors[0].step(0), monitors[1].step(0):
        model(**token_batch())
    for monitor in monitors:
        monitor.close()
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    layout = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    assert b"a: at a glance" in layout
    assert b"b: at a glance" in layout


def test_the_types_of_the_options_are_those_of_the_other_monitors():
    parameters = signature(GeometryMonitor).parameters
    expected = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if name != "every_n_steps"
    }
    assert expected == MonitorOptions.__annotations__


def test_a_log_of_another_kind_is_refused():
    with pytest.raises(
        TypeError, match=r"log must be a function \(step, {tag: value}\).*; got str"
    ):
        StepMonitor(gpt_neox(), log="runs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "*.mpl"}, "matches no layer"),
        ({"metrics": lambda dim: [*moments(dim), *moments(dim)]}, "both give 'n'"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        StepMonitor(gpt_neox(), **options)


@pytest.mark.parametrize("broken", [Breaks, BreaksLate])
@pytest.mark.parametrize("with_probe", [False, True])
def test_a_failure_gives_one_warning_and_leaves_training_as_it_is(broken, with_probe):
    plain, _ = loop()
    options = {"metrics": lambda dim: [broken(dim)], "probe": loader(8) if with_probe else None}
    with pytest.warns(
        UserWarning, match="StepMonitor is off for the rest of this run.*broken metric"
    ) as caught:
        monitored, monitor = loop(every_n_steps=2, **options)
    assert len(caught) == 1
    assert monitor.history == []
    assert monitored.hooks == [0] * 7
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    with pytest.raises(RuntimeError, match="broken metric"):
        loop(every_n_steps=2, on_error="raise", **options)


def test_a_log_that_raises_turns_monitoring_off():
    def full(step, values):
        raise OSError("No space left on device")

    with pytest.warns(UserWarning, match="OSError: No space left on device") as caught:
        _, monitor = loop(every_n_steps=2, log=full)
    assert len(caught) == 1
    assert steps(monitor) == [0]


@pytest.mark.parametrize("fails_at", [2, 3])
def test_an_exception_of_the_loop_passes_through_and_nothing_stays_attached(tmp_path, fails_at):
    made, monitors = [], []
    before = len(_global_optimizer_post_hooks)

    def keep(model):
        made.append(model)
        return model

    class Keeping(StepMonitor):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            monitors.append(self)

    with pytest.raises(UserError, match="in the loop's body") as caught:
        loop(
            fails_at=fails_at,
            model=keep,
            kind=Keeping,
            every_n_steps=2,
            window=1,
            metrics=moments,
            folder=tmp_path,
        )
    assert caught.value.__context__ is None
    assert hooks(made[0]) == 0
    (monitor,) = monitors
    with pytest.raises(UserError), monitor:  # ends the run without measuring
        raise UserError
    assert steps(monitor) == [0] if fails_at == 2 else [0, 2]
    assert sorted(pd.read_parquet(tmp_path / "history.parquet")["step"].unique()) == steps(monitor)
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.parametrize("ends", ["dropped", "closed by log"])
def test_the_end_of_a_monitor_while_torch_goes_through_its_hooks_leaves_the_step_as_it_is(ends):
    """A monitor that is garbage is collected at any moment, also between two hooks of an
    optimizer.
    """
    model = gpt_neox()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def log(step, values):
        monitor.close()

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(lambda *call: gc.collect()).remove)
        monitor = StepMonitor(
            model, metrics=moments, every_n_steps=1, window=1, log=log, on_error="raise"
        )
        with monitor.step(0):
            model(**token_batch(2), labels=token_batch(2)["input_ids"]).loss.backward()
        stack.callback(register_optimizer_step_post_hook(lambda *call: None).remove)
        if ends == "dropped":
            monitor.itself = monitor  # so that only the collector finds it
            monitor = None
        optimizer.step()
        if ends != "dropped":
            assert steps(monitor) == [0]


def test_a_batch_that_fails_is_not_measured_and_the_next_one_is():
    monitor = StepMonitor(model := gpt_neox(), metrics=moments, on_error="raise")

    def fails():
        with monitor.step(0):
            model(**token_batch(2))
            raise UserError

    with pytest.raises(UserError):
        fails()
    with monitor.step(0):
        model(**token_batch(3))
    monitor.close()
    assert value(monitor, 0, "block.02", "n") == 36


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_steps_that_go_back_turn_monitoring_off_and_what_was_being_measured_is_kept(
    tmp_path, window, background
):
    options = {"window": window, "background": background, "folder": tmp_path, "metrics": moments}
    monitor = StepMonitor(model := gpt_neox(), 2, **options)

    def epoch():
        for step in range(5):
            with monitor.step(step):
                model(**token_batch())

    epoch()
    with pytest.warns(
        UserWarning,
        match="optimizer steps taken in the whole run, over all epochs; got 0 after 4. Count on",
    ) as caught:
        epoch()
    monitor.close()
    (reason,) = [str(each.message) for each in caught]
    assert "\n" not in reason
    assert {step: value(monitor, step, "embed", "n") for step in steps(monitor)} == {
        0: 48 * window,
        2: 48 * window,
        4: 48,
    }
    assert sorted(pd.read_parquet(tmp_path / "history.parquet")["step"].unique()) == [0, 2, 4]


def test_a_step_that_goes_back_is_an_error_and_what_was_being_measured_is_kept():
    monitor = StepMonitor(model := gpt_neox(), 2, metrics=moments, on_error="raise")
    with monitor.step(2):
        model(**token_batch())
    with pytest.raises(ValueError, match="got 1 after 2"), monitor.step(1):
        model(**token_batch())
    assert steps(monitor) == [2]
    assert hooks(model) == 0


def test_a_resumed_loop_goes_on_in_the_schedule():
    monitor = StepMonitor(
        model := gpt_neox(), 2, metrics=moments, probe=[token_batch()], on_error="raise"
    )
    assert monitor.state_dict() == {}
    for step in range(4):
        with monitor.step(step):
            model(**token_batch())
    saved = monitor.state_dict()
    resumed = StepMonitor(model, 2, metrics=moments, probe=[token_batch()], on_error="raise")
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        with resumed.step(step):
            model(**token_batch())
    assert steps(resumed) == [4]
    assert steps(monitor) == [0, 2]


def go_on(monitor, model):
    with monitor:
        for step in range(5, 10):
            with monitor.step(step, token_batch()):
                model(**token_batch())


def test_a_run_that_goes_on_in_a_window_but_finds_no_memory_is_left_alone():
    def full(dim):
        if not model.training:  # when the run begins, not when the monitor is made
            raise torch.OutOfMemoryError("tried to allocate 1.5 EiB")
        return [EmbeddingMoments(dim)]

    monitor = StepMonitor(model := gpt_neox(), 4, metrics=full, window=3)
    monitor.load_state_dict({"last_step": 4, "window_start": 4})
    model.eval()
    with pytest.warns(UserWarning, match="is off for the rest of this run.*1.5 EiB") as caught:
        go_on(monitor, model)
    assert len(caught) == 1
    assert monitor.history == []


def test_the_last_batch_runs_in_the_modes_of_training_also_after_an_evaluation():
    _, expected = loop(
        3, every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise"
    )
    made, monitor = loop(3, close=False, every_n_steps=2, metrics=moments, on_error="raise")
    made.model.eval()
    monitor.close()
    assert_same_history(monitor, expected)
    assert not any(module.training for module in made.model.modules())


@pytest.mark.slow
def test_a_compiled_model_is_measured_and_its_other_steps_stay_compiled():
    _, plain = loop(
        4, every_n_steps=3, metrics=moments, model=lambda model: model.eval(), on_error="raise"
    )
    compiled = lambda model: torch.compile(model.eval(), backend="aot_eager")  # noqa: E731
    _, monitor = loop(4, every_n_steps=3, metrics=moments, model=compiled, on_error="raise")
    assert steps(monitor) == steps(plain) == [0, 3, 4]
    pairs = zip(monitor.history, plain.history, strict=True)
    assert all(a["value"] == pytest.approx(b["value"], rel=1e-3, nan_ok=True) for a, b in pairs)


def test_lightning_and_the_loop_log_under_the_same_tags(tmp_path):
    values = {}
    loop(3, every_n_steps=2, metrics=moments, log=values.__setitem__, on_error="raise")
    _, run = fit(tmp_path, GeometryMonitor(2, metrics=moments), max_steps=3)
    assert set(values[0]) == {tag for tag in run.callback_metrics if tag.startswith("geometry.")}
