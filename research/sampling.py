"""Errors of the numbers from few rows: of simulated text, whose values are known, and of two small
models' on text.

    python -m research.sampling [--source simulated|decoder|encoder|all] [--draws 8] [--max_steps
    300]

Prints the tables of docs/sampling.md. Errors are relative, of probes drawn repeatedly, from the
known value or from that of all the text: their mean, the bias, and their standard deviation, the
spread.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from jsonargparse import CLI
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional import twonn_dimension
from embedgeo.metrics import IntrinsicDimension, default_metrics
from embedgeo.text import cut_sequences
from research.models import SETTINGS, Kind, Settings, trained
from research.simulations import Corpus

OTHER_SEQUENCES = "intrinsic_dimension, other_sequences"
"""The intrinsic dimension with `neighbors="other_sequences"`."""
NUMBERS = (
    "V_W_over_V_unbiased",
    "V_W_text_over_V_W",
    "M_over_Q",
    "anisotropy",
    "mean_cosine",
    "effective_rank",
    "intrinsic_dimension",
    OTHER_SEQUENCES,
    "intrinsic_dimension_between",
    "intrinsic_dimension_within",
)
SHARES = {"V_W_text_over_V_W"}
"""Differences may be 0 or less, so their errors are differences, too, and not relative."""
SIZES = tuple(512 * 2**i for i in range(7))
"""Rows of a probe."""
LENGTHS = 32, 128, 256
"""Tokens of a sequence, as far as a model has been trained on so many."""
SMALL_ERROR = 0.05

Values = dict[str, float]


class TypedRows(NamedTuple):
    """Rows that are the sum of a part of their token type and one of their own, on subspaces of
    their own.
    """

    x: Tensor
    token_ids: Tensor
    sequence_ids: Tensor
    fresh: Tensor  # as many rows, each of a type of its own
    within: Tensor


def typed_rows(
    between: int, within: int, seed: int, *, n: int = 4096, dim: int = 64, noise: float = 0.1
) -> TypedRows:
    """Rows of Zipf types; ``between`` and ``within`` are the dimensions of both parts, ``noise``
    their ratio.
    """
    generator = torch.Generator().manual_seed(seed)
    axes, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))

    def draw(count: int, axes: Tensor) -> Tensor:
        return torch.randn(count, len(axes), generator=generator, dtype=torch.float64) @ axes

    of_type, of_row = axes[:between], axes[between : between + within]
    ids = torch.multinomial(1 / torch.arange(1.0, 5001), n, replacement=True, generator=generator)
    return TypedRows(
        x=draw(5000, of_type)[ids] + noise * draw(n, of_row),
        token_ids=ids,
        sequence_ids=torch.randint(0, 32, (n,), generator=generator),
        fresh=draw(n, of_type) + noise * draw(n, of_row),
        within=draw(n, of_row),
    )


class Probes(Protocol):
    """Text of which probes can be drawn, with the values that they estimate."""

    name: str
    lengths: tuple[int, ...]

    def draw(
        self, num_sequences: int, length: int, seed: int, *, in_a_row: bool
    ) -> tuple[Tensor, Tensor]:
        """Embeddings, shape (num_sequences, length, d), and their token ids."""

    def all(self, length: int, draws: int) -> Values:
        """The values of all there is, in sequences of this length; dimensions are means over
        samples of its rows.
        """


class SimulatedText:
    """Rows of Zipf types with an effect of their text; consecutive sequences are of texts of eight
    of them.
    """

    name = "simulated"
    lengths = LENGTHS

    def draw(
        self, num_sequences: int, length: int, seed: int, *, in_a_row: bool
    ) -> tuple[Tensor, Tensor]:
        return Corpus(document=8 if in_a_row else 1).draw(num_sequences, length, seed)

    def all(self, length: int, draws: int) -> Values:
        """The known values, and the dimensions of a large sample: there are none that TwoNN would
        come to.
        """
        corpus = Corpus()
        centred = corpus.means - corpus.probabilities @ corpus.means
        of_row = corpus.scale.square() * (corpus.sequence_effect**2 + 0.7**2)
        spectrum = torch.linalg.eigvalsh(centred.T * corpus.probabilities @ centred + of_row.diag())
        shares = spectrum.sqrt() / spectrum.sqrt().sum()
        known = {
            "anisotropy": float(spectrum.max() / spectrum.sum()),
            "effective_rank": float((-shares * shares.log()).sum().exp()),
        }
        large = measured_often(*self.draw(1024, LENGTHS[1], seed=-1, in_a_row=False), draws)
        return large | corpus.population() | known


class ModelText:
    """Rows of a layer of a model, run on all of its text in sequences of each length."""

    def __init__(self, name: str, hidden: dict[int, Tensor], token_ids: dict[int, Tensor]) -> None:
        self.name = name
        self.lengths = tuple(hidden)
        self.hidden = hidden
        self.token_ids = token_ids

    def draw(
        self, num_sequences: int, length: int, seed: int, *, in_a_row: bool
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        number = len(self.token_ids[length])
        places = torch.randperm(number, generator=generator)[:num_sequences]
        if in_a_row:
            start = torch.randint(number - num_sequences + 1, (), generator=generator)
            places = start + torch.arange(num_sequences)
        return self.hidden[length][places], self.token_ids[length][places]

    def all(self, length: int, draws: int) -> Values:
        return measured_often(self.hidden[length], self.token_ids[length], draws)


def measured(x: Tensor, token_ids: Tensor, seed: int = 0) -> Values:
    """The numbers of a probe."""
    dim = x.shape[-1]
    values = values_of(default_metrics(dim, seed, spectrum=True), x, token_ids)
    apart = values_of(
        [IntrinsicDimension(dim, seed=seed, neighbors="other_sequences")], x, token_ids
    )
    values[OTHER_SEQUENCES] = apart["intrinsic_dimension"]
    return {key: values[key] for key in NUMBERS}


def values_of(metrics: Sequence[Metric], x: Tensor, token_ids: Tensor) -> Values:
    """The values of metrics that have seen the rows of a probe."""
    values = {}
    for metric in metrics:
        metric.update(x, token_ids)
        values |= {key: float(value) for key, value in metric.compute().items()}
    return values


def measured_often(x: Tensor, token_ids: Tensor, draws: int) -> Values:
    """The numbers of a probe, means over as many samples of its rows."""
    values = [measured(x, token_ids, seed) for seed in range(draws)]
    return {key: sum(each[key] for each in values) / draws for key in NUMBERS}


class Errors(NamedTuple):
    """Relative errors of a number over probes."""

    bias: float
    spread: float

    @property
    def size(self) -> float:
        """Root of the mean square; NaN where a probe has no value."""
        return (self.bias**2 + self.spread**2) ** 0.5

    def __str__(self) -> str:
        if self.size != self.size:
            return "–"
        return f"{100 * self.bias:+.0f} ± {100 * self.spread:.0f}".replace("-", "−")


@cache
def expected(probes: Probes, draws: int, length: int) -> Values:
    """The values that probes estimate."""
    return probes.all(length, draws)


@cache
def errors(
    probes: Probes, draws: int, size: int, length: int, *, in_a_row: bool
) -> dict[str, Errors]:
    """The errors of the numbers from ``size`` rows in sequences of ``length``."""
    values = expected(probes, draws, length)
    found = []
    for seed in range(draws):
        of_probe = measured(*probes.draw(size // length, length, seed, in_a_row=in_a_row), seed)
        found.append(
            [(of_probe[key] - values[key]) / (key in SHARES or values[key]) for key in NUMBERS]
        )
    by_number = torch.tensor(found, dtype=torch.float64).T
    return {
        key: Errors(float(of.mean()), float(of.std(correction=0)))
        for key, of in zip(NUMBERS, by_number, strict=True)
    }


def enough(found: Sequence[Sequence[Errors]], sizes: Sequence[int]) -> int:
    """The fewest rows from which on the error, over all layers of a size, is small; 0 if it is not
    with the most.
    """
    fewest = 0
    for size, of_layers in zip(reversed(sizes), reversed(found), strict=True):
        if not (sum(each.size**2 for each in of_layers) / len(of_layers)) ** 0.5 <= SMALL_ERROR:
            break
        fewest = size
    return fewest


def print_table(title: str, head: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def by_rows(probes: Probes, draws: int, sizes: Sequence[int]) -> None:
    """Print the errors by the number of rows, in sequences of 128 tokens drawn at random."""
    length = LENGTHS[1]
    found = [errors(probes, draws, size, length, in_a_row=False) for size in sizes]
    values = expected(probes, draws, length)
    print_table(
        f"{probes.name}: error in percent, bias ± spread, of sequences of {length} tokens drawn at "
        f"random",
        ["", "all", *(f"{size:,} rows" for size in sizes)],
        (
            [f"`{key}`", f"{values[key]:.3g}", *(str(each[key]) for each in found)]
            for key in NUMBERS
        ),
    )


def by_sequences(probes: Probes, draws: int, size: int) -> None:
    """Print the errors of as many rows from more and fewer sequences, drawn at random and
    consecutive.
    """
    cells = [(length, in_a_row) for in_a_row in (False, True) for length in probes.lengths]
    found = [errors(probes, draws, size, length, in_a_row=in_a_row) for length, in_a_row in cells]
    print_table(
        f"{probes.name}: error in percent, bias ± spread, of {size:,} rows",
        [
            "",
            *(
                f"{size // length} × {length}{' consecutive' * in_a_row}"
                for length, in_a_row in cells
            ),
        ],
        ([f"`{key}`", *(str(each[key]) for each in found)] for key in NUMBERS),
    )


def by_length(probes: Probes, draws: int) -> None:
    """Print the values of all the text, cut into sequences of each length."""
    print_table(
        f"{probes.name}: values of all the text",
        ["", *(f"in sequences of {length}" for length in probes.lengths)],
        (
            [
                f"`{key}`",
                *(f"{expected(probes, draws, length)[key]:.3g}" for length in probes.lengths),
            ]
            for key in NUMBERS
        ),
    )


def known_dimension(draws: int, largest: int) -> None:
    """Print what the dimensions are of rows of which the part of their type and their own have 16
    dimensions each.
    """
    kinds = "intrinsic_dimension", "intrinsic_dimension_between", "intrinsic_dimension_within"

    def rows() -> Iterator[list[str]]:
        for n in (size for size in (1024, 4096, 16384) if size <= largest):
            found = []
            for seed in range(draws):
                drawn = typed_rows(16, 16, seed, n=n)
                metric = IntrinsicDimension(drawn.x.shape[1], batch_size=n, seed=seed)
                metric.update(drawn.x, drawn.token_ids, sequence_ids=drawn.sequence_ids)
                values = metric.compute()
                as_many = drawn.fresh[: int(values["n_points_between"])]
                found.append(
                    [*(float(values[key]) for key in kinds), twonn_dimension(as_many).dimension]
                )
            every, between, within, fresh = torch.tensor(found).mean(0).tolist()
            yield [f"{n:,}", *(f"{value:.1f}" for value in (every, between, fresh, within))]

    head = ["rows", *(f"`{key}`" for key in kinds)]
    head.insert(3, "as many rows, each of a type of its own")
    print_table(
        "simulated: 16 dimensions between types, 16 within, a tenth of the size", head, rows()
    )


def enough_rows(sources: Sequence[Sequence[Probes]], draws: int, sizes: Sequence[int]) -> None:
    """Print rows and sequences from which on the error is small, the most that any source needs."""
    short, middle, _ = LENGTHS

    def most(key: str, length: int, unit: int = 1, *, in_a_row: bool = False) -> str:
        needed = []
        for texts in sources:
            found = [
                [errors(text, draws, size, length, in_a_row=in_a_row)[key] for text in texts]
                for size in sizes
            ]
            needed.append(enough(found, sizes))
        return f"{max(needed) // unit:,}" if all(needed) else f"more than {sizes[-1] // unit:,}"

    print_table(
        f"for an error of {SMALL_ERROR:.0%} take",
        ["", "rows", "sequences", "rows of consecutive text"],
        (
            [
                f"`{key}`",
                most(key, short),
                most(key, middle, middle),
                most(key, middle, in_a_row=True),
            ]
            for key in NUMBERS
        ),
    )


def model_texts(
    kind: Kind, settings: Settings, num_tokens: int | None = None
) -> Iterator[ModelText]:
    """Two layers of a model after training: half way, and the last, as `hidden_states` has them."""
    found = trained(kind, settings)
    print(f"\n{found}")
    names = found.model.config.num_hidden_layers // 2, found.model.config.num_hidden_layers
    hidden: dict[int, dict[int, Tensor]] = {layer: {} for layer in names}
    token_ids = {}
    for length in (each for each in LENGTHS if each <= settings.seq_len):
        token_ids[length] = cut_sequences([found.token_ids.tolist()], length, num_tokens)
        with torch.inference_mode():
            batches = [
                found.model(input_ids=ids, output_hidden_states=True).hidden_states
                for ids in token_ids[length].split(4096 // length)
            ]
        for layer, of_length in hidden.items():
            of_length[length] = torch.cat([states[layer] for states in batches])
    for layer, of_length in hidden.items():
        yield ModelText(f"{kind}, hidden.{layer:02}", of_length, token_ids)


def main(
    source: Literal["simulated", "decoder", "encoder", "all"] = "all",
    draws: int = 8,
    max_steps: int | None = None,
    largest: int = SIZES[-1],
    num_tokens: int | None = None,
) -> None:
    """Print the tables of a source, and of all of them the rows to take."""
    sizes = [size for size in SIZES if size <= largest]
    sources: list[list[Probes]] = []
    if source in ("simulated", "all"):
        known_dimension(draws, largest)
        sources.append([SimulatedText()])
    for kind in ("decoder", "encoder"):
        if source in (kind, "all"):
            settings = replace(SETTINGS[kind], max_steps=max_steps or SETTINGS[kind].max_steps)
            sources.append([*model_texts(kind, settings, num_tokens)])
    for text in itertools.chain(*sources):
        by_rows(text, draws, sizes[::2])
        by_sequences(text, draws, min(4096, sizes[-1]))
        if isinstance(text, ModelText):
            by_length(text, draws)
    if source == "all":
        enough_rows(sources, draws, sizes)


if __name__ == "__main__":
    CLI(main)
