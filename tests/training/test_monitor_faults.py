"""Faults of the monitor end no run, those of others are what the user sees, and nothing stays
attached.
"""

import gc
import random
import warnings
from inspect import signature
from typing import ClassVar
from weakref import WeakSet

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch._dynamo import eval_frame
from torch.utils.data import DataLoader
from torchmetrics import Metric

from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    GeometryMonitor,
    StepMonitor,
    TokenMoments,
    observe,
)
from embedgeo.capture.calls import kept_random_states
from tests.models import NanoGPT, gpt_neox, hooks, token_batch
from tests.ranks import on_two_ranks
from tests.training.loops import loop
from tests.training.runs import (
    Breaks,
    BreaksLate,
    TinyLM,
    UserError,
    fit,
    loader,
    moments,
    raises_in,
    random_state,
    steps,
    value,
)


class FullAtTheThirdLayer(TokenMoments):
    """Fails at the third layer, and takes memory before that."""

    updates = 0
    made: ClassVar = WeakSet()

    def __init__(self, dim):
        super().__init__(dim)
        FullAtTheThirdLayer.made.add(self)

    def update(self, embeddings, token_ids=None, mask=None):
        super().update(embeddings, token_ids, mask)
        FullAtTheThirdLayer.updates += bool(len(embeddings))
        if FullAtTheThirdLayer.updates == 3:
            raise torch.OutOfMemoryError("tried to allocate 1.5 EiB")


class Answers(Metric):
    """A user's metric; of rows it raises, or returns, what it is given, of none it may look
    right.
    """

    full_state_update = False

    def __init__(self, answer, place="compute", *, looks_right=True):
        super().__init__()
        self.answer, self.place, self.looks_right = answer, place, looks_right
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, embeddings):
        self.rows = self.rows + len(embeddings)
        if self.place == "update" and (self.rows or not self.looks_right):
            raise self.answer("no rows")

    def compute(self):
        if self.looks_right and not self.rows:
            return {"share": torch.tensor(1)}  # an integer is a number
        if self.answer is ZeroDivisionError:
            raise self.answer("no rows")
        return self.answer


ANSWERS = [
    (ZeroDivisionError, "compute", "no rows"),
    (ZeroDivisionError, "update", "no rows"),
    (None, "compute", "must return a dict of real tensors .*; got NoneType"),
    (0.5, "compute", "must return a dict .*; got float"),
    (torch.tensor(0.5), "compute", "must return a dict .*; got Tensor"),
    ({"share": 0.5}, "compute", "got float for 'share'"),
    ({"share": torch.ones(3)}, "compute", r"got torch.float32 of shape \(3,\) for 'share'"),
    ({3: torch.tensor(0.5)}, "compute", "got the key 3"),
    ({"share": torch.tensor(1j)}, "compute", r"got torch.complex64 of shape \(\) for 'share'"),
]


@pytest.fixture(autouse=True)
def stance():
    """The compiler's stance: as it was, whatever happened."""
    before = eval_frame._stance
    yield
    assert eval_frame._stance is before


@pytest.mark.parametrize("broken", [Breaks, BreaksLate])
@pytest.mark.parametrize("with_probe", [False, True])
def test_a_failure_in_a_metric_leaves_the_run_and_gives_one_warning(tmp_path, broken, with_probe):
    plain, _ = fit(tmp_path, max_steps=6)
    monitor = GeometryMonitor(
        2, metrics=lambda dim: [broken(dim)], probe=loader(8) if with_probe else None
    )
    with pytest.warns(UserWarning, match="GeometryMonitor") as caught:
        module, run = fit(tmp_path, monitor, max_steps=6)
    (warning,) = (str(w.message) for w in caught if "GeometryMonitor" in str(w.message))
    assert "layer 'embed'" in warning
    assert "RuntimeError: broken metric" in warning
    assert run.global_step == 6
    assert hooks(module) == 0
    assert monitor.history == []
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True)
    )


