"""What every monitor promises, whatever trains the model: one set of tests for all of them."""

from functools import partial

import pandas as pd
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from embedgeo import Drift, default_metrics
from embedgeo.training.batches import kept_generators
from tests.models import hooks
from tests.training.runs import (
    RESUMED,
    Answers,
    all_warnings,
    assert_same_random_state,
    assert_same_values,
    by_step,
    in_one_process,
    moments,
    n_at,
    of_monitors,
    steps,
)
from tests.training.trainers import ROWS, WAYS, batches, loader, train

every_way = pytest.mark.parametrize("way", WAYS)
pytestmark = RESUMED
OPTIONS = {"metrics": moments, "on_error": "raise"}


def held_out():
    return [{**batch, "attention_mask": mask_left(batch)} for batch in batches(2, seed=50)]


def mask_left(batch):
    mask = batch["attention_mask"].clone()
    mask[:, :3] = 0
    return mask


def assert_same_training(run, other):
    assert all(torch.equal(a, b) for a, b in zip(run.state, other.state, strict=True))
    assert_same_random_state(run.random_state, other.random_state)


@every_way
def test_windows_of_optimizer_steps_are_pooled_and_evaluation_is_left_out(way, tmp_path):
    options = {"every_n_steps": 4, "extra_steps": (2,), "window": 2, **OPTIONS}
    run = train(way, tmp_path, options, accumulate=2, evaluates=True)
    (monitor,) = run.monitors
    assert n_at(monitor) == dict.fromkeys((0, 2, 4, 7), 2 * 2 * ROWS)
    assert {step for step, count in enumerate(run.hooks) if count} <= {*range(6)}
    assert hooks(run.model) == 0


@every_way
def test_the_last_weights_are_measured_on_the_last_batches_or_the_probe(way, tmp_path):
    plain = {"every_n_steps": 5, "window": 2, **OPTIONS}
    held = {"every_n_steps": 5, "prefix": "held", "probe": held_out(), **OPTIONS}
    left = {"every_n_steps": 5, "prefix": "left", "measure_last": False, **OPTIONS}
    run = train(way, tmp_path, plain, held, left)
    plain, held, left = run.monitors
    assert (steps(plain), steps(held), steps(left)) == ([0, 5, 7], [0, 5, 7], [0, 5])
    for monitor, step, data in (
        (plain, 7, batches(7)[-2:]),
        (held, 7, held_out()),
        (held, 5, held_out()),
    ):
        run.model.load_state_dict(run.weights[step])
        expected = in_one_process(run.model.eval(), data, metrics=moments)
        assert_same_values(by_step(monitor.history)[step], expected, rel=1e-6)


def test_all_have_the_same_numbers(tmp_path):
    options = {"every_n_steps": 3, "jackknife": 2, "on_error": "raise"}
    runs = [train(way, tmp_path / way, options, num_steps=4) for way in WAYS]
    first, *others = (pd.DataFrame(run.monitors[0].history) for run in runs)
    for other in others:
        pd.testing.assert_frame_equal(first, other, check_exact=True)


@pytest.mark.slow
@every_way
def test_training_is_bit_for_bit_what_it_is_without_them(way, tmp_path):
    common = {"jackknife": 2, "on_error": "raise"}
    layers = ["embed", "mean(last2)"]
    every_number = partial(default_metrics, spectrum=True, id_batches=4, anisotropy_batch=4096)
    whole = {"every_n_steps": 4, "window": 2, "metrics": every_number, "layers": [*layers, "*.mlp"]}
    held = {"every_n_steps": 3, "probe": held_out(), "listeners": [Drift()], "prefix": "held"}
    settings = {"accumulate": 2, "dropout": 0.1, "evaluates": True}
    plain = train(way, tmp_path / "plain", **settings)
    run = train(
        way, tmp_path / "run", {**common, **whole}, {**common, "layers": layers, **held}, **settings
    )
    assert_same_training(plain, run)
    assert [steps(monitor) for monitor in run.monitors] == [[0, 4, 7], [0, 3, 6, 7]]
    for monitor, keys in zip(run.monitors, ("V_W_local", "cka_to_first"), strict=True):
        assert keys in {record["metric"] for record in monitor.history}


