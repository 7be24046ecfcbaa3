"""StepMonitor under torch's own parallel forms on gloo ranks: the numbers are those of one
process.
"""

import pytest

from embedgeo import Drift, StepMonitor
from tests.ranks import WORLD_SIZE, on_two_ranks
from tests.training.loops import run_whole
from tests.training.on_ranks import probe_batches
from tests.training.runs import assert_same_values, by_step, in_one_process, token_moments
from tests.training.steps_on_ranks import (
    FORMS,
    ON_FOUR,
    REPEATED,
    STEPS,
    WITHOUT_MESH,
    batch_at,
    everything,
    on_four,
    plain,
    sampled_moments,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return on_two_ranks(everything, folder, folder, seconds=400)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return on_two_ranks(on_four, tmp_path_factory.mktemp("four"), seconds=300, world_size=4)


def held_in_one_process(model):
    """Of a probe, with the drift."""
    monitor = StepMonitor(
        model, 3, probe=probe_batches(), metrics=sampled_moments, listeners=[Drift()]
    )
    run_whole(monitor, STEPS)
    return by_step(monitor.history)


def assert_as_in_one_process(ranks, form, sources):
    model = plain(form)
    expected = {}
    # the last weights: on the last two steps
    for start, first in ((0, 0), (2, 2), (4, 4), (STEPS, STEPS - 2)):
        window = range(first, min(first + 2, STEPS))
        batches = [batch_at(form, rank, step) for step in window for rank in sources]
        expected[start] = in_one_process(model, batches, metrics=token_moments)
    held = held_in_one_process(model)
    for number, rank in enumerate(ranks):
        outcome = rank[form]
        assert outcome["warned"] == []
        assert outcome["logged"] == ([0, 2, 4, STEPS] if number else [])
        train = by_step(outcome["train"])
        assert list(train) == [0, 2, 4, STEPS]
        for start, table in expected.items():
            assert_same_values(train[start], table)
        assert list(by_step(outcome["held"])) == list(held)
        for step, table in by_step(outcome["held"]).items():
            assert_same_values(table, held[step])


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_one_process(two, form):
    assert_as_in_one_process(two, form, range(1 if form in REPEATED else WORLD_SIZE))


def test_the_numbers_on_four_ranks_are_those_of_one_process(four):
    assert_as_in_one_process(four, ON_FOUR, (0, 2))


def test_hidden_states_in_parts_are_refused_where_it_is_unknown_who_has_the_others(two):
    for rank in two:
        outcome = rank[WITHOUT_MESH]
        assert outcome["train"] == outcome["held"] == []
        assert len(outcome["warned"]) == 2
        for warning in outcome["warned"]:
            assert "layer 'embed' must have a row for each token; its rows have shape (" in warning


def test_the_mesh_of_tensor_parallelism_is_that_of_the_parameters(two):
    batches = [batch_at("tensor parallel", 0, 0)]
    expected = in_one_process(plain("tensor parallel"), batches, metrics=token_moments)
    for rank in two:
        for tables, refused, (before, after) in rank["by themselves"]:
            for table in tables:
                assert_same_values(table, expected)
            assert "device_mesh= must be given" in refused
            assert before == after


def test_each_rank_may_have_experts_of_its_own_inside_of_blocks_that_are_measured(two):
    first, second = (rank["experts"] for rank in two)
    rows = 12 * sum(len(batch_at("ddp", rank, 0)["input_ids"]) for rank in range(WORLD_SIZE))
    for name in ("on a mesh", "of data and model"):
        assert repr(first[name]) == repr(second[name])
        assert by_step(first[name])[0]["block.01"]["n"] == rows
    for outcome in (first, second):
        assert "must have the same modules on every rank" in outcome["each"]


def test_one_rank_alone_prints_what_is_measured_and_what_another_one_lacks(two):
    first, second = (rank["said"] for rank in two)
    assert second == []
    assert first[0].startswith("StepMonitor: 4 layers")
    assert any("a forward pass has fewer than 100 rows" in line for line in first)


def test_ranks_that_train_several_models_are_told_to_train_one(two):
    for number, rank in enumerate(two):
        assert "Train one model in a launch" in rank["apart"]["in groups"][0]
        for name in ("rows", "weights"):
            said = rank["apart"][name]
            assert len(said) == (number == 0)
            for each in said:
                assert ("the very same rows" in each) == (name == "rows")
                assert ("other weights" in each) == (name == "weights")


def test_rows_of_other_weights_within_a_step_are_left_out(two):
    for rank in two:
        assert [{*counts} for counts in rank["left out"]] == [
            {66.0, 84.0}
        ] * 2  # of one batch a rank


def test_a_group_ends_only_after_all_ranks_have_made_it(two):
    assert [rank["closed"] for rank in two] == ["closed"] * 2


def test_what_the_ranks_of_a_mesh_have_in_common_must_be_known_at_set_up(two):
    remedy = "Under context and pipeline parallelism sweep over the checkpoints."
    assert f"got pp. {remedy}" in two[0]["refused"]["pipeline"]
    for rank in two:
        refused = rank["refused"]
        assert f"got dp_shard_cp. {remedy}" in refused["context"]
        assert "got an unnamed one. Name them so, or give" in refused["unnamed"]
        assert "rank 1 is not in the one that it has" in refused["another's"]
        assert "got mdl. Name them so, or give" in refused["of parameters"]
        assert "got x. Name them so, or give process_group=" in refused["other"]
        assert "must be the mesh of all 2 ranks, not a part of it; got one of 1" in refused["part"]
        assert (
            "same modules on every rank; they differ, as those of pipeline stages do. Sweep over "
            "the checkpoints of a pipeline." in refused["stage"]
        )


@pytest.mark.parametrize("measure", ["parameters", "observe", "given"])
def test_context_parallelism_is_refused_where_the_whole_mesh_tells_it(two, measure):
    for rank in two:
        said = rank["context"]
        got = "got" if measure == "given" else "got weights on a mesh with"
        assert f"{got} context" in said["one", measure]
        assert f"{got} cp" in said["joined", measure]
        assert said["of data", measure] == ""


@pytest.mark.parametrize("how", ["in a step", "of the last weights", "of a probe"])
def test_a_failure_at_any_collective_leaves_training_alone_and_turns_monitoring_off_on_all(
    two, how
):
    first, second = (rank["failing"][how] for rank in two)
    clean = first.pop(-1)
    assert clean["warned"] == []
    assert repr(second.pop(-1)) == repr(clean)  # with NaN
    assert len(first) > 2
    for place, outcome in first.items():
        other = second[place]
        assert outcome["sums"] == other["sums"] == clean["sums"], place
        for history in (outcome["history"], other["history"]):
            assert repr(history) == repr(clean["history"][: len(history)])
        assert len(other["history"]) < len(clean["history"])
        assert len(outcome["warned"]) == 1
        (cause,) = other["warned"]
        assert "tried to allocate 1.5 EiB" in cause


def test_values_that_differ_in_the_last_digit_are_the_same_on_all_ranks(two):
    first, second = (rank["failing"]["other digits"] for rank in two)
    assert repr(first["history"]) == repr(second["history"]) != "[]"


def test_a_step_that_failed_on_all_ranks_is_not_counted_as_taken(two):
    for rank in two:
        assert rank["failed"] == [[(0, 48), (2, 48)], [(0, 48), (2, 48), (3, 48)]]


def test_last_batches_of_other_numbers_are_not_measured(two):
    for rank in two:
        (warning,) = rank["unequal"]
        assert "last training batches must be as many on every rank; one rank has 0" in warning


def test_what_is_not_complete_when_the_process_group_is_destroyed_is_left_out(two):
    for rank in two:
        for name, (measured, warned) in rank["without group"].items():
            assert measured == ([(0, 48), (2, 48)] if name == "nothing left" else [(0, 48)]), name
            assert len(warned) == (name != "nothing left")
            assert all("process group must be there until" in warning for warning in warned)