def test_running_out_of_memory_in_a_metric_frees_what_the_monitor_holds_at_once(tmp_path):
    held = []

    class Watch(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            held.append(sum(len(each.type_mean) for each in FullAtTheThirdLayer.made))

    FullAtTheThirdLayer.updates = 0
    FullAtTheThirdLayer.made.clear()
    monitor = GeometryMonitor(2, metrics=lambda dim: [FullAtTheThirdLayer(dim)])
    with pytest.warns(
        UserWarning, match="tried to allocate 1.5 EiB in FullAtTheThirdLayer at layer 'block.01'"
    ):
        _, run = fit(tmp_path, monitor, Watch(), max_steps=6)
    assert run.global_step == 6
    assert held == [0] * 6
    assert FullAtTheThirdLayer.updates == 3


@pytest.mark.parametrize(("answer", "place", "message"), ANSWERS)
def test_what_a_metric_of_the_users_does_wrong_is_told_with_metric_key_and_layer(
    answer, place, message
):
    model, batch = gpt_neox(), token_batch()

    def metrics(dim):
        return [EmbeddingMoments(dim), Answers(answer, place)]

    with pytest.raises((TypeError, ZeroDivisionError), match=message) as caught:  # noqa: PT012
        with observe(model, metrics=metrics) as geometry:
            model(**batch)
        geometry.compute()
    assert caught.value.__notes__ == ["in Answers", "at layer 'embed'"]

    monitor = StepMonitor(model, 1, metrics=metrics, on_error="raise")
    with pytest.raises((TypeError, ZeroDivisionError), match=message), monitor, monitor.step(0):
        model(**batch)

    with pytest.warns(UserWarning, match=rf"{message}.* in Answers at layer 'embed'") as warned:
        _, monitor = loop(3, every_n_steps=1, metrics=metrics)
    assert [str(w.message).partition(":")[0] for w in warned] == [
        "StepMonitor is off for the rest of this run, training goes on"
    ]
    assert monitor.history == []


@pytest.mark.parametrize(("answer", "place", "message"), ANSWERS)
def test_what_a_metric_of_the_users_does_wrong_without_rows_is_refused_when_the_monitor_is_made(
    answer, place, message
):
    with pytest.raises((TypeError, ZeroDivisionError), match=message) as caught:
        GeometryMonitor(metrics=lambda dim: [Answers(answer, place, looks_right=False)])
    assert caught.value.__notes__ == ["in Answers, given no rows, as a rank may be"]


def metrics_that_answer(rank, folder):
    """The warnings and the number of records on a rank of which one has metrics that return, or
    raise, the wrong.
    """
    results = []
    model, batch = gpt_neox(), token_batch()
    for answer, place, _ in ANSWERS:
        for who in (0, 1, dist.get_world_size()):  # the last: all
            made = {"share": torch.tensor(0.5)}, "compute"
            made = (answer, place) if who in (rank, dist.get_world_size()) else made
            with (
                warnings.catch_warnings(record=True) as caught,
                StepMonitor(model, 1, metrics=lambda dim, made=made: [Answers(*made)]) as monitor,
            ):
                warnings.simplefilter("always")
                for step in range(3):
                    with monitor.step(step):
                        model(**batch)
                    dist.all_reduce(torch.ones(()))  # the training's
            results.append(([str(w.message) for w in caught], len(monitor.history)))
    return results


@pytest.mark.slow
def test_what_a_metric_of_the_users_does_wrong_on_one_of_two_ranks_hangs_nobody(tmp_path):
    for cases in zip(*on_two_ranks(metrics_that_answer, tmp_path, tmp_path), strict=True):
        told = [message for messages, _ in cases for message in messages]
        assert any("in Answers at layer 'embed'" in message for message in told)
        for messages, _ in cases:
            assert len(messages) == 1
            assert "is off for the rest of this run" in messages[0]


@pytest.mark.parametrize("broken", [Breaks, BreaksLate])
def test_a_failure_can_be_raised(tmp_path, broken):
    monitor = GeometryMonitor(2, metrics=lambda dim: [broken(dim)], on_error="raise")
    module = TinyLM()
    with pytest.raises(RuntimeError, match="broken metric"):
        fit(tmp_path, monitor, module=module, max_steps=6)
    assert hooks(module) == 0


def test_a_logger_that_raises_turns_monitoring_off(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "geometry.V/mean" in metrics:
                raise OSError("No space left on device")

    monitor = GeometryMonitor(2, metrics=moments)
    with pytest.warns(UserWarning, match="OSError: No space left on device"):
        module, run = fit(tmp_path, monitor, max_steps=6, logger=Full(tmp_path))
    assert run.global_step == 6
    assert steps(monitor) == [0]
    assert hooks(module) == 0


def test_random_states_are_restored_also_after_an_exception():
    def draw():
        return {}[torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002

    before = random_state()
    with pytest.raises(KeyError), kept_random_states():
        draw()
    after = random_state()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_keeping_random_states_does_not_initialise_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", pytest.fail)
    with kept_random_states():
        torch.rand(1)


@pytest.mark.parametrize(
    "place", ["training_step", "on_after_backward", "on_before_optimizer_step"]
)
@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_exception_in_training_is_the_one_the_user_sees(tmp_path, place, error):
    module, made = raises_in(place, error), WeakSet()

    def metrics(dim):
        metric = EmbeddingMoments(dim)
        made.add(metric)
        return [metric]

    monitor = GeometryMonitor(1, metrics=metrics, window=1)
    # Lightning 2.6 ends the process on Ctrl-C
    expected = SystemExit if error is KeyboardInterrupt else error
    with pytest.raises(
        expected, match=None if expected is SystemExit else "in the middle of an epoch"
    ):
        fit(tmp_path, monitor, module=module, max_steps=6)
    assert hooks(module) == 0
    assert steps(monitor) == [0, 1]
    assert made
    gc.collect()  # metrics are in reference cycles
    assert not made


def test_an_interrupt_inside_the_probes_forward_restores_the_module(tmp_path):
    class Stops(TinyLM):
        def forward(self, batch):
            raise KeyboardInterrupt

    module = Stops()
    monitor = GeometryMonitor(1, probe=loader(8), probe_forward=lambda module, batch: module(batch))
    with pytest.raises(SystemExit):
        fit(tmp_path, monitor, module=module, max_steps=6)
    assert hooks(module) == 0
    assert all(m.training for m in module.modules())


def test_a_monitor_goes_on_in_a_new_run_after_a_crash_in_a_window(tmp_path):
    monitor = GeometryMonitor(4, window=4, metrics=moments, on_error="raise")
    with pytest.raises(UserError):
        fit(tmp_path, monitor, module=raises_in("training_step", UserError), max_steps=6)
    fit(tmp_path, monitor, max_steps=4)
    assert steps(monitor) == [0, 4]
    assert value(monitor, 0, "embed", "n") == 4 * 48


class Diverged(TinyLM):
    """One position of a block's output is NaN from step 2 on, and the weights are from step 3
    on.
    """

    def training_step(self, batch, batch_idx):
        def spoil(module, args, output):
            return torch.where(torch.arange(12)[:, None] == 5, torch.nan, output)

        if batch_idx >= 2:
            with self.model.gpt_neox.layers[1].register_forward_hook(spoil, prepend=True):
                return super().training_step(batch, batch_idx).nan_to_num() * 0
        return super().training_step(batch, batch_idx)


def test_activations_that_are_not_finite_are_counted_and_nothing_is_turned_off(tmp_path):
    monitor = GeometryMonitor(1, on_error="raise")
    _, run = fit(
        tmp_path,
        monitor,
        module=Diverged(),
        max_steps=5,
        logger=CSVLogger(tmp_path),
        gradient_clip_val=1.0,
    )
    assert steps(monitor) == [0, 1, 2, 3, 4, 5]
    assert value(monitor, 1, "block.01", "n_nonfinite") == 0
    assert value(monitor, 2, "block.01", "n_nonfinite") == 4
    assert value(monitor, 2, "block.01", "n") == 44
    # the weights are not finite either by now
    assert run.callback_metrics["geometry.n_nonfinite/block.01"] == 48
    assert run.callback_metrics["geometry.V/block.01"].isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": -1}, "every_n_steps must be at least 1; got -1"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1; got 0"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"window": 6, "every_n_steps": 5}, "5 steps on; got 6"),
        ({"window": 2, "extra_steps": (9,), "every_n_steps": 5}, "1 steps on; got 2"),
        ({"window": 2, "probe": []}, "must be 1 when a probe is given"),
        ({"extra_steps": (1, -2)}, "extra_steps must be at least 0; got -2"),
        ({"skip_first_positions": -1}, "skip_first_positions must not be negative"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"seed": -1}, r"seed must be at least 0 and less than 2\*\*63; got -1"),
        (
            {"seed": 2**70},
            r"seed must be at least 0 and less than 2\*\*63; got 1180591620717411303424",
        ),
        (
            {"rows": "sum"},
            "rows must be one of 'tokens', 'mean', 'max', 'first', 'last', 'words'; got 'sum'",
        ),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        GeometryMonitor(**options)


