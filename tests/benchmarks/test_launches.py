"""A measurement asks a GPU for no more than `benchmarks/launches.py` allows."""

import json

import pytest
import torch

from benchmarks import launches
from embedgeo import TokenOccurrences, full_metrics, observe
from tests.pretended import COMPILER, pretended

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++, for a device guard")


@pytest.fixture
def count():
    with pretended() as counted:
        yield counted


def limited(stages):
    found = [stage for stage in stages if getattr(stage, "limit", None)]
    assert [str(stage) for stage in found if not stage.holds] == []
    return {stage.name for stage in found}


@pytest.mark.slow
def test_a_further_layer(count):
    assert len(limited(launches.of_metrics(count, "default metrics", (1, 2)))) == 2


@pytest.mark.slow
def test_all_layers(count):
    assert len(limited(launches.of_metrics(count, "default metrics"))) == 3
    assert len(limited(launches.of_measurement(count, "default metrics"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", ["jackknife", "drift", "all metrics, jackknife and drift"])
def test_a_further_layer_of_a_measurement_waits_for_nothing(count, options):
    assert len(limited(launches.of_measurement(count, options, (2, 4)))) == 1


@pytest.mark.parametrize("jackknife", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_updates_of_all_metrics_wait_no_more_for_further_layers(count, jackknife):
    def metrics(dim):
        return [*full_metrics(dim, anisotropy_batch=600), TokenOccurrences(dim, [1, 2, 3], most=2)]

    asked = []
    for num_blocks in (1, 3):
        run, given = launches.model(num_blocks), launches.batch()
        count.clear()
        with torch.no_grad(), observe(run, metrics=metrics, jackknife=jackknife):
            run(**given)
        asked.append(count.asked())
    assert asked[1].launches > 1.5 * asked[0].launches
    assert asked[1].waits == asked[0].waits == 1
    assert asked[1].copies == asked[0].copies


def test_a_stage_that_asks_for_more_does_not_hold():
    name, limit = next(iter(launches.LIMITS.items()))
    assert launches.Stage(name, limit).holds
    for field, value in limit._asdict().items():
        stage = launches.Stage(name, limit._replace(**{field: value + 1}))
        assert not stage.holds
        assert "does not hold" in str(stage)
    assert json.loads(json.dumps(launches.Stage(name, limit).as_dict()))["limit"] == limit._asdict()
    assert launches.Stage("another", limit).holds
