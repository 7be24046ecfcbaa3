"""Records, as a monitor keeps them."""

from math import nan


def layer_records(step, value=1.0, *, layers=("embed", "block.00"), metrics=("V",)):
    """One value of all metrics at all layers of a step, without standard errors."""
    return [
        {
            "step": step,
            "layer": layer,
            "layer_index": i,
            "width": 8,
            "metric": metric,
            "value": value,
            "stderr": nan,
        }
        for i, layer in enumerate(layers)
        for metric in metrics
    ]
