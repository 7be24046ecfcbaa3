"""Losses with other hidden states: ablations of layers, and the logit lens.

    python -m research.ablation --model EleutherAI/pythia-70m --steps log --out runs/ablation

Layer by layer the rows h of the hidden state are replaced, and the loss is measured again:

- ``identity``: by themselves, which changes nothing;
- ``without_offset``: h − μ;
- ``without_{k}_directions``: h − UUᵀ(h − μ), U being the top k eigenvectors of the covariance Σ;
- ``without_{k}_coordinates``: h with the means of the k coordinates of largest variance;
- ``without_context``: the mean μ_t of their token type; ``without_token``: h − μ_t. Rows of a type
  that the other half does not have stay as they are;
- ``as_noise``: a draw from N(μ, Σ).

μ, U, Σ and μ_t are those of every other sequence, and the loss is that of the rest; then the roles
change, and results are averaged. ``loss_change_…`` is in nats a token, with a standard error over
sequences. Keys that end in ``_after_first`` leave the first position of each sequence as it is, and
all special tokens that a decoder's sequence begins with.

``logit_lens_loss`` is the loss if the last block gives the output of the layer (nostalgebraist
2020, *interpreting GPT: the logit lens*; the notebook of Razzhigaev et al. 2024).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import embedgeo
from embedgeo.functional import row_scatter, token_table
from embedgeo.text import Documents, cut_sequences
from research.tables import checkpoint_parser, checkpoint_tables, load_tokenizer

NO_TARGET = -100
MASKED = 0.15  # share of the tokens at which a masked model's loss is computed
FINAL_NORMS = ("norm", "ln_f", "norm_f", "final_norm", "final_layer_norm", "final_layernorm")


class Text(NamedTuple):
    """Sequences of one length, and the tokens at which the loss is computed."""

    token_ids: Tensor  # what the model reads, shape (sequences, positions)
    targets: Tensor  # the token that the logits of each position predict; NO_TARGET: none
    num_before: int  # special tokens that a decoder's sequence begins with
    unmasked: Tensor  # the tokens before any are masked, shape (sequences, positions)


def read_text(
    documents: Sequence[str], tokenizer: Any, seq_len: int, num_tokens: int, *, is_masked: bool
) -> Text:
    """Tokenize documents as a sweep does: special tokens stand around each sequence of an encoder
    and before each sequence of a decoder.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = whole.index(plain[0])
    before = whole[:start]
    after = whole[start + len(plain) :] if is_masked else []
    room = seq_len - len(before) - len(after)
    encoded = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in documents)
    body = cut_sequences(encoded, room, num_tokens // seq_len * room)
    columns = (torch.tensor(ids, dtype=torch.int64) for ids in (before, after))
    first, last = (ids.expand(len(body), -1) for ids in columns)
    token_ids = torch.cat((first, body, last), 1)
    if not is_masked:
        targets = token_ids.roll(-1, 1)
        targets[:, -1] = NO_TARGET
        return Text(token_ids, targets, len(before), token_ids)
    drawn = torch.rand(token_ids.numel(), generator=torch.Generator().manual_seed(0)) < MASKED
    is_special = torch.isin(token_ids, torch.tensor(tokenizer.all_special_ids))
    masked = drawn.view(token_ids.shape) & ~is_special
    targets = token_ids.masked_fill(~masked, NO_TARGET)
    inputs = token_ids.masked_fill(masked, tokenizer.mask_token_id)
    return Text(inputs, targets, 0, token_ids)


class Layer(NamedTuple):
    """A place in a model: what a module returns, or what it takes."""

    name: str
    module: nn.Module
    is_input: bool = False


def find_layers(model: Any) -> list[Layer]:
    """The input of the first block, the outputs of all blocks, and that of the final norm.

    Raises:
        ValueError: the model is no decoder or encoder with a list of blocks and a language model
            head.
    """
    count = model.config.get_text_config().num_hidden_layers
    stacks = (
        (parent, child)
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    )
    around, blocks = next(stacks, (model, nn.ModuleList()))
    if model.config.is_encoder_decoder or not len(blocks) or model.get_output_embeddings() is None:
        raise ValueError(
            "ablation needs a decoder or an encoder of transformers with a list of its blocks and "
            f"a language model head; {type(model).__name__} is none."
        )
    layers = [Layer("embed", blocks[0], is_input=True)]
    layers += [Layer(f"block.{i:02}", block) for i, block in enumerate(blocks)]
    norms = [child for name, child in around.named_children() if name in FINAL_NORMS]
    return layers + [Layer("final_norm", norm) for norm in norms if norm is not None]


@contextmanager
def replacing(layer: Layer, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which a function makes another hidden state of that of a layer."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    if layer.is_input:
        handle = layer.module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = layer.module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


class Substitutes(NamedTuple):
    """What rows are replaced by, from the statistics of others.

    Attributes:
        mean: μ, shape (d,).
        directions: eigenvectors of the covariance as columns, that of the largest eigenvalue first;
            zeros where the rows have no variance.
        deviations: square roots of its eigenvalues, in this order.
        coordinates: the coordinates, that of the largest variance first.
        token_ids: the token types that have a mean, ascending.
        token_means: their mean rows.
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    coordinates: Tensor
    token_ids: Tensor
    token_means: Tensor

    @classmethod
    def of(cls, rows: Tensor, token_ids: Tensor) -> "Substitutes":
        """The substitutes from rows, shape (n, d), and their token types, shape (n,)."""
        finite = rows.isfinite().all(1)
        rows = rows[finite].double()
        moments = row_scatter(rows)
        scatter = moments.scatter
        values, vectors = torch.linalg.eigh(scatter / moments.n.clamp(min=1))
        values, vectors = values.flip(0), vectors.flip(1)
        vectors = vectors * (values > len(values) * torch.finfo(values.dtype).eps * values[0])
        coordinates = scatter.diagonal().argsort(descending=True, stable=True)
        types = token_table(rows, token_ids[finite]).typed()
        deviations = values.clamp(min=0).sqrt()
        return cls(moments.mean, vectors, deviations, coordinates, types.token_ids, types.mean)

    def replaced(self, name: str, rows: Tensor, token_ids: Tensor, number: int) -> Tensor:
        """The rows of the sequence of this number, shape (n, d), replaced."""
        x = rows.double()
        if name == "without_offset":
            x = x - self.mean
        elif name in ("without_context", "without_token"):
            seen = torch.isin(token_ids, self.token_ids)
            means = self.token_means[torch.searchsorted(self.token_ids, token_ids[seen])]
            x[seen] = means if name == "without_context" else x[seen] - means
        elif name.endswith("_directions"):
            axes = self.directions[:, : int(name.split("_")[1])]
            x = x - (x - self.mean) @ axes @ axes.T
        elif name.endswith("_coordinates"):
            largest = self.coordinates[: int(name.split("_")[1])]
            x[:, largest] = self.mean[largest]
        elif name == "as_noise":
            drawn = torch.Generator().manual_seed(number)
            normal = torch.randn(x.shape, generator=drawn, dtype=torch.float64).to(x)
            # through all axes, so that their signs do not matter
            x = self.mean + (normal @ self.directions * self.deviations) @ self.directions.T
        return x.to(rows.dtype)


def paired_change(before: Tensor, after: Tensor, counts: Tensor) -> tuple[float, float]:
    """Change of a mean over tokens, averaged over the even and the odd sequences, and its standard
    error: that of a ratio of sums over sequences, NaN where a half has fewer than two.

    Args:
        before: sum over the tokens of each sequence, shape (S,), float64.
        after: the same, changed.
        counts: number of tokens of each sequence, shape (S,).
    """
    changes, squares = [], []
    for half in (0, 1):
        n = counts[half::2]
        difference = (after - before)[half::2]
        change = difference.sum() / n.sum()
        spread = (difference - change * n).square().sum() / n.sum().square()
        known = (n > 0).sum()
        changes.append(float(change))
        squares.append(float(spread * known / (known - 1)) if known > 1 else math.nan)
    return sum(changes) / 2, sum(squares) ** 0.5 / 2


class Ablation:
    """The losses of a model on a text, with and without changes of a layer."""

    def __init__(self, model: Any, text: Text, batch_size: int = 8, removed: str = "1,3,10"):
        self.model = model.eval()
        self.model.config.use_cache = False
        self.text = text
        self.batch_size = batch_size
        self.layers = find_layers(model)
        self.counts = (text.targets != NO_TARGET).sum(1).double()
        self.replacements = [
            "without_offset",
            *(f"without_{k}_directions" for k in removed.split(",")),
            *(f"without_{k}_coordinates" for k in removed.split(",")),
            "without_context",
            "without_token",
            "as_noise",
        ]

    @torch.no_grad()
    def losses(self, layer: Layer | None = None, change: Any = None) -> Tensor:
        """Loss summed over the tokens of each sequence; ``change`` takes the number of the first
        sequence of a batch, and the hidden state of a layer.
        """
        sums = []
        for first in range(0, len(self.text.token_ids), self.batch_size):
            batch = slice(first, first + self.batch_size)
            token_ids = self.text.token_ids[batch].to(self.model.device)
            if layer is None:
                logits = self.model(input_ids=token_ids).logits
            else:
                with replacing(layer, partial(change, first)):
                    logits = self.model(input_ids=token_ids).logits
            for own, targets in zip(logits, self.text.targets[batch], strict=True):
                each = F.cross_entropy(own.float(), targets.to(own.device), reduction="none")
                sums.append(each.double().sum().cpu())
        return torch.stack(sums)

    def hidden(self, layer: Layer) -> Tensor:
        """The hidden state of all sequences at a layer, shape (sequences, positions, d)."""
        found = []

        def keep(first: int, hidden: Tensor) -> Tensor:
            found.append(hidden.clone())
            return hidden

        self.losses(layer, keep)
        return torch.cat(found)

    def changes(self) -> list[dict[str, Any]]:
        """Changes of the loss at each layer; the loss, and the share of rows whose token type the
        other half of the sequences does not have.
        """
        plain = self.losses()
        ids = self.text.token_ids
        records = []
        for index, layer in enumerate(self.layers):
            hidden = self.hidden(layer)
            for start in (0, max(1, self.text.num_before)):
                others = [  # for the sequences of each half, from the other half
                    Substitutes.of(
                        hidden[half::2, start:].flatten(0, 1),
                        ids[half::2, start:].flatten().to(hidden.device),
                    )
                    for half in (1, 0)
                ]
                for name in (*([] if start else ["identity"]), *self.replacements):
                    change = partial(self._replaced, name, start, others)
                    value, error = paired_change(plain, self.losses(layer, change), self.counts)
                    metric = f"loss_change_{name}{'_after_first' if start else ''}"
                    records.append(record(layer.name, index, metric, value, error))
        halves = (ids[::2], ids[1::2])
        unseen = sum(int((~torch.isin(*pair)).sum()) for pair in (halves, halves[::-1]))
        loss = float(plain.sum() / self.counts.sum())
        records.append(record("model", -1, "loss", loss))
        return [*records, record("model", -1, "unseen_type_share", unseen / ids.numel())]

    def _replaced(
        self, name: str, start: int, others: Sequence[Substitutes], first: int, hidden: Tensor
    ) -> Tensor:
        """The hidden state of a batch with the rows from a position on replaced."""
        hidden = hidden.clone()
        for number, rows in enumerate(hidden[:, start:], first):
            token_ids = self.text.token_ids[number, start:].to(hidden.device)
            rows.copy_(others[number % 2].replaced(name, rows, token_ids, number))
        return hidden

    def lens(self) -> list[dict[str, Any]]:
        """The loss of what the model makes of each block's output in place of the last block's."""
        layers = [layer for layer in self.layers if layer.name != "final_norm"]
        records = []
        for index, layer in enumerate(layers):
            states = self.hidden(layer)

            def give(first: int, hidden: Tensor, states: Tensor = states) -> Tensor:
                return states[first : first + len(hidden)]

            sums = self.losses(layers[-1], give)
            loss = sums.sum() / self.counts.sum()
            n = (self.counts > 0).sum()
            spread = (sums - loss * self.counts).square().sum() * n / (n - 1)
            error = float(spread.sqrt() / self.counts.sum())
            records.append(record(layer.name, index, "logit_lens_loss", float(loss), error))
        return records

    @torch.no_grad()
    def geometry(self) -> list[dict[str, Any]]:
        """M / Q and the anisotropy of the layers, to be looked at beside."""
        skipped = self.text.num_before
        with embedgeo.observe(self.model, skip_first_positions=skipped) as geometry:
            for token_ids in self.text.unmasked.split(self.batch_size):
                self.model(input_ids=token_ids.to(self.model.device))
        table = geometry.to_frame()
        shown = table[table["metric"].isin(("M_over_Q", "anisotropy"))]
        return [
            record(row["layer"], row["layer_index"], row["metric"], row["value"])
            for _, row in shown.iterrows()
        ]


def record(layer: str, index: int, metric: str, value: float, error: float = math.nan) -> Any:
    return {
        "layer": layer,
        "layer_index": index,
        "metric": metric,
        "value": value,
        "stderr": error,
    }


def draw(name: str, table: pd.DataFrame, file: Path) -> None:
    """Draw the changes of the loss at each layer, the geometry and the logit lens."""
    keys = table["metric"][~table["metric"].str.contains("_after_first|identity")].unique()
    panels = {
        "change of the loss, nats a token": [key for key in keys if key.startswith("loss_change")],
        "share": ["M_over_Q", "anisotropy"],
        "loss by the logit lens, nats a token": ["logit_lens_loss"],
    }
    figure = Figure(figsize=(15, 5), layout="constrained")
    figure.suptitle(name)
    for ax, (label, metrics) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for metric in metrics:
            rows = table[table["metric"] == metric].sort_values("layer_index")
            text = metric.removeprefix("loss_change_")
            ax.errorbar(rows["layer"], rows["value"], rows["stderr"], marker=".", label=text)
        ax.set_ylabel(label)
        ax.tick_params("x", rotation=90)
        ax.legend()
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = checkpoint_parser("Replace hidden states and measure the loss.")
    parser.add_argument("--text", nargs="*", default=[], help="files; default: a built-in text")
    parser.add_argument("--num-tokens", type=int, default=65536)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--removed", default="1,3,10", help="numbers k of directions, coordinates")
    parser.add_argument("--parts", choices=("ablation", "logit_lens", "both"), default="both")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    def measure(checkpoint: Any) -> pd.DataFrame:
        model = checkpoint.load(getattr(torch, options.dtype), options.device)
        text = read_text(
            [*Documents(options.text)],
            load_tokenizer(options, checkpoint),
            options.seq_len,
            options.num_tokens,
            is_masked=type(model).__name__.endswith("ForMaskedLM"),
        )
        run = Ablation(model, text, options.batch_size, options.removed)
        records = run.geometry()
        if options.parts != "logit_lens":
            records += run.changes()
        if options.parts != "ablation":
            records += run.lens()
        return pd.DataFrame(records)

    for name, table in checkpoint_tables(options, measure):
        draw(name, table, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
