"""What share V_W / V the estimators give from few rows: simulated, where it is 0.6, and on text.

    python -m research.within_token_variance [--seeds 8] [--max_steps 300] [--draws 8]

Prints the tables of docs/research.md. "MS_W" pools the squared deviations from the means of the
token types over their degrees of freedom, as embedgeo did before: unbiased if all types have one
variance and all rows are independent.
"""

from typing import NamedTuple

import torch
from jsonargparse import CLI
from torch import Tensor
from transformers import GPTNeoXForCausalLM

from embedgeo.functional import (
    context_split,
    local_variance,
    row_moments,
    token_table,
    unbiased_split,
    variance_split,
    within_variance,
)
from embedgeo.text import cut_sequences
from research.models import Settings, trained

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
    alone, types = (
        token_table(*sample._replace(sequence_ids=ids)) for ids in (None, sample.sequence_ids)
    )
    num_sequences = (
        n if sample.sequence_ids is None else n.new_tensor(len(sample.sequence_ids.unique()))
    )
    by = (
        alone.m2.sum() / (n - len(alone.n)),
        within_variance(alone, n),
        within_variance(types, num_sequences),
    )
    plug_in = variance_split(alone)["V_W_over_V"]
    return [
        float(plug_in),
        *(float(unbiased_split(n, variance, within)["V_W_over_V_unbiased"]) for within in by),
    ]


def independent(n: int, exponent: float, seed: int) -> Sample:
    """Rows of Zipf types whose variances are proportional to p**exponent, and 0.6 of the whole."""
    g = torch.Generator().manual_seed(seed)
    p = 1 / torch.arange(1, TYPES + 1, dtype=torch.float64)
    p /= p.sum()
    variance = p**exponent
    variance *= SHARE / (p * variance).sum()
    ids = torch.multinomial(p, n, replacement=True, generator=g)
    means = (1 - SHARE) ** 0.5 * torch.randn(TYPES, DIM, generator=g, dtype=torch.float64)
    return Sample(
        means[ids]
        + variance[ids, None].sqrt() * torch.randn(n, DIM, generator=g, dtype=torch.float64),
        ids,
    )


def bursts(seed: int, num_sequences: int = 32, length: int = 256, own: int = 20) -> Sample:
    """Sequences half of whose tokens are of 20 types of their own; half of the variance within is
    an effect of both.
    """
    g = torch.Generator().manual_seed(seed)
    p = 1 / torch.arange(1, TYPES + 1, dtype=torch.float64)
    ids = torch.multinomial(p, num_sequences * length, replacement=True, generator=g).view(
        num_sequences, length
    )
    topics = torch.randint(0, TYPES, (num_sequences, own), generator=g)
    drawn = topics.gather(1, torch.randint(0, own, (num_sequences, length), generator=g))
    ids = torch.where(torch.rand(num_sequences, length, generator=g) < 0.5, drawn, ids).flatten()
    sequences = torch.arange(num_sequences).repeat_interleave(length)
    means = (1 - SHARE) ** 0.5 * torch.randn(TYPES, DIM, generator=g, dtype=torch.float64)
    _, pair = (sequences * TYPES + ids).unique(return_inverse=True)
    effects = torch.randn(int(pair.max()) + 1, DIM, generator=g, dtype=torch.float64)[pair]
    noise = torch.randn(len(ids), DIM, generator=g, dtype=torch.float64)
    return Sample(means[ids] + (SHARE / 2) ** 0.5 * (effects + noise), ids, sequences)


def nested(
    seed: int, num_sequences: int, *, burst: float = 0.0, growing: bool = False
) -> tuple[Sample, float]:
    """Rows of sequences of unequal length whose variance within types, ∝ p^-0.2, is in part of type
    and sequence.

    Args:
        seed: of the rows.
        num_sequences: how many.
        burst: how unequally sequences have a type: the squared C.V. of its frequency in them.
        growing: the part grows with the frequency of the type, from 0.4 to 0.8; otherwise it is
            0.5.

    Returns:
        The rows, and the part of the sequence in the variance within their types.
    """
    g = torch.Generator().manual_seed(seed)
    p = 1 / torch.arange(1, TYPES + 1, dtype=torch.float64)
    p /= p.sum()
    variance = p**-0.2
    place = (p / p[-1]).log() / (p[0] / p[-1]).log()
    part = 0.4 + 0.4 * place if growing else torch.full_like(p, 0.5)
    weights = p.expand(num_sequences, TYPES)
    if burst:
        shape = torch.full((num_sequences, TYPES), 1 / burst, dtype=torch.float64)
        weights = weights * torch._standard_gamma(shape, generator=g)
    drawn = torch.multinomial(weights, 208, replacement=True, generator=g)
    lengths = torch.randint(48, 208, (num_sequences, 1), generator=g)
    sequences, position = (torch.arange(208) < lengths).nonzero().unbind(1)
    ids = drawn[sequences, position]
    _, pair = (sequences * TYPES + ids).unique(return_inverse=True)
    effects = torch.randn(int(pair.max()) + 1, 8, generator=g, dtype=torch.float64)[pair]
    noise = torch.randn(len(ids), 8, generator=g, dtype=torch.float64)
    of_text, of_noise = (variance * part)[ids], (variance * (1 - part))[ids]
    x = of_text.sqrt()[:, None] * effects + of_noise.sqrt()[:, None] * noise
    return Sample(x, ids, sequences), float(of_text.sum() / (of_text + of_noise).sum())


