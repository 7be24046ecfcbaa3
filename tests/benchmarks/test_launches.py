"""A measurement asks a GPU for no more than `benchmarks/launches.py` allows."""

import json

import pytest

from benchmarks import launches
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


def test_a_further_layer(count):
    assert len(limited(launches.of_metrics(count, "default metrics", (1, 2)))) == 2


@pytest.mark.slow
def test_all_layers(count):
    assert len(limited(launches.of_metrics(count, "default metrics"))) == 3
    assert len(limited(launches.of_measurement(count, "default metrics"))) == 1


def test_a_stage_that_asks_for_more_does_not_hold():
    name, limit = next(iter(launches.LIMITS.items()))
    assert launches.Stage(name, limit).holds
    for field, value in limit._asdict().items():
        stage = launches.Stage(name, limit._replace(**{field: value + 1}))
        assert not stage.holds
        assert "does not hold" in str(stage)
    assert json.loads(json.dumps(launches.Stage(name, limit).as_dict()))["limit"] == limit._asdict()
    assert launches.Stage("another", limit).holds
