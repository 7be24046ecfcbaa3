"""Two gloo ranks: the numbers are those of one process over the rows of both, and nobody hangs."""

import math

import pytest

from tests.models import gpt_neox
from tests.ranks import WORLD_SIZE, on_two_ranks
from tests.training.on_ranks import (
    FAULTS,
    REPEATED,
    STEPS,
    STRATEGIES,
    WINDOW,
    FixedLM,
    TensorParallel,
    batch_of,
    everything,
    probe_batches,
)
from tests.training.runs import assert_same_values, by_step, in_one_process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(WORLD_SIZE):
        folder.joinpath(str(rank)).mkdir()
    return on_two_ranks(everything, folder, folder, seconds=300)  # some 25 on a free machine


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "in parts" not in name])
def test_the_numbers_are_those_of_one_process_over_the_rows_of_all_ranks(ranks, name):
    model = (TensorParallel() if name in REPEATED else FixedLM()).model
    sources = 1 if name in REPEATED else WORLD_SIZE
    for rank in ranks:
        assert rank[name]["warned"] == []
        train, held = by_step(rank[name]["train"]), by_step(rank[name]["held"])
        assert list(train) == [0, 2, STEPS]
        assert list(held) == [0, 3, STEPS]
        for step, table in train.items():
            window = range(min(step, STEPS - WINDOW), min(step, STEPS - WINDOW) + WINDOW)
            assert_same_values(
                table,
                in_one_process(model, [batch_of(r, s) for s in window for r in range(sources)]),
            )
        assert_same_values(held[0], in_one_process(model, probe_batches()))
        assert_same_values(held[3], held[0])
        assert_same_values(held[STEPS], held[0])
    assert math.isfinite(train[2]["block.00"]["V"])


def test_a_hugging_face_trainer_on_two_ranks(ranks):
    first, second = (rank["hugging face"] for rank in ranks)
    model = gpt_neox(hidden_dropout=0.1).eval()
    model.load_state_dict(first["weights"])
    for source in ("train", "held"):
        one, other = by_step(first[source]), by_step(second[source])
        assert list(one) == list(other) == [0, 2, 3]
        assert_same_values(one[3], other[3])
    assert by_step(first["train"])[2]["block.00"]["n"] == WORLD_SIZE * 2 * 12
    assert first["files"] == ["history.held.parquet", "history.parquet"]
    assert second["files"] == []
    assert_same_values(by_step(first["held"])[0], in_one_process(model, probe_batches()))


def test_hidden_states_in_parts_are_refused(ranks):
    for rank in ranks:
        outcome = rank["tensor parallel, a layer in parts"]
        assert outcome["train"] == outcome["held"] == []
        assert len(outcome["warned"]) == 2
        for warning in outcome["warned"]:
            assert "must see the same rows at a layer" in warning
            assert "up_proj' differs between them" in warning


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_on_one_rank_turns_monitoring_off_on_all_with_a_warning_each(ranks, fault):
    (said,), (said_on_1,) = (rank["faults"][fault] for rank in ranks)
    cause, _ = FAULTS[fault]
    if "probes" not in fault:
        assert "it failed on another rank" in said
    assert cause in said_on_1