@pytest.mark.parametrize("name", ["every_n_steps", "window", "skip_first_positions"])
@pytest.mark.parametrize("number", [1.5, True, "3", None])
def test_numbers_that_are_not_integers_are_refused(name, number):
    with pytest.raises(TypeError, match=rf"{name} must be an integer.*; got {number!r}"):
        GeometryMonitor(**{name: number})


@pytest.mark.parametrize("extra_steps", [(1, 2.5), (True,), "12", ["1"], 5])
def test_extra_steps_that_are_not_integers_are_refused(extra_steps):
    with pytest.raises(TypeError, match="extra_steps must be"):
        GeometryMonitor(extra_steps=extra_steps)


def test_numbers_of_numpy_are_integers():
    assert GeometryMonitor(np.int64(5), extra_steps=np.arange(3)).schedule.every_n_steps == 5


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"skip_first_positions": 1000},
            "skip_first_positions=1000 and the mask leave out all of them",
        ),
        (
            {"ignore_token_ids": range(96)},
            r"ignore_token_ids=range\(0, 96\) and the mask leave out all",
        ),
        ({"mask": lambda batch: batch["input_ids"] < 0}, "the mask leaves out all of them"),
    ],
)
@pytest.mark.parametrize("metrics", [None, lambda dim: [Anisotropy(dim)]])
def test_nothing_to_measure_is_told_once_with_its_cause(tmp_path, options, cause, metrics):
    monitor = GeometryMonitor(2, metrics=metrics, **options)
    with pytest.warns(
        UserWarning, match=f"no token is left to measure at step 0; {cause}"
    ) as caught:
        fit(tmp_path, monitor, max_steps=5)
    assert len([w for w in caught if "GeometryMonitor" in str(w.message)]) == 1
    assert steps(monitor) == [0, 2, 4, 5]


