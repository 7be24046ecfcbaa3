"""Faults of the monitor end no run, those of others are what the user sees, and nothing stays
attached.
"""

import errno
import io
import math
import os
import warnings
from contextlib import ExitStack
from typing import ClassVar
from weakref import WeakSet

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    GeometryMonitor,
    StepMonitor,
    TokenMoments,
    observe,
)
from tests.models import NanoGPT, gpt_neox, hooks, token_batch
from tests.training.loops import loop, run_whole
from tests.training.runs import (
    ANSWERS,
    Answers,
    TinyLM,
    UserError,
    all_warnings,
    assert_same_random_state,
    fit,
    loader,
    moments,
    of_monitors,
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


class Full(CSVLogger):
    def log_metrics(self, metrics, step=None):
        if "geometry.V/mean" in metrics:
            raise OSError("No space left on device")


def test_a_logger_that_fails_leaves_the_run_and_gives_one_warning_or_is_raised(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments)
    said = "No space left on device"
    with pytest.warns(UserWarning, match=f"GeometryMonitor is off .*{said}") as caught:
        module, run = fit(tmp_path, monitor, max_steps=5, logger=Full(tmp_path))
    assert len(of_monitors(caught)) == 1
    assert run.global_step == 5
    assert steps(monitor) == [0]
    raised = TinyLM()
    failing = GeometryMonitor(2, metrics=moments, on_error="raise")
    with pytest.raises(OSError, match=said):
        fit(tmp_path, failing, module=raised, logger=Full(tmp_path))
    assert hooks(module) == hooks(raised) == 0


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
        _, run = fit(tmp_path, monitor, Watch(), max_steps=4)
    assert run.global_step == 4
    assert held == [0] * 4


@pytest.mark.parametrize(("answer", "place", "message"), ANSWERS)
def test_what_a_metric_of_the_users_does_wrong_is_told_with_metric_key_and_layer(
    answer, place, message
):
    model, ids = nn.Sequential(nn.Embedding(96, 4), nn.Linear(4, 4)), token_batch()["input_ids"]
    errors = TypeError, ZeroDivisionError

    def metrics(dim):
        return [EmbeddingMoments(dim), Answers(answer, place)]

    with pytest.raises(errors, match=message) as caught:  # noqa: PT012
        with observe(model, "0", metrics) as geometry:
            model(ids)
        geometry.compute()
    assert caught.value.__notes__ == ["in Answers", "at layer '00'"]
    assert hooks(model) == 0
    options = {"every_n_steps": 1, "layers": "0", "metrics": metrics}
    off = "StepMonitor is off for the rest of this run, training goes on:"

    def run_two():
        warnings.simplefilter("default")
        for _ in range(2):
            run_whole(monitor := StepMonitor(model, **options), 3, lambda: model(ids))
            assert monitor.history == []

    with pytest.warns(UserWarning, match=rf"{off}.*{message}.* in Answers at layer '00'") as warned:
        run_two()
    assert len(warned) == 2  # each of them, in the same words


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


def test_one_monitor_measures_another_run_after_a_crash_in_a_window(tmp_path):
    class Stops(TinyLM):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise UserError
            return super().training_step(batch, batch_idx)

    monitor = GeometryMonitor(4, window=4, metrics=moments, on_error="raise")
    with pytest.raises(UserError):
        fit(tmp_path, monitor, module=Stops(), max_steps=6)
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
    monitor = GeometryMonitor(100, extra_steps=(1, 2), on_error="raise")
    options = {"module": Diverged(), "logger": CSVLogger(tmp_path), "gradient_clip_val": 1.0}
    _, run = fit(tmp_path, monitor, max_steps=4, **options)
    assert steps(monitor) == [0, 1, 2, 4]
    assert value(monitor, 1, "block.01", "n_nonfinite") == 0
    assert value(monitor, 2, "block.01", "n_nonfinite") == 4
    assert value(monitor, 2, "block.01", "n") == 44
    # the weights are not finite either by now
    assert run.callback_metrics["geometry.n_nonfinite/block.01"] == 48
    assert run.callback_metrics["geometry.V/block.01"].isnan()


def test_what_only_the_model_can_tell_is_refused_before_the_first_step(tmp_path):
    module = TinyLM()
    with pytest.raises(ValueError, match="matches no layer"):
        fit(tmp_path, GeometryMonitor(2, layers="*.mpl"), module=module, max_steps=4)
    assert module.losses == []


@pytest.mark.parametrize(
    "options", [{}, {"skip_first_positions": 50}, {"mask": lambda batch: torch.zeros(4, 12)}]
)
@pytest.mark.parametrize("metrics", [moments, lambda dim: [Anisotropy(dim)]])
def test_nothing_to_measure_is_told_once(options, metrics):
    model, ids = NanoGPT(), token_batch(4 if options else 0)["input_ids"]
    monitor = StepMonitor(model, 1, metrics=metrics, probe=[ids], **options)
    with pytest.warns(UserWarning, match="no token is left") as caught:
        run_whole(monitor, 2, lambda: model(ids))
    assert len(caught) == 1
    assert steps(monitor) == [0, 1, 2]


class Exhausted:
    """A probe that has batches once."""

    def __init__(self):
        self.left = iter([token_batch()] * 2)

    def __iter__(self):
        return self.left


@pytest.mark.parametrize("probe", [iter([]), torch.ones(2, 3), {"input_ids": torch.ones(2, 3)}])
def test_a_probe_that_does_not_give_batches_again_and_again_is_refused(probe):
    with pytest.raises(TypeError, match="probe must"):
        GeometryMonitor(probe=probe)


def test_a_probe_that_has_fewer_batches_later_is_told_once():
    said = "StepMonitor: probe must give the same batches .* at step 1 it gave 0, before 2"
    with pytest.warns(UserWarning, match=said) as caught:
        loop(3, every_n_steps=1, metrics=moments, probe=Exhausted())
    assert len(caught) == 1


class FileSystem:
    """Calls on paths in a folder fail from the one of this number on, as those of a lost mount."""

    def __init__(self, monkeypatch, folder):
        self.folder = str(folder)
        self.left = math.inf
        for owner, names in (
            (os, "stat mkdir open rename replace unlink scandir listdir"),
            (io, "open"),
        ):
            for name in names.split():
                monkeypatch.setattr(owner, name, self.losing(getattr(owner, name)))

    def losing(self, call):
        def lost(path, *args, **kwargs):
            if str(path).startswith(self.folder):
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return call(path, *args, **kwargs)

        return lost


@pytest.mark.parametrize("left", range(12))
def test_a_file_system_that_is_lost_at_any_call_ends_no_training(tmp_path, monkeypatch, left):
    (tmp_path / "run").mkdir()
    files = FileSystem(monkeypatch, tmp_path / "run")
    monitor = GeometryMonitor(2, metrics=moments, folder=tmp_path / "run")
    files.left = left
    with all_warnings() as caught:
        _, run = fit(tmp_path, monitor, max_steps=4)
    files.left = math.inf
    assert run.global_step == 4
    assert steps(monitor) == [0, 2, 4]
    assert len(of_monitors(caught)) <= 1


def spoil(*tensors):
    """Draw from the global generator, and write into tensors."""
    torch.rand(1)
    for each in tensors:
        each.zero_()


class Spoils(Answers):
    """A user's metric that takes no care."""

    def update(self, embeddings, **ids):
        spoil(embeddings, *ids.values())

    def compute(self):
        spoil()
        return {}

    def reset(self):
        spoil()
        super().reset()


class SpoilsRows(EmbeddingMoments):
    def update_states(self, rows):
        spoil(rows.embeddings, rows.ids.token_ids)


def spoiling(dim):
    spoil()
    return [Spoils(None), SpoilsRows(dim)]


def trained(*, measured):
    L.seed_everything(0, verbose=False)
    model, batch = gpt_neox(hidden_dropout=0.1), token_batch()
    with ExitStack() as stack:
        if measured:
            mask = lambda batch: spoil() or batch["input_ids"] == 0  # noqa: E731
            monitor = StepMonitor(model, mask=mask, metrics=spoiling)
            stack.enter_context(monitor.step(0, batch))
            geometry = stack.enter_context(observe(model, "*.mlp", spoiling))
        model(**batch, labels=batch["input_ids"]).loss.backward()
    if measured:
        geometry.compute()
        geometry.reset()
    return random_state(), [weight.grad for weight in model.parameters()]


def test_what_a_user_draws_and_writes_changes_no_training():
    (before, expected), (after, gradients) = trained(measured=False), trained(measured=True)
    assert_same_random_state(before, after)
    assert all(map(torch.equal, gradients, expected))