@every_way
def test_what_passes_of_theirs_leave_in_modules_and_draw_from_loaders_is_put_back(way, tmp_path):
    generator = torch.Generator()  # training may share it
    rows = loader(batches(2, seed=50)).dataset
    shuffled = DataLoader(rows, 2, shuffle=True, generator=generator)
    before = generator.get_state()
    every = {"every_n_steps": 3, **OPTIONS}
    held = {**every, "prefix": "held", "probe": shuffled}
    joined = {**held, "prefix": "joined", "probe": CombinedLoader([shuffled], "sequential")}
    plain = train(way, tmp_path / "plain", remembers=True, num_steps=4)
    run = train(way, tmp_path / "run", every, held, joined, remembers=True, num_steps=4)
    assert [steps(monitor) for monitor in run.monitors] == [[0, 3, 4]] * 3
    assert generator.get_state().equal(before)
    assert_same_training(plain, run)
    outputs = [each.model(**batches(1)[0]).logits for each in (plain, run)]
    assert torch.equal(*outputs)


def test_a_loader_with_persistent_workers_goes_on_where_it_was_after_a_probe():
    loader = DataLoader(range(6), 2, num_workers=1, persistent_workers=True)
    training = iter(loader)
    seen = next(training).tolist()
    with kept_generators(loader):
        assert len([*loader]) == 3
    assert [*seen, *(each for batch in training for each in batch.tolist())] == [*range(6)]


def test_accelerate_does_not_take_a_probe_that_has_ended_early_for_the_loader_of_training():
    training, probe = (
        prepare_data_loader(DataLoader(range(6), 2), num_processes=1) for _ in range(2)
    )
    for _ in training:
        before = training.gradient_state.dataloader_references
        with kept_generators(probe):
            next(reading := iter(probe))
        assert training.gradient_state.dataloader_references == before != [None]
        del reading


@every_way
def test_a_metric_or_a_listener_that_fails_is_told_once_and_ends_no_training(way, tmp_path):
    def fails(step, records, geometry):
        records.clear()
        if step == 2:
            raise RuntimeError("not this one")

    heard = []
    listeners = [fails, lambda step, *_: heard.append(step)]
    heeded = {"every_n_steps": 2, "metrics": moments, "listeners": listeners, "prefix": "heeded"}
    broken = {"every_n_steps": 2, "metrics": lambda dim: [Answers(ZeroDivisionError)]}
    plain = train(way, tmp_path / "plain", num_steps=4)
    with all_warnings() as caught:
        run = train(way, tmp_path / "run", broken, heeded, num_steps=4)
    of_metric, of_listener = of_monitors(caught)
    assert "is off for the rest of this run" in of_metric
    assert "no rows" in of_metric
    assert f"listener {fails.__qualname__} failed at step 2" in of_listener
    assert [steps(monitor) for monitor in run.monitors] == [[], heard] == [[], [0, 2, 4]]
    assert hooks(run.model) == 0
    assert_same_training(plain, run)


@every_way
def test_an_exception_of_training_passes_and_leaves_what_was_measured(way, tmp_path):
    options = {"every_n_steps": 2, "folder": tmp_path, **OPTIONS}
    run = train(way, tmp_path, options, fails_at=3)
    (monitor,) = run.monitors
    assert len(run.hooks) == 4
    assert steps(monitor)[:2] == [0, 2]
    assert hooks(run.model) == 0


@every_way
def test_a_resumed_run_goes_on_at_its_step_and_in_its_file(way, tmp_path):
    options = {"every_n_steps": 3, "folder": tmp_path, **OPTIONS}
    train(way, tmp_path, options, num_steps=4)
    resumed = train(way, tmp_path, options, resumes=True)
    (monitor,) = resumed.monitors
    assert n_at(monitor) == {6: ROWS, 7: ROWS}
    written = pd.read_parquet(tmp_path / "history.parquet")
    assert sorted(written["step"].unique()) == [0, 3, 4, 6, 7]