def test_an_unknown_argument_is_refused_with_the_one_that_may_be_meant():
    with pytest.raises(
        TypeError,
        match=r"GeometryMonitor has no argument 'every_n_step'\. Did you mean every_n_steps",
    ):
        GeometryMonitor(every_n_step=3)
    with pytest.raises(
        TypeError, match=r"StepMonitor has no argument 'layer'\. Did you mean layers\?"
    ):
        StepMonitor(TinyLM(), 3, layer="blocks")
    with pytest.raises(TypeError, match=r"GeometryMonitor has no argument 'colour'\.$"):
        GeometryMonitor(3, colour="red")
    assert "every_n_steps" in signature(GeometryMonitor).parameters


class Zero(Metric):
    """A user's metric that gives 0 for any rows."""

    full_state_update = False

    def update(self, embeddings):
        pass

    def compute(self):
        return {"nothing": torch.tensor(0.0)}


def test_a_value_of_zero_is_not_taken_for_no_token():
    _, monitor = loop(3, every_n_steps=1, metrics=lambda dim: [Zero()])
    assert {record["value"] for record in monitor.history} == {0.0}


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, "the batches are empty"),
        ({"skip_first_positions": 50}, "skip_first_positions=50 leaves out all of them"),
        ({"mask": lambda batch: torch.zeros(4, 12)}, "the mask leaves out all of them"),
    ],
)
def test_of_what_leaves_out_all_tokens_only_what_is_there_is_named(options, cause):
    model = NanoGPT()
    ids = token_batch(4 if options else 0)["input_ids"]
    monitor = StepMonitor(model, 1, metrics=moments, probe=[ids], **options)
    with pytest.warns(UserWarning, match="no token is left") as caught, monitor.step(0):
        model(ids)
    assert [str(w.message) for w in caught] == [
        f"StepMonitor: no token is left to measure at step 0; {cause}."
    ]
    monitor.close(0)


