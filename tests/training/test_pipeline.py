"""StepMonitor on the stages of a pipeline, on gloo ranks: the numbers are those of the whole model
in one process.
"""

import pytest
import torch

from tests.ranks import on_two_ranks
from tests.training.pipeline_on_ranks import (
    MLPS,
    REFUSED,
    STEPS,
    Transformer,
    batch_at,
    on_four,
    on_two,
    probe_batches,
    raise_in_forward,
)
from tests.training.runs import assert_same_values, by_step, in_one_process, token_moments

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_two_ranks(on_two, tmp_path_factory.mktemp("two"))


def whole_model(batches, layers="blocks"):
    return in_one_process(Transformer(), batches, layers=layers, metrics=token_moments)


def assert_as_in_one_process(ranks, kind, sources=(0,), layers="blocks"):
    for number, rank in enumerate(ranks):
        outcome = rank[kind]
        assert outcome["warned"] == []
        assert outcome["logged"] == ([0, 2] if number == 1 else [])
        history, *held = outcome["histories"][:2]
        for start, table in by_step(history).items():
            batches = [batch_at(source, step) for step in (start, start + 1) for source in sources]
            assert_same_values(table, whole_model(batches, layers))
        for table in by_step(*held).values() if held else ():
            assert_same_values(table, whole_model(probe_batches(), layers))
        assert list(by_step(history)) == [0, 2]
        assert [list(by_step(each)) for each in held] == [[0, 2, STEPS]] * len(held)


def test_the_numbers_are_those_of_one_process_and_the_blocks_have_their_numbers_in_the_model(two):
    assert_as_in_one_process(two, "gpipe")
    indices = {record["layer"]: record["layer_index"] for record in two[0]["gpipe"]["histories"][0]}
    assert indices == {
        "embed": 0,
        "block.00": 1,
        "block.01": 2,
        "block.02": 3,
        "final_norm": 4,
        "mean": -1,
    }


def test_token_ids_and_masks_that_functions_of_the_batch_give_are_cut_into_microbatches(two):
    assert_as_in_one_process(two, "1f1b", layers=MLPS)
    assert "layers.02.mlp" in by_step(two[0]["1f1b"]["histories"][0])[0]


def test_a_pipeline_of_sharded_replicas_and_one_of_tensor_parallel_stages(tmp_path):
    four = on_two_ranks(on_four, tmp_path, world_size=4)
    assert_as_in_one_process(four, "gpipe", sources=(0, 1))
    assert_as_in_one_process(four, "tensor parallel")


def test_values_of_token_types_are_left_out_where_later_stages_are_not_told_the_ids(two):
    for rank in two:
        (history,) = rank["without ids"]["histories"]
        table = by_step(history)[0]
        assert {layer for layer, values in table.items() if "V_W" in values} == {
            "embed",
            "block.00",
        }
        expected = whole_model([batch_at(0, 0)])["block.02"]
        assert table["block.02"] == pytest.approx(
            {key: expected[key] for key in table["block.02"]}, rel=1e-9
        )


def test_stages_that_count_other_rows_are_refused(two):
    for rank in two:
        (warning,) = rank["masked on one"]["warned"]
        assert (
            "must count the same rows; layer 'block.00' has 84, layer 'block.01' 96. Give "
            "token_ids=" in warning
        )
        assert rank["masked on one"]["histories"] == [[]]


def test_a_failure_on_one_stage_turns_monitoring_off_on_all(two):
    causes = (
        "it failed on stage 1 of the pipeline: OutOfMemoryError: tried to",
        "OutOfMemoryError: tried to allocate",
    )
    for rank, cause in zip(two, causes, strict=True):
        (warning,) = rank["fault"]["warned"]
        assert cause in warning
        assert rank["fault"]["histories"] == [[]]


def test_training_is_bit_for_bit_what_it_is_without_the_monitor(two):
    for rank in two:
        without, measured = rank["weights"]
        assert without.keys() == measured.keys()
        assert all(torch.equal(without[name], measured[name]) for name in without)


def test_what_a_stage_cannot_have_is_refused_at_set_up(two):
    for rank in two:
        refused = rank["refused"]
        for name in REFUSED[:2]:
            assert (
                f"layers='{name}' must be found within one stage of the pipeline" in refused[name]
            )
        assert (
            refused["nothing*"]
            == "layers='nothing*' matches no layer of any stage of the pipeline."
        )
        assert "several have layers." in refused["layers"]
        for several in ("list", "ModuleList"):
            assert (
                f"must be the one stage that this rank has, a module that is called; got {several}."
                in refused[several]
            )
        assert "probe needs probe_forward= under pipeline parallelism" in refused["probe"]


def test_a_forward_that_raises_ends_both_ranks_before_one_gives_up_waiting(tmp_path):
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException, match=r"in the forward pass|[Cc]onnection"
    ):
        on_two_ranks(raise_in_forward, tmp_path, seconds=50)
