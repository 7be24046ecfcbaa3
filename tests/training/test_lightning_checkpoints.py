"""What ModelCheckpoint and EarlyStopping see of the geometry: values of the weights that are saved,
in time.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from embedgeo import GeometryMonitor
from tests.docs.blocks import blocks
from tests.training.runs import (
    OPTIONS,
    RESUMED,
    Answers,
    Manual,
    TinyLM,
    UserError,
    ValidatedLM,
    fit,
    in_one_process,
    interrupted,
    loader,
    moments,
    steps,
    value,
)

TAG = "geometry.V/block.01"

pytestmark = RESUMED


def held_out():
    return loader(8, seed=1)


def measured(path):
    """The value of the weights in a checkpoint."""
    module = TinyLM().eval()
    saved = torch.load(path, weights_only=True)
    module.load_state_dict(saved["state_dict"])
    return in_one_process(module.model, held_out(), metrics=moments)["block.01"]["V"]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (TinyLM, {"max_steps": 4, "accumulate_grad_batches": 2}),
        (lambda: Manual(optimizers=2), {"max_steps": 6}),
        (ValidatedLM, {"max_steps": 4, "val": loader(4), "val_check_interval": 2}),
    ],
)
def test_each_checkpoint_is_scored_by_the_weights_it_holds(tmp_path, make, options):
    when = {} if "val" in options else {"every_n_train_steps": 2}
    best = ModelCheckpoint(tmp_path, monitor=TAG, save_top_k=-1, filename="{step}", **when)
    monitor = GeometryMonitor(2, probe=held_out(), **OPTIONS)
    fit(tmp_path, monitor, best, module=make(), data=loader(), enable_checkpointing=True, **options)
    assert len(best.best_k_models) >= 2
    for path, score in best.best_k_models.items():
        assert score.item() == pytest.approx(measured(path), rel=1e-6), path
    assert len({score.item() for score in best.best_k_models.values()}) == len(best.best_k_models)


def test_a_checkpoint_that_is_named_after_a_value_is_a_file_as_the_documentation_shows(
    tmp_path, monkeypatch
):
    (shown,) = [
        each.code
        for each in blocks("docs/how-to/checkpoints.md", "python")
        if "auto_insert_metric_name" in each.code
    ]
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(shown.replace("every_n_train_steps=100", "every_n_train_steps=2"), found)
    plain = ModelCheckpoint("plain", filename="{step}-{geometry.V/mean:.3f}", every_n_train_steps=2)
    monitor = GeometryMonitor(2, probe=held_out(), **OPTIONS)
    fit(
        tmp_path,
        monitor,
        found["best"],
        plain,
        data=loader(),
        max_steps=2,
        enable_checkpointing=True,
    )
    mean = f"{sum(value(monitor, 2, f'block.0{i}', 'V') for i in range(3)) / 3:.3f}"
    assert [str(path) for path in Path("checkpoints").rglob("*")] == [
        f"checkpoints/step=2-V={mean}.ckpt"
    ]
    assert [str(path) for path in Path("plain").rglob("*.ckpt")] == [
        f"plain/step=2-geometry.V/mean={mean}.ckpt"
    ]


def test_a_checkpoint_cannot_be_scored_by_a_training_batch(tmp_path):
    options = {"max_steps": 4, "enable_checkpointing": True}
    best = ModelCheckpoint(tmp_path, monitor=TAG, every_n_train_steps=2)
    with pytest.raises(
        ValueError, match=r"monitor='geometry.V/block.01'.* before the step.*probe="
    ):
        fit(tmp_path, GeometryMonitor(2, metrics=moments), best, **options)
    # another monitor's prefix may begin in the same way
    best = ModelCheckpoint(tmp_path, monitor="geometry.held.V/block.01", every_n_train_steps=2)
    held = GeometryMonitor(2, metrics=moments, probe=held_out(), prefix="geometry.held")
    fit(tmp_path, GeometryMonitor(2, metrics=moments), held, best, **options)
    assert best.best_model_score.item() == pytest.approx(measured(best.best_model_path), rel=1e-6)


def test_a_probe_measured_when_a_checkpoint_was_saved_is_neither_repeated_nor_lost(tmp_path):
    options = {"every_n_steps": 3, "probe": held_out(), "metrics": moments, "measure_last": False}
    first, second = (GeometryMonitor(**options, on_error="raise") for _ in range(2))
    interrupted(tmp_path, [first], [second], at=3, end=6)
    assert (steps(first), steps(second)) == ([0, 3], [6])


def test_early_stopping_waits_for_the_first_measurement(tmp_path):
    stop = EarlyStopping("geometry.n/mean", patience=2, mode="max", check_on_train_epoch_end=False)
    monitor = GeometryMonitor(20, window=4, **OPTIONS)
    options = {"max_steps": 50, "val": loader(4), "val_check_interval": 1}
    _, run = fit(tmp_path, stop, monitor, module=ValidatedLM(), **options)
    assert stop.strict
    assert 4 <= run.global_step < 10


ONCE = {"once": torch.tensor(1.0)}
UNDEFINED = {"once": torch.tensor(torch.nan)}


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric")
@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (None, ONCE, "is off"),
        (ONCE, {}, ""),
        (ONCE, UNDEFINED, ""),
        ({}, ONCE, r"acts on geometry\.once/block\.01, geometry\.once/mean does"),
    ],
)
def test_what_acts_on_a_value_that_is_missing_does_not_end_training(tmp_path, first, then, told):
    class Scheduled(ValidatedLM):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            options = {"monitor": "geometry.once/mean", "interval": "step", "frequency": 1}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}

    def forward(module, batch):
        if first is None:
            raise UserError
        module.model(**batch)

    answer = dict(first or {})
    metrics = lambda dim: [*moments(dim), Answers(answer)]  # noqa: E731
    change = lambda *_: answer.clear() or answer.update(then)  # noqa: E731
    options = {"metrics": metrics, "probe_forward": forward, "listeners": [change]}
    monitor = GeometryMonitor(2, probe=held_out(), **options)
    tags = "geometry.once/mean", "geometry.once/block.01"
    stops = [EarlyStopping(tag, patience=9, check_on_train_epoch_end=False) for tag in tags]
    saved = ModelCheckpoint(tmp_path, monitor="geometry.once/block.01", save_top_k=-1)
    quick = {"val": loader(4), "val_check_interval": 1, "enable_checkpointing": True}
    module = Scheduled()
    with pytest.warns(UserWarning, match=told) if told else nullcontext():
        _, run = fit(tmp_path, monitor, saved, *stops, module=module, max_steps=6, **quick)
    assert run.global_step == 6
    assert saved.best_k_models
    if first is None or then is not ONCE:
        assert run.optimizers[0].param_groups[0]["lr"] == 1e-3
    assert all(each.strict and each.check_finite for each in stops)


def test_a_resumed_run_has_the_last_values_until_it_measures(tmp_path):
    def callbacks():
        stop = EarlyStopping(TAG, patience=100, check_on_train_epoch_end=False)
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=2)
        return GeometryMonitor(4, probe=held_out(), **OPTIONS), stop, saved

    options = {
        "val": loader(4),
        "val_check_interval": 1,
        "data": loader(),
        "enable_checkpointing": True,
    }
    fit(tmp_path, *callbacks(), module=ValidatedLM(), max_steps=2, **options)
    monitor, stop, saved = callbacks()
    path = tmp_path / "epoch=0-step=2.ckpt"
    options |= {"module": ValidatedLM(), "max_steps": 5, "ckpt_path": path}
    misspelt = EarlyStopping("geometry.V/blok.01", check_on_train_epoch_end=False)
    with pytest.warns(UserWarning, match=r"acts on geometry\.V/blok\.01 does nothing: .*block\.01"):
        fit(tmp_path, monitor, stop, misspelt, saved, **options)
    assert steps(monitor) == [4, 5]
    assert (
        stop.best_score.item()
        <= torch.load(path, weights_only=True)["callbacks"][monitor.state_key]["last_values"][TAG]
    )