def text_share(sample: Sample) -> float:
    """Estimated part of the sequences in the variance within types."""
    types = token_table(*sample)
    num_sequences = types.n.new_tensor(len(sample.sequence_ids.unique()))
    within = within_variance(types, num_sequences)
    return float(context_split(within, local_variance(types), num_sequences)["V_W_text_over_V_W"])


def print_row(name: str, values: Tensor) -> None:
    print(f"| {name} |", " | ".join(f"{value:.3f}" for value in values.tolist()), "|", flush=True)


def simulated(seeds: int) -> None:
    """Mean share over seeds; it is 0.600."""
    print("\n| simulated, 0.600 | " + " | ".join(ESTIMATORS) + " |\n|" + "---|" * 5)
    for n in (2_048, 8_192):
        for exponent in (-0.1, 0.0, 0.1, 0.2):
            drawn = [shares(independent(n, exponent, seed)) for seed in range(seeds)]
            print_row(f"n = {n:,}, variance ∝ p^{exponent}", torch.tensor(drawn).mean(0))
    print_row(
        "bursts, 32 × 256", torch.tensor([shares(bursts(seed)) for seed in range(seeds)]).mean(0)
    )
    print("\n| V_W between texts ÷ V_W | true | estimate | sd over samples |\n|---|---|---|---|")
    for growing in (False, True):
        for burst in (0.0, 3.0, 20.0):
            for num_sequences in (8, 32, 128, 400):
                drawn = [
                    nested(seed, num_sequences, burst=burst, growing=growing)
                    for seed in range(seeds)
                ]
                found = torch.tensor([text_share(sample) for sample, _ in drawn])
                true = torch.tensor([share for _, share in drawn]).mean()
                name = (
                    f"{num_sequences} sequences, burst "
                    f"{burst:g}{', growing with frequency' * growing}"
                )
                print_row(name, torch.stack((true, found.mean(), found.std())))


def outputs_of_blocks(model: GPTNeoXForCausalLM, sequences: Tensor) -> list[Tensor]:
    """The hidden states after each block, shape (sequences, positions, d)."""
    blocks = model.gpt_neox.layers
    seen: list[list[Tensor]] = [[] for _ in blocks]
    for block, outputs in zip(blocks, seen, strict=True):
        block.register_forward_hook(
            lambda module, args, output, outputs=outputs: outputs.append(output)
        )
    with torch.no_grad():
        for batch in sequences.split(8):
            model(batch)
    return [torch.cat(outputs) for outputs in seen]


def on_text(max_steps: int, draws: int, most: int) -> None:
    """Mean share at each block from 8 and 32 sequences out of ``most``, and that from all of these,
    the truth.
    """
    settings = Settings(max_steps=max_steps)
    found = trained("decoder", settings)
    print(f"\n{found}")
    sequences = cut_sequences([found.token_ids.tolist()], settings.seq_len)
    g = torch.Generator().manual_seed(0)
    sequences = sequences[torch.randperm(len(sequences), generator=g)[:most]]
    length = sequences.shape[1]
    drawn = {
        size: [torch.randperm(len(sequences), generator=g)[:size] for _ in range(draws)]
        for size in (8, 32)
    }
    drawn[len(sequences)] = [torch.arange(len(sequences))]
    print(
        f"\n| text, {max_steps} steps | "
        + " | ".join(ESTIMATORS)
        + " |\n|"
        + "---|" * (len(ESTIMATORS) + 1)
    )
    for i, hidden in enumerate(outputs_of_blocks(found.model, sequences)):
        for size, parts in drawn.items():
            of = torch.arange(size).repeat_interleave(length)
            values = [
                shares(Sample(hidden[part].flatten(0, 1), sequences[part].flatten(), of))
                for part in parts
            ]
            print_row(f"block.{i:02}, {size} sequences", torch.tensor(values).mean(0))


def main(seeds: int = 8, max_steps: int = 300, draws: int = 8, most: int = 400) -> None:
    """Print both tables."""
    simulated(seeds)
    on_text(max_steps, draws, most)


if __name__ == "__main__":
    CLI(main)
