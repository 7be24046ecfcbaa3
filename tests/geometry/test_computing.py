"""Layers are computed side by side, each in its share of the threads, now or in a thread of their
own.
"""

import threading

import pytest
import torch
from torch import nn

from embedgeo import EmbeddingMoments, IntrinsicDimension, full_metrics, observe
from tests.models import gpt_neox, token_batch
from tests.training.runs import BreaksLate

LAYERS = 5


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def observed(metrics, **options):
    with observe(model := gpt_neox(), metrics=metrics, **options) as geometry, torch.no_grad():
        for seed in range(3):
            model(**token_batch(seed=seed))
    return geometry


class Sees(EmbeddingMoments):
    """Notes what is set where it is computed; each of two layers waits for the other one, where
    they are two.
    """

    def __init__(self, dim, seen, together=None):
        super().__init__(dim)
        self.seen, self.together = seen, together

    def compute(self):
        if not self.num_rows:
            return super().compute()  # to find out its keys
        here = threading.current_thread() is not threading.main_thread()
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        )
        self.seen.append((here, torch.get_num_threads(), *modes))
        if self.together is not None:
            self.together.wait(timeout=60)
        return super().compute()


def bits(records):
    """Equal where all numbers are, NaN too."""
    return [repr(record) for record in records]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("is_inference", [False, True])
def test_layers_are_computed_side_by_side_in_their_share_of_the_threads(is_inference):
    seen, together = [], threading.Barrier(2)
    layers = ["embed", "block.00", "block.01", "block.02"]
    with torch.inference_mode(is_inference):
        geometry = observed(lambda dim: [Sees(dim, seen, together)], layers=layers)
        with torch.autocast("cpu", torch.bfloat16):
            geometry.records()
    assert seen == [(True, 1, False, is_inference, False)] * 4
    assert torch.get_num_threads() == 2
    assert in_a_new_thread(torch.get_num_threads) == [2]


class SeesUpdates(Sees):
    """Notes it where rows come in, too."""

    def update_states(self, rows):
        if len(rows.embeddings):
            self.seen.append(torch.get_num_threads())
        super().update_states(rows)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("num_rows", "num_threads"), [(64, 1), (2**18, 2)])
def test_a_layer_alone_has_all_threads_unless_it_is_small_and_the_model_keeps_its_own(
    num_rows, num_threads
):
    seen = []
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].register_forward_pre_hook(lambda *call: seen.append(torch.get_num_threads()))
    with observe(model, layers="0", metrics=lambda dim: [SeesUpdates(dim, seen)]) as geometry:
        model(torch.randn(num_rows, 2))
    geometry.records()
    while_updated, beside, (_, while_computed, *_) = seen
    assert (while_updated, beside, while_computed) == (num_threads, 2, num_threads)
    assert torch.get_num_threads() == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_numbers_do_not_depend_on_how_many_layers_are_computed_at_a_time():
    geometry = observed(full_metrics, jackknife=3)
    together = geometry.records()
    state = torch.get_rng_state()
    computed, why_silent = geometry.hand_over(in_thread=True)
    assert geometry.records() == []
    assert bits(geometry.agreed(computed)) == bits(together)
    assert len({record["layer"] for record in together}) == LAYERS
    assert why_silent == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2
    assert in_a_new_thread(torch.get_num_threads) == [2]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.slow
def test_no_setting_of_the_whole_process_is_touched_beside_the_main_thread(monkeypatch):
    def notes(function):
        def noted(*args, **kwargs):
            callers.append(threading.current_thread())
            return function(*args, **kwargs)

        return noted

    callers, geometry = [], observed(full_metrics)
    # leaving autocast empties the cache of casts, which is one for all threads
    for owner, name in (
        (torch.autocast, "__enter__"),
        (torch, "clear_autocast_cache"),
        (torch, "manual_seed"),
    ):
        monkeypatch.setattr(owner, name, notes(getattr(owner, name)))
    geometry.records()
    geometry.agreed(geometry.hand_over(in_thread=True)[0])
    assert not {thread.name for thread in callers} - {threading.main_thread().name}


@pytest.mark.usefixtures("two_threads")
def test_the_first_failure_is_raised_with_its_layer():
    geometry = observed(lambda dim: [BreaksLate(dim)])
    for compute in (
        geometry.records,
        lambda: geometry.agreed(geometry.hand_over(in_thread=True)[0]),
    ):
        with pytest.raises(RuntimeError, match="broken metric") as caught:
            compute()
        assert caught.value.__notes__[:2] == ["in BreaksLate", "at layer 'embed'"]


@pytest.mark.usefixtures("two_threads")
def test_layers_may_share_an_estimator():
    class Estimator:
        def fit(self, rows):
            self.dimension_ = abs(float(rows.sum()))
            together.wait(timeout=60)

    together, estimator = threading.Barrier(2), Estimator()
    metrics = {"metrics": lambda dim: [IntrinsicDimension(dim, estimator=estimator)]}
    geometry = observed(**metrics, layers=["block.00", "block.01"])
    side_by_side = geometry.records()
    together = threading.Barrier(1)
    torch.set_num_threads(1)
    assert bits(side_by_side) == bits(geometry.records())


def in_a_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found
