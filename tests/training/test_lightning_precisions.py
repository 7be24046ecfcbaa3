"""The monitor under each of Lightning's precisions."""

import pytest
import torch

from embedgeo import GeometryMonitor, default_metrics
from tests.data import floats, updated
from tests.observed import kept_rows, rows_seen
from tests.training.runs import WithoutDropout, by_step, fit, loader

DTYPES = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


def measured(folder, precision):
    """Values by layer and metric, and the rows and token ids they were computed from, by layer."""
    rows = {}

    def listener(step, records, geometry):
        rows.update((layer, rows_seen(geometry, layer)) for layer in geometry.compute())

    every = {"every_n_steps": 100, "window": 2, "measure_last": False, "on_error": "raise"}
    monitor = GeometryMonitor(**every)
    keeps = GeometryMonitor(**every, metrics=kept_rows, listeners=[listener], prefix="rows")
    options = {"precision": precision, "max_steps": 2, "data": loader(32, 16)}
    fit(folder, monitor, keeps, module=WithoutDropout(), **options)
    (values,) = by_step(monitor.history).values()
    return values, rows


@pytest.mark.parametrize("precision", DTYPES)
def test_values_are_exact_for_the_rows_seen(tmp_path, precision):
    values, rows = measured(tmp_path, precision)
    assert rows["block.02"][0].dtype == DTYPES[precision]
    for layer, at_layer in values.items():
        expected, (x, ids) = {}, rows[layer]
        for metric in default_metrics(16):
            updated(metric, x.view(32, 12, 16), ids.view(32, 12), [slice(0, 16), slice(16, 32)])
            expected |= floats(metric.compute())
        found = {key: at_layer[key] for key in expected}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), layer
