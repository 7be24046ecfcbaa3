"""What share V_W / V the estimators give from few rows: simulated, where it is 0.6, and on text by a model trained here.

    python benchmarks/within_token_variance.py [--seeds 8] [--max-steps 1500] [--draws 8]

Prints the tables of docs/within-token-variance.md. "MS_W" pools the squared deviations from the means of the token
types over their degrees of freedom, as embedgeo did before: unbiased if all types have one variance and all rows are
independent.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import lightning as L
import torch
from jsonargparse import CLI
from torch import Tensor

from embedgeo.capture.layers import resolve_layers
from embedgeo.demo import DemoSettings
from embedgeo.demo.training import LanguageModel, new_model, training_batches
from embedgeo.functional import row_moments, token_table, variance_split, within_variance
from embedgeo.functional.split import unbiased_split

TYPES, DIM, SHARE = 5_000, 32, 0.6
ESTIMATORS = "plug-in", "MS_W", "independent rows", "pairs"


class Sample(NamedTuple):
    """Rows, their token ids and the sequences that they are of."""

    x: Tensor
    token_ids: Tensor
    sequence_ids: Tensor | None = None


def shares(sample: Sample) -> list[float]:
    """V_W / V by each estimator."""
    moments = row_moments(sample.x)
    n, variance = moments.n, moments.m2.sum() / moments.n
    alone, types = (token_table(*sample._replace(sequence_ids=ids)) for ids in (None, sample.sequence_ids))
    by = [
        alone.m2.sum() / (n - len(alone.n)),
        within_variance(alone, n),
        within_variance(types, n if sample.sequence_ids is None else sample.sequence_ids.unique().numel() * n / n),
    ]
    plug_in = variance_split(alone)["V_W_over_V"]
    return [float(plug_in), *(float(unbiased_split(n, variance, within)["V_W_over_V_unbiased"]) for within in by)]


def independent(n: int, exponent: float, seed: int) -> Sample:
    """Rows of Zipf types whose variances are proportional to p**exponent, and 0.6 of the whole."""
    g = torch.Generator().manual_seed(seed)
    p = 1 / torch.arange(1, TYPES + 1, dtype=torch.float64)
    p /= p.sum()
    variance = p**exponent
    variance *= SHARE / (p * variance).sum()
    ids = torch.multinomial(p, n, replacement=True, generator=g)
    means = (1 - SHARE) ** 0.5 * torch.randn(TYPES, DIM, generator=g, dtype=torch.float64)
    return Sample(means[ids] + variance[ids, None].sqrt() * torch.randn(n, DIM, generator=g, dtype=torch.float64), ids)


def bursts(seed: int, num_sequences: int = 32, length: int = 256, own: int = 20) -> Sample:
    """Sequences half of whose tokens are of 20 types of their own; half of the variance within is an effect of both."""
    g = torch.Generator().manual_seed(seed)
    p = 1 / torch.arange(1, TYPES + 1, dtype=torch.float64)
    ids = torch.multinomial(p, num_sequences * length, replacement=True, generator=g).view(num_sequences, length)
    topics = torch.multinomial(p, num_sequences * own, replacement=True, generator=g).view(num_sequences, own)
    drawn = topics.gather(1, torch.randint(0, own, (num_sequences, length), generator=g))
    ids = torch.where(torch.rand(num_sequences, length, generator=g) < 0.5, drawn, ids).flatten()
    sequences = torch.arange(num_sequences).repeat_interleave(length)
    means = (1 - SHARE) ** 0.5 * torch.randn(TYPES, DIM, generator=g, dtype=torch.float64)
    _, pair = (sequences * TYPES + ids).unique(return_inverse=True)
    effects = torch.randn(int(pair.max()) + 1, DIM, generator=g, dtype=torch.float64)[pair]
    noise = torch.randn(len(ids), DIM, generator=g, dtype=torch.float64)
    return Sample(means[ids] + (SHARE / 2) ** 0.5 * (effects + noise), ids, sequences)


def print_row(name: str, values: Tensor) -> None:
    print(f"| {name} |", " | ".join(f"{value:.3f}" for value in values.tolist()), "|", flush=True)


def simulated(seeds: int) -> None:
    """Mean share over seeds; it is 0.600."""
    print("\n| simulated, 0.600 | " + " | ".join(ESTIMATORS) + " |\n|" + "---|" * 5)
    for n in (2_048, 8_192):
        for exponent in (-0.1, 0.0, 0.1, 0.2):
            drawn = [shares(independent(n, exponent, seed)) for seed in range(seeds)]
            print_row(f"n = {n:,}, variance ∝ p^{exponent}", torch.tensor(drawn).mean(0))
    print_row("bursts, 32 × 256", torch.tensor([shares(bursts(seed)) for seed in range(seeds)]).mean(0))


def trained(settings: DemoSettings, token_ids: list[int], tokenizer: object, folder: Path) -> torch.nn.Module:
    """The demo's model after the demo's training."""
    L.seed_everything(settings.seed, verbose=False)
    model = new_model(settings, tokenizer)  # type: ignore[arg-type]
    trainer = L.Trainer(
        max_steps=settings.max_steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    module = LanguageModel(model, settings.learning_rate, settings.max_steps)
    trainer.fit(module, training_batches(token_ids, settings))
    return model.cpu().eval()


def on_text(max_steps: int, draws: int, length: int, most: int) -> None:
    """Share of each block from 8 and 32 sequences drawn from ``most``, and from all of these, which is the truth."""
    from embedgeo.demo.command import corpus_tokens  # noqa: PLC0415

    settings = DemoSettings(max_steps=max_steps)
    token_ids, tokenizer = corpus_tokens(settings)
    with TemporaryDirectory() as folder:
        model = trained(settings, token_ids, tokenizer, Path(folder))
    windows = torch.tensor(token_ids).unfold(0, length, length)
    g = torch.Generator().manual_seed(0)
    chosen = windows[torch.randperm(len(windows), generator=g)[:most]]
    blocks = [layer for layer in resolve_layers(model, "blocks") if layer.name.startswith("block")]
    with torch.no_grad():
        states = [model(part, output_hidden_states=True).hidden_states[1:] for part in chosen.split(8)]
    print(f"\n| {max_steps} steps, {len(chosen)} sequences of {length} | " + " | ".join(ESTIMATORS) + " |\n|" + "---|" * 5)
    for i, layer in enumerate(blocks[:-1]):  # the last of the hidden states is after the final norm
        hidden = torch.cat([part[i] for part in states])
        for size in (8, 32, len(chosen)):
            parts = [torch.randperm(len(chosen), generator=g)[:size] for _ in range(draws if size < len(chosen) else 1)]
            values = [
                shares(Sample(hidden[p].flatten(0, 1), chosen[p].flatten(), torch.arange(size).repeat_interleave(length)))
                for p in parts
            ]
            print_row(f"{layer.name}, {size} sequences", torch.tensor(values).mean(0))


def main(seeds: int = 8, max_steps: int = 1500, draws: int = 8, length: int = 128, most: int = 400) -> None:
    """Print both tables."""
    simulated(seeds)
    on_text(max_steps, draws, length, most)


if __name__ == "__main__":
    CLI(main)
