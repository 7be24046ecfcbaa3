"""Numbers do not depend on the threads that compute them, nor does the process change."""

from functools import partial

import pytest
import torch

from embedgeo import Anisotropy, TokenMoments, default_metrics
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics.layer import LayerMetrics
from tests.data import texts
from tests.models import gpt_neox, token_batch
from tests.training.runs import observed_on


def test_numbers_do_not_depend_on_the_number_of_threads_and_settings_stay():
    batches = [token_batch(seed=seed) for seed in range(3)]
    metrics = partial(default_metrics, spectrum=True, id_batches=4, anisotropy_batch=4096)
    options = {"metrics": metrics, "jackknife": 2, "layers": ["embed", "block.01"]}
    geometry = observed_on(gpt_neox(), batches, **options)
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


class Picky(Anisotropy):
    """It fails where M is above 100."""

    def compute(self):
        if float(self.mean.square().sum()) > 100:
            raise ValueError("too large")
        return super().compute()


@pytest.mark.parametrize("jackknife", [0, 2])
def test_a_layer_that_fails_beside_others_fails_alone(jackknife):
    layers = list[LayerMetrics]()
    for offset in (0.0, 100.0, 1.0):
        layers.append(
            LayerMetrics(
                lambda dim: [Picky(dim), TokenMoments(dim)],
                16,
                device=torch.device("cpu"),
                jackknife=jackknife,
            )
        )
        x, ids, sequences = texts(512, 16)
        layers[-1].update(x + offset, row_ids(x, ids, None, sequences))
    first, broken, last = layer_values(layers)
    assert isinstance(broken, ValueError)
    assert broken.__notes__[0] == "in Picky"
    for layer, together in ((layers[0], first), (layers[2], last)):
        assert repr(layer_values([layer])) == repr([together])
