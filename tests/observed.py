"""Layers of a model, the rows that the probe hands over, and the model's own hidden states to
compare them with.
"""

import torch
from torchmetrics import Metric

from embedgeo import observe
from embedgeo.capture.layers import resolve_layers
from tests.models import FAMILIES


class Rows(Metric):
    """Keeps every row it is shown."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("ids", [], dist_reduce_fx="cat")

    def update(self, embeddings, token_ids=None):
        self.rows.append(embeddings.clone())
        if token_ids is not None:
            self.ids.append(token_ids.clone())

    def compute(self):
        return {"count": torch.tensor(float(sum(map(len, self.rows))))}


def kept_rows(dim):
    return [Rows()]


def rows_seen(geometry, layer):
    (metric,) = next(
        each.metrics for each in geometry.measured_layers() if each.name == layer
    ).with_copies
    return torch.cat(metric.rows), torch.cat(metric.ids) if metric.ids else None


def layer_names(model, layers="blocks"):
    return [layer.name for layer in resolve_layers(model, layers)]


def observed(model, batch, layers="blocks", **options):
    with observe(model, layers, kept_rows, **options) as geometry, torch.no_grad():
        model(**batch)
    return geometry


def hidden_states(model, batch, family="gpt_neox", prefix=""):
    """What enters the first block and every block's output, as the model gives them, before the
    final norm.
    """
    norm, last = FAMILIES[family].final_norm[prefix], {}
    module = model.get_submodule(norm) if norm else model
    handle = module.register_forward_pre_hook(
        lambda m, args: last.update(x=args[0]) if norm else None
    )
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    handle.remove()
    states = list(
        getattr(output, f"{prefix.rstrip('.')}_hidden_states" if prefix else "hidden_states")
    )
    return [*states[:-1], last["x"]] if norm else states
