"""Blocks that stand out are named, and no block of a sound model."""

import pandas as pd
import pytest
import torch

from embedgeo import observe
from embedgeo.report.blocks import standing_out
from embedgeo.report.runs import runs_in, runs_of_records
from tests.models import gpt_neox, llama
from tests.records import layer_records

PLANTED = 3


def scaled(output):
    return 30 * output


def of_one_coordinate(output):
    output = output.clone()
    output[..., 7] *= 50
    return output


def named(change=None, kind=gpt_neox, layers="blocks"):
    """Sentences on a random model of eight blocks, one of which does something else."""
    torch.manual_seed(0)
    model = kind(num_hidden_layers=8)
    blocks = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    if change:
        blocks[PLANTED].register_forward_hook(lambda block, args, output: change(output))
    ids = torch.randint(0, 96, (32, 12), generator=torch.Generator().manual_seed(1))
    with observe(model, layers) as geometry, torch.no_grad():
        model(input_ids=ids)
    (run,) = runs_in(geometry)
    return standing_out(run)


@pytest.mark.parametrize("kind", [gpt_neox, llama])
def test_no_block_of_random_weights_stands_out_and_a_planted_one_does(kind):
    assert named(kind=kind) == []
    for change in (scaled, of_one_coordinate):
        (sentence, *_) = named(change, kind)
        assert sentence.startswith("block.03 stands out: ")
        assert " times that of the block before; at other blocks, as a rule, " in sentence


def test_layers_that_are_no_blocks_are_not_asked():
    assert named(layers="hidden_states") == named(layers=["*.attention", "*.mlp"]) == []


def run_of(*of_steps, metric="V"):
    records = [
        {**each, "layer_index": i}
        for step, values in enumerate(of_steps, 8)
        for i, value in enumerate(values)
        for each in layer_records(step, value, layers=[f"block.{i:02}"], metrics=[metric])
    ]
    (run,) = runs_of_records(pd.DataFrame(records))
    return run


def test_a_block_that_does_next_to_nothing_is_named():
    (sentence,) = standing_out(run_of([1.0, 1.5, 2.0, 2.01, 2.6, 3.2]))
    assert sentence == (
        "block.03 stands out at step 8: it changes no headline by more than 1.005 times; each "
        "other block changes one by 1.231 times or more."
    )
    assert standing_out(run_of([1.0, 1.5, 2.0, 2.2, 2.6, 3.2])) == []
    assert standing_out(run_of([1.0, 1.5, 1.5, 2.0])) == []  # of few blocks nobody can tell


def test_three_blocks_at_most_are_named_the_one_that_stands_out_most_first():
    values = torch.tensor([1.1] * 30).double()
    values[[5, 11, 17, 23]] = torch.tensor([4.0, 20.0, 10.0, 6.0]).double()
    found = standing_out(run_of(values.cumprod(0).tolist()))
    assert [each.split()[0] for each in found] == ["block.11", "block.17", "block.23"]


def test_undefined_and_negative_values_are_not_asked():
    values = [1.0, float("nan"), -1.0, 2.0, 2.2, 2.4]
    assert standing_out(run_of(values, values[::-1], metric="mean_cosine")) == []


def test_a_block_that_changes_between_two_steps_as_no_other_does_is_named():
    """Blocks after it change with it, and what all do is no block's own."""
    start = torch.tensor([1.0, 1.5, 2.0, 2.2, 2.6, 3.2]).double()
    later = start * torch.tensor([3, 6, 12, 80, 170, 330.0])
    (sentence,) = standing_out(run_of(*(x.tolist() for x in (start, start * 1.1, later, later))))
    assert sentence == (
        "block.03 stands out at step 10: its V ÷ that of the block before is 6.667 times what it "
        "was at step 9; at other blocks, as a rule, 2 times."
    )
