"""Embedding matrices of checkpoints, whose rows are the tokens of the vocabulary.

    python -m research.vocabulary --model EleutherAI/pythia-160m --steps log --out runs/vocabulary

The input and the output matrix are measured; tied ones, once. ``<out>/<name>.parquet`` has the
numbers, and ``<out>/<name>-rows.csv`` the rows to be known by name: those that equal another one,
that no token uses, that look untrained, and the six nearest to the mean row.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import embedgeo
from embedgeo.functional import merge_duplicates, two_nearest_distances
from research.tables import checkpoint_parser, checkpoint_tables, load_tokenizer

NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
TOLERANCE = 1e-5  # of copies, relative to the median distance from the mean
NEAREST = 6


def first_copies(x: Tensor) -> Tensor:
    """Index of the first row that equals each row but for rounding, as `merge_duplicates` has it,
    shape (n,). A row with NaN or Inf equals none.
    """
    first = torch.arange(len(x))
    finite = x.isfinite().all(1).nonzero().flatten()
    rows = x[finite]
    distinct = merge_duplicates(rows, TOLERANCE).double()
    if len(distinct) == len(rows):
        return first
    reach = TOLERANCE * (distinct - distinct.mean(0)).norm(dim=1).median()
    places = finite[two_nearest_distances(rows)[:, 0] <= reach]
    near = x[places].double()
    label = places
    before = torch.full_like(places, -1)
    while not label.equal(before):  # along chains of near rows
        before = label
        label = torch.stack([label[(row - near).norm(dim=1) <= reach].min() for row in near])
    first[places] = label
    return first


def untrained_rows(x: Tensor, unused: Tensor) -> Tensor | None:
    """Marks of the rows that look like those which no token uses, whose indices are ``unused``.

    Unused rows have had decay, and at the output a push away from the hidden states, but no example
    of their own. Rows that lie as near to their mean as they do have seen no more: within 1.1 +
    4 / √(2d) times the median distance of an unused row to the mean of the other ones. (Norms of
    Gaussian rows have the C.V. 1 / √(2d).) The reference is that of Land & Bartolo 2024 ("Fishing
    for Magikarp"); the limit is not theirs.

    None where it cannot be told: fewer than two unused rows are finite, or more than half of the
    used rows are as near as they, as before the training.
    """
    known = x[unused].double()
    is_finite = known.isfinite().all(1)
    unused = unused[is_finite]
    known = known[is_finite]
    m = len(unused)
    if m < 2:
        return None
    center = known.mean(0)
    of_known = (known - center).norm(dim=1) * m / (m - 1)  # from the mean of the other ones
    distance = (x.double() - center).norm(dim=1)
    distance[unused] = of_known
    rounding = 4 * torch.finfo(x.dtype).eps * center.norm()
    is_near = distance <= (1.1 + 4 / (2 * x.shape[1]) ** 0.5) * of_known.median() + rounding
    used_and_near = int(is_near.sum() - is_near[unused].sum())
    return None if 2 * used_and_near > len(x) - m else is_near


def about_centroid(x: Tensor) -> tuple[dict[str, float], Tensor]:
    """Mean and spread of the norms about the mean row, beside the spreads of Gaussian rows of this
    mean and variance, with that offset and without; and these norms.
    """
    rows = x.double()
    center = rows.mean(0)
    norms = (rows - center).norm(dim=1)
    offset = float(center.square().sum())
    variance = float(norms.square().mean())
    # of |x|²; that of |x| follows where it is small beside the mean
    of_squares = (2 * variance + 4 * offset) * variance / x.shape[1]
    return {
        "centroid_norm_mean": float(norms.mean()),
        "centroid_norm_cv": float(norms.std(correction=0) / norms.mean()),
        "centroid_norm_cv_gaussian": (2 * x.shape[1]) ** -0.5,
        "norm_cv_gaussian": of_squares**0.5 / (2 * (variance + offset)),
    }, norms


def token_names(tokenizer: Any) -> tuple[dict[int, str], set[int]]:
    """The text of each token, or its piece where that is no text; and the tokens for bytes that
    UTF-8 never has, which are in no text.
    """
    pieces = {number: str(piece) for piece, number in tokenizer.get_vocab().items()}
    spelled = {number: str(tokenizer.decode([number])) for number in pieces}
    bytewise = {chr(byte) for byte in NEVER_IN_UTF8}
    fallback = {f"<0x{byte:02X}>" for byte in NEVER_IN_UTF8}
    unreachable = {
        number
        for number, piece in pieces.items()
        if piece in fallback or (piece in bytewise and "�" in spelled[number])
    }
    names = {
        number: text if text and "�" not in text else pieces[number]
        for number, text in spelled.items()
    }
    return names, unreachable


def measure_matrix(x: Tensor, tokenizer: Any = None) -> tuple[dict[str, float], pd.DataFrame]:
    """Numbers of a matrix, and its rows to be known by name. Without a tokenizer it is not known
    which rows no token uses.
    """
    values: dict[str, float] = {}
    dim = x.shape[1]
    for metric in (
        embedgeo.EmbeddingMoments(dim),
        embedgeo.Anisotropy(dim, spectrum=True),
        embedgeo.IntrinsicDimension(dim),
    ):
        metric.update(x)
        values |= {key: float(value) for key, value in metric.compute().items()}
    first = first_copies(x)
    is_copy = first.bincount(minlength=len(first))[first] > 1
    names: dict[int, str] = {}
    without_token = torch.zeros_like(is_copy)
    untrained = None
    if tokenizer is not None:
        names, unreachable = token_names(tokenizer)
        without_token = torch.tensor([i not in names for i in range(len(x))])
        unused = [i for i in range(len(x)) if i not in names or i in unreachable]
        untrained = untrained_rows(x, torch.tensor(unused, dtype=torch.int64))
    of_centroid, distances = about_centroid(x)
    values |= of_centroid
    values["duplicate_rows"] = int(is_copy.sum())
    values["rows_without_token"] = math.nan if tokenizer is None else int(without_token.sum())
    values["untrained_rows"] = math.nan if untrained is None else int(untrained.sum())
    rows = pd.DataFrame(
        {
            "token": [names.get(i, "") for i in range(len(x))],
            "same_as": first.where(is_copy, -1),
            "without_token": without_token,
            "untrained": False if untrained is None else untrained,
            "from_centroid": distances,
        }
    ).rename_axis("token_id")
    is_near = rows["from_centroid"].rank(method="first") <= NEAREST
    is_known = (rows["same_as"] >= 0) | rows["without_token"] | rows["untrained"] | is_near
    return values, rows[is_known]


def main(arguments: Sequence[str] | None = None) -> None:
    options = checkpoint_parser("Measure embedding matrices.").parse_args(arguments)

    def measure(checkpoint: Any) -> pd.DataFrame:
        model = checkpoint.load(getattr(torch, options.dtype))
        try:
            tokenizer = load_tokenizer(options, checkpoint)
        except (OSError, ValueError) as error:
            tokenizer = None
            print(f"{checkpoint.name}: rows go by their numbers, without a tokenizer ({error})")
        matrices = {"input_embedding": model.get_input_embeddings().weight.detach()}
        head = model.get_output_embeddings()
        if head is not None and head.weight.data_ptr() != matrices["input_embedding"].data_ptr():
            matrices["output_embedding"] = head.weight.detach()
        values, rows = {}, {}
        for layer, matrix in matrices.items():
            values[layer], rows[layer] = measure_matrix(matrix, tokenizer)
        named = pd.concat(rows, names=["layer"])
        named.to_csv(options.out / f"{checkpoint.name}-rows.csv")
        return pd.DataFrame(values).rename_axis("metric").reset_index()

    for name, table in checkpoint_tables(options, measure):
        print(name, table.to_string(index=False), sep="\n")


if __name__ == "__main__":
    main()
