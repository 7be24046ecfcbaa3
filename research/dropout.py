"""How much of V_W is the noise of dropout, where training batches are measured.

    python -m research.dropout [--dropout 0.1] [--max_steps 300] [--num_sequences 64]

Trains a small decoder with dropout of the embeddings and of what attention and MLP write. Then
measures the same sequences twice at each layer: as a training batch, and as a probe is.
"""

from dataclasses import replace

import torch
from jsonargparse import CLI
from torch import Tensor
from transformers import PreTrainedModel

from embedgeo import TokenMoments, observe
from embedgeo.text import cut_sequences
from research.models import SETTINGS, trained

KEYS = "V_W_over_V_unbiased", "V_W_unbiased", "V", "M_over_Q"


def measured(model: PreTrainedModel, sequences: Tensor) -> dict[str, dict[str, float]]:
    """The keys at each layer, in the mode that the model is in."""
    torch.manual_seed(0)
    with torch.no_grad(), observe(model, metrics=lambda dim: [TokenMoments(dim)]) as geometry:
        for batch in sequences.split(8):
            model(input_ids=batch)
    return {
        layer: {key: float(values[key]) for key in KEYS}
        for layer, values in geometry.compute().items()
    }


def main(dropout: float = 0.1, max_steps: int = 300, num_sequences: int = 64) -> None:
    """Print a table."""
    settings = replace(SETTINGS["decoder"], max_steps=max_steps)
    found = trained("decoder", settings, dropout)
    print(found)
    sequences = cut_sequences([found.token_ids.tolist()], settings.seq_len)
    places = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
    sequences = sequences[places[:num_sequences]]
    of_probe = measured(found.model, sequences)
    of_training = measured(found.model.train(), sequences)
    print("| layer | " + " | ".join(f"{key}, training, probe" for key in KEYS) + " |")
    for layer, values in of_training.items():
        cells = [f"{values[key]:.4g}, {of_probe[layer][key]:.4g}" for key in KEYS]
        print(f"| {layer} | {' | '.join(cells)} |")


if __name__ == "__main__":
    CLI(main)