@pytest.mark.parametrize(
    "probe", [[], (), DataLoader([]), {"class_path": "builtins.list", "init_args": {}}]
)
def test_a_probe_without_batches_is_refused_when_the_monitor_is_made(probe):
    with pytest.raises(
        ValueError, match=r"probe must have at least one batch; got \w+ of length 0"
    ):
        GeometryMonitor(probe=probe)


class Shrinking:
    """A probe that has fewer batches, or shorter ones, each time."""

    def __init__(self, sizes):
        self.sizes = iter(sizes)

    def __iter__(self):
        return iter([token_batch(rows, seed=i) for i, rows in enumerate(next(self.sizes))])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            [(4, 4, 4), (4, 4, 4), (4, 4), (4,), ()],
            "were 2 and 96 at step 2, 3 and 144 at the first one",
        ),
        (
            [(4, 4), (3, 4), (2, 4), (4, 4), (4, 4)],
            "were 2 and 84 at step 1, 2 and 96 at the first one",
        ),
        ([(4,), (), (), (), ()], "were 0 and 0 at step 1, 1 and 48 at the first one"),
    ],
)
def test_a_probe_that_shrinks_is_told_once(sizes, said):
    with pytest.warns(
        UserWarning, match=f"StepMonitor: probe must give the same batches .*{said}"
    ) as caught:
        loop(4, every_n_steps=1, metrics=moments, probe=Shrinking(sizes))
    assert len(caught) == 1


def test_a_probe_that_is_gone_after_one_pass_is_refused():
    with pytest.raises(TypeError, match="got an iterator"):
        GeometryMonitor(probe=iter([]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "*.mpl"}, "matches no layer"),
        ({"metrics": lambda dim: [TokenMoments(dim), EmbeddingMoments(dim)]}, "both give 'n'"),
    ],
)
def test_what_only_the_model_can_tell_is_refused_before_the_first_step(tmp_path, options, message):
    module = TinyLM()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, GeometryMonitor(2, **options), module=module, max_steps=4)
    assert module.losses == []


def test_layers_that_no_forward_pass_reaches_are_named_once(tmp_path):
    monitor = GeometryMonitor(2, layers=["block.01", "gpt_neox.layers"], metrics=moments)
    with pytest.warns(UserWarning, match="GeometryMonitor") as caught:
        fit(tmp_path, monitor, max_steps=6)
    messages = [str(w.message) for w in caught if "GeometryMonitor" in str(w.message)]
    assert messages == ["GeometryMonitor: no forward pass reached gpt_neox.layers."]
    assert steps(monitor) == [0, 2, 4, 6]
