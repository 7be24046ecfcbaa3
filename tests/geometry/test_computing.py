"""Numbers do not depend on the threads that compute them, nor does the process change."""

import pytest
import torch

from embedgeo import full_metrics, observe
from tests.models import gpt_neox, token_batch
from tests.training.runs import BreaksLate


def observed(metrics, **options):
    with observe(model := gpt_neox(), metrics=metrics, **options) as geometry, torch.no_grad():
        for seed in range(3):
            model(**token_batch(seed=seed))
    return geometry


def test_numbers_do_not_depend_on_the_number_of_threads_and_settings_stay():
    geometry = observed(full_metrics, jackknife=2, layers=["embed", "block.01"])
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(number == 2):
                found.append(repr(geometry.records()))
                assert torch.is_autocast_enabled("cpu")
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_failure_is_raised_with_its_layer():
    geometry = observed(lambda dim: [BreaksLate(dim)])
    with pytest.raises(RuntimeError, match="broken metric") as caught:
        geometry.records()
    assert caught.value.__notes__[:2] == ["in BreaksLate", "at layer 'embed'"]
