"""The command ``embedgeo vocabulary``."""

import json
import platform
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedgeo.capture.structure import input_embedding, output_embedding
from embedgeo.checkpoints.files import Contents, reading, weight_files
from embedgeo.checkpoints.loading import described_model, load_model
from embedgeo.formatting import listed, number
from embedgeo.functional.moments import row_chunks
from embedgeo.functional.neighbors import Neighbors
from embedgeo.functional.precision import accumulator_dtype, row_norms
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import MeasuredLayer, compute
from embedgeo.geometry.export import layer_sample, layer_tables
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import read_table
from embedgeo.results.records import Record, model_record
from embedgeo.studies.commands import VocabularySettings
from embedgeo.sweep import SweepSettings
from embedgeo.sweep.measure import Downloads, Measured, metrics_function
from embedgeo.sweep.plan import Planned, as_recorded, plan_sweep, plan_table
from embedgeo.sweep.processes import make_fabric, muted_libraries, versions
from embedgeo.sweep.run import Sweep, finish, measure_here
from embedgeo.sweep.texts import MissingTokenizerError, by_model, find_tokenizer, small_files

# GPT-NeoX's head, which transformers 5 calls as that of others
_IN_FILES = {"lm_head.weight": "embed_out.weight"}

_INPUT = "input_embedding"
_OUTPUT = "output_embedding"
_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
_MOST_NAMED = 6  # rows of each kind, in a line
# share by which an untrained row may be farther than the median of the rows that no token uses
_FARTHER = 0.1
# and as many standard deviations, relative to the mean, of the norm of Gaussian rows
_DEVIATIONS = 4.0


def run_vocabulary(settings: VocabularySettings) -> int:
    """Measure the matrices: see `embedgeo.studies.commands.vocabulary`."""
    folder = SweepFolder(settings.folder)
    settings = replace(settings, **as_recorded(settings.as_sweep(), folder))
    of_sweep = settings.as_sweep()
    metrics_function(of_sweep)  # which is refused before anything is downloaded
    manifest = settings.as_manifest()
    folder.require_settings(manifest)
    with muted_libraries():
        plan = plan_sweep(of_sweep, folder)
        if settings.dry_run:
            print(plan_table(plan.mine, folder.done()))
            return 0
        names = _find_names(plan.pending, of_sweep)
        folder.open(manifest, {"versions": {"python": platform.python_version(), **versions()}})
        sweep = Sweep(make_fabric({"accelerator": "cpu"}), of_sweep, plan, {}, folder)
        with sweep.at_work(), Downloads(folder.path, evict=settings.evict) as downloads:
            worker = MatrixWorker(
                of_sweep, names, downloads, only_trained=settings.rows == "trained"
            )
            measure_here(sweep, worker.measure)
    status = finish(sweep)
    print(*_row_lines(folder, plan.mine), sep="\n")
    return status


@dataclass(frozen=True)
class TokenNames:
    """Names of a tokenizer's tokens, by token id: their texts, or their pieces where these are no
    text.
    """

    texts: Mapping[int, str]
    # tokens for bytes that UTF-8 never has: no text has them (Land & Bartolo 2024)
    unreachable: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenNames":
        """The names of a tokenizer's tokens."""
        pieces = {number: str(piece) for piece, number in tokenizer.get_vocab().items()}
        spelled = {number: str(tokenizer.decode([number])) for number in pieces}
        texts = {i: text if text and "�" not in text else pieces[i] for i, text in spelled.items()}
        # as byte-level tokenizers write these bytes
        bytewise = {chr(byte) for byte in _NEVER_IN_UTF8}
        fallback = {f"<0x{byte:02X}>" for byte in _NEVER_IN_UTF8}
        unreachable = {
            i for i, p in pieces.items() if p in fallback or (p in bytewise and "�" in spelled[i])
        }
        return cls(texts, frozenset(unreachable))


def _find_names(plan: Sequence[Planned], settings: SweepSettings) -> dict[str, TokenNames | None]:
    """The names of the rows by model; None, which is printed, where it has no tokenizer."""
    names: dict[str, TokenNames | None] = {}
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as folder:
        for model, checkpoints in by_model(plan).items():
            try:
                tokenizer, _ = find_tokenizer(checkpoints, settings, Path(folder))
                names[model] = TokenNames.of(tokenizer)
            except MissingTokenizerError:
                names[model] = None
                print(
                    f"{model} has no tokenizer: rows go by their numbers; name one by --tokenizer"
                )
    return names


def _row_kinds(
    matrix: Tensor, names: TokenNames | None
) -> tuple[dict[str, float], pd.DataFrame, Tensor]:
    """Number of rows of each kind, NaN where unknown; table of the rows to be known by name; ids of
    trained rows.
    """
    first = copies(matrix)  # for each row the first one that is the same
    is_copy = first.bincount(minlength=len(first))[first] > 1
    without_token = torch.zeros_like(is_copy)
    untrained = None  # where that cannot be told
    if names is not None:
        without_token = torch.tensor([i not in names.texts for i in range(len(matrix))])
        unused = [i for i in range(len(matrix)) if without_token[i] or i in names.unreachable]
        untrained = untrained_rows(matrix, torch.tensor(unused, dtype=torch.int64))
    counts = {
        "duplicate_rows": float(is_copy.sum()),
        "rows_without_token": torch.nan if names is None else float(without_token.sum()),
        "untrained_rows": torch.nan if untrained is None else float(untrained.sum()),
    }
    untrained = torch.zeros_like(is_copy) if untrained is None else untrained
    of_centroid, distances = about_centroid(matrix)
    counts |= of_centroid
    is_near = torch.zeros_like(is_copy)
    is_near[distances.argsort(stable=True)[:_MOST_NAMED]] = True
    ids = (is_copy | without_token | untrained | is_near).nonzero().flatten()
    columns = {
        "same_as": first.where(is_copy, -1),
        "without_token": without_token,
        "untrained": untrained,
        "from_centroid": distances,
    }
    table = pd.DataFrame(
        {"token_id": ids.numpy(), **{key: each[ids].numpy() for key, each in columns.items()}}
    )
    table = table.assign(
        token=["" if names is None else names.texts.get(i, "") for i in ids.tolist()]
    )
    return counts, table, (~(without_token | untrained)).nonzero().flatten()


def about_centroid(matrix: Tensor) -> tuple[dict[str, float], Tensor]:
    """Mean and spread of the rows' norms about the centroid, beside the spread of Gaussian rows of
    the same mean and variance, with and without that offset; and these norms.
    """
    rows = matrix.to(accumulator_dtype(matrix.device))
    center = rows.mean(0)
    norms = row_norms(rows - center)
    offset = float(center.square().sum())
    variance = float(norms.square().mean())
    dim = matrix.shape[1]
    # of |x|²; that of |x| follows where it is small beside the mean
    of_squares = (2 * variance + 4 * offset) * variance / dim
    return {
        "centroid_norm_mean": float(norms.mean()),
        "centroid_norm_cv": float(norms.std(correction=0) / norms.mean()),
        "centroid_norm_cv_gaussian": (2 * dim) ** -0.5,
        "norm_cv_gaussian": of_squares**0.5 / (2 * (variance + offset)),
    }, norms


def _row_lines(folder: SweepFolder, plan: Sequence[Planned]) -> Iterator[str]:
    """Lines about the rows of the last checkpoint that are to be known by name."""
    done = folder.done()
    last = next((planned.name for planned in reversed(plan) if planned.name in done), None)
    if last is None:
        return
    records = folder.read(last)
    table = read_table(folder.path / "vocabulary" / f"{last}.parquet")
    is_tied = bool(records[records["metric"] == "tied_embeddings"]["value"].any())
    yield (
        f"{last}, named in vocabulary/{last}.parquet{': both matrices are one' if is_tied else ''}"
    )
    for layer, of_layer in records[records["layer_index"] >= int(is_tied)].groupby(
        "layer", sort=False
    ):
        values = of_layer.set_index("metric")["value"]
        rows = table[table["layer"] == layer]
        parts = [f"{values['n']:,.0f} rows of {of_layer['width'].iloc[0]} measured"]
        if len(without := rows[rows.without_token]):
            parts.append(f"{len(without)} without a token ({ranges(without.token_id)})")
        if len(copied := rows[rows.same_as >= 0]):
            groups = [" = ".join(_row_names(of_one)) for _, of_one in copied.groupby("same_as")]
            parts.append(f"{len(copied)} equal to another one ({'; '.join(groups[:3])})")
        if len(untrained := rows[rows.untrained]):
            parts.append(f"{len(untrained)} look untrained ({', '.join(_row_names(untrained))})")
        if values["untrained_rows"] != values["untrained_rows"]:
            parts.append("untrained rows cannot be told from the others")
        spreads = ("norm_cv", "norm_cv_gaussian", "centroid_norm_cv", "centroid_norm_cv_gaussian")
        own, of_random, centred, of_centred = (number(values[key]) for key in spreads)
        parts.append(
            f"norms spread by {own} (Gaussian rows with this offset: {of_random}), about the "
            f"centroid by {centred} (without: {of_centred})"
        )
        nearest = rows.sort_values("from_centroid").head(_MOST_NAMED)
        parts.append(f"nearest to the centroid: {', '.join(_row_names(nearest))}")
        yield f"  {layer}: {'; '.join(parts)}"


def _row_names(rows: pd.DataFrame) -> Sequence[str]:
    named = [
        f"{row.token_id} {row.token!r}" if row.token else str(row.token_id)
        for row in rows.itertuples()
    ]
    return (
        named
        if len(named) <= _MOST_NAMED
        else [*named[:_MOST_NAMED], f"{len(named) - _MOST_NAMED} more"]
    )


def ranges(ids: Iterable[int]) -> str:
    """Numbers in ascending order, those in a row as a range."""
    runs = [
        [i for _, i in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])
    ]
    return listed(
        [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], _MOST_NAMED
    )


class Matrices(NamedTuple):
    """The embedding matrices of a model, shape (vocabulary, d), which may be one; None for an
    output it has not.
    """

    input: Tensor
    output: Tensor | None
    is_tied: bool
    model_class: str


@dataclass
class MatrixWorker:
    """Measures the embedding matrices of checkpoints."""

    settings: SweepSettings
    names: Mapping[str, TokenNames | None]  # of each model's tokens, if it has a tokenizer
    downloads: Downloads
    only_trained: bool  # leave out rows that no token uses or that look untrained

    def measure(self, planned: Planned, choose_next: Callable[[], Planned | None]) -> Measured:
        """Measure the matrices of a checkpoint, while the files of the one that is chosen next are
        fetched.
        """
        try:
            planned = self._with_needed_files(planned)
            path = self.downloads.start(planned).result()
            if path.is_file():
                raise ValueError(
                    f"a vocabulary is that of a Hugging Face model; {path.name} is a file of other "
                    f"weights."
                )
            assert planned.contents is not None
            trusted = self.settings.trust_remote_code
            dtype = getattr(torch, self.settings.dtype)
            matrices = read_matrices(path, planned.contents, dtype=dtype, trust_remote_code=trusted)
            if (following := choose_next()) is not None:
                self.downloads.start(self._with_needed_files(following))
            return self._measure_matrices(matrices, self.names[planned.checkpoint.model])
        finally:
            self.downloads.remove(planned)

    def _with_needed_files(self, planned: Planned) -> Planned:
        """The checkpoint with no more of its files on the Hub than have to be fetched."""
        contents = planned.contents
        if contents is None or planned.checkpoint.path is not None or len(contents.weights) < 3:
            return planned
        small = [
            file.name
            for file in contents.files
            if file.name == "config.json" or "index" in file.name
        ]
        with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
            folder = small_files(planned, small, Path(name))
            trusted = self.settings.trust_remote_code
            return replace(
                planned, contents=_needed_contents(contents, folder, trust_remote_code=trusted)
            )

    def _measure_matrices(self, matrices: Matrices, names: TokenNames | None) -> Measured:
        parts = [self._measure_matrix(matrices.input, names)]
        if matrices.is_tied:
            parts *= 2
        elif matrices.output is not None:
            parts.append(self._measure_matrix(matrices.output, names))
        records: list[Record] = []
        tables = defaultdict[str, list[pd.DataFrame]](list)
        samples = {}
        for index, (layer, part) in enumerate(zip((_INPUT, _OUTPUT), parts, strict=False)):
            place: Any = {"layer": layer, "layer_index": index}
            records += [Record(**{**record, **place}) for record in part.records]
            for kind, table in part.tables.items():
                tables[kind].append(table.assign(**place))
            if part.sample:
                samples[layer] = deepcopy(part.sample[_INPUT])
        if len(parts) > 1:
            records.append(model_record("tied_embeddings", float(matrices.is_tied)))
        joined = {kind: pd.concat(each, ignore_index=True) for kind, each in tables.items()}
        facts = {"model_class": matrices.model_class}
        return Measured(records, joined, facts, samples if self.settings.save_samples else None)

    def _measure_matrix(self, matrix: Tensor, names: TokenNames | None) -> Measured:
        counts, noted, trained = _row_kinds(matrix, names)
        kept = trained if self.only_trained else torch.arange(len(matrix))
        metrics = LayerMetrics(
            metrics_function(self.settings), matrix.shape[1], device=matrix.device
        )
        with torch.inference_mode():
            rows = matrix if len(kept) == len(matrix) else matrix[kept]
            metrics.update(rows, row_ids(rows))
            layers = [MeasuredLayer(_INPUT, 0, metrics)]
            records = compute(layers)
            tables = layer_tables(layers)
            sample = layer_sample(metrics) if self.settings.save_samples else None
        if sample is not None and sample.row_numbers is not None:
            sample = replace(sample, row_numbers=kept[sample.row_numbers])
        for metric, count in counts.items():
            records.append(
                Record(**{**records[0], "metric": metric, "value": count, "stderr": torch.nan})
            )
        tables["vocabulary"] = noted
        return Measured(records, tables, sample={_INPUT: sample} if sample is not None else None)


def copies(x: Tensor) -> Tensor:
    """Return the index of the first row that equals each row but for rounding, shape (n,): see
    `merge_duplicates`. A row with NaN or Inf equals none.
    """
    first = torch.arange(len(x), device=x.device)
    finite = x.isfinite().all(1).nonzero().flatten()
    _, place = Neighbors(x if len(finite) == len(x) else x[finite]).distinct()
    least = torch.full_like(place, len(x)).scatter_reduce(0, place, finite, "amin")
    first[finite] = least[place]
    return first


def untrained_rows(x: Tensor, unused: Tensor) -> Tensor | None:
    """Marks of the rows of an embedding matrix that look like those which no token uses, whose
    indices are ``unused``.

    These rows have had decay, and at the output a push away from the hidden states, but no example
    of their own. The rows that lie as near to their mean as they do have seen no more: within 1.1 +
    4 / √(2d) times the median distance of an unused row to the mean of the others. (Norms of
    Gaussian rows have the C.V. 1 / √(2d).) The reference is that of Land & Bartolo 2024 ("Fishing
    for Magikarp"); the limit is not theirs. None where it cannot be told: fewer than two unused
    rows are finite, or more than half of the other rows are as near as they, as before the
    training.
    """
    wide = accumulator_dtype(x.device)
    known = x[unused].to(wide)
    is_finite = known.isfinite().all(1)
    unused, known = unused[is_finite], known[is_finite]
    if (m := len(unused)) < 2:
        return None
    center = known.mean(0)
    of_known = row_norms(known - center) * m / (m - 1)  # from the mean of the others
    distance = torch.empty(len(x), dtype=wide, device=x.device)
    for chunk in row_chunks(x):
        distance[chunk] = row_norms(x[chunk].to(wide) - center)
    distance[unused] = of_known
    rounding = 4 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(center)
    limit = (1 + _FARTHER + _DEVIATIONS / (2 * x.shape[1]) ** 0.5) * of_known.median()
    is_near = distance <= limit + rounding
    return None if 2 * int(is_near.sum() - is_near[unused].sum()) > len(x) - m else is_near


def read_matrices(
    folder: Path, contents: Contents, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> Matrices:
    """The input and the output embedding of a Hugging Face checkpoint, of which `_needed_contents`
    have to be there.

    Of safetensors files only these tensors are read, if they have the names and shapes of the
    model's; otherwise the model is loaded. A bias of the output is not part of its matrix.
    """
    model = described_model(folder, trust_remote_code=trust_remote_code)
    model_class = type(model).__name__
    table, head = _matrices(model)
    is_tied = head is table
    shapes = [weight.shape for weight in (table, head) if weight is not None]
    files: dict[str, Path] = {}
    for path in (folder / file.name for file in weight_files(contents.weights)):
        if path.suffix == ".safetensors":
            with reading(path.name), safe_open(path, "pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
    tensors = []
    for name in _matrix_names(model, files) or ():
        with reading(files[name].name), safe_open(files[name], "pt") as opened:
            tensors.append(opened.get_tensor(name).to(dtype))
    if tensors and all(tensor.shape in shapes for tensor in tensors):
        table = tensors[0]
        head = tensors[1] if len(tensors) > 1 else None
        # as transformers ties: not those of which the files have two that differ
        is_tied = is_tied and (head is None or head.equal(table))
        return Matrices(table, table if is_tied else head, is_tied, model_class)
    loaded = load_model(
        folder, contents, dtype=dtype, trust_remote_code=trust_remote_code, may_be_both=True
    )
    table, head = _matrices(loaded.model)
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    output = None if head is None else head.detach()
    return Matrices(table.detach(), output, is_tied, type(loaded.model).__name__)


def _needed_contents(
    contents: Contents, folder: Path, *, trust_remote_code: bool = False
) -> Contents:
    """The files that `read_matrices` needs of a checkpoint in several safetensors files; all where
    that is not known.

    The folder need only have its ``config.json`` and the index of its weights.
    """
    index = next(
        (file for file in contents.weights if file.name.endswith(".safetensors.index.json")), None
    )
    if index is None:
        return contents
    with reading(index.name):
        places = dict(json.loads((folder / index.name).read_text())["weight_map"])
    names = _matrix_names(described_model(folder, trust_remote_code=trust_remote_code), places)
    if names is None:
        return contents
    wanted = {places[name] for name in names}
    return replace(
        contents, weights=tuple(file for file in contents.weights if file.name in wanted)
    )


def _matrix_names(model: nn.Module, names: Mapping[str, object]) -> list[str] | None:
    """Names of a model's matrices among those of its files: one if they are tied; None if they are
    not all there.
    """
    table, head = _matrices(model)
    at_head = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if module is output_embedding(model)
    }
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def known_names(weight: Tensor, *, of_head: bool) -> list[str]:
        parameters = model.named_parameters(remove_duplicate=False)
        own = [name for name, each in parameters if each is weight and (name in at_head) == of_head]
        bare = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
        return [*own, *bare, *(_IN_FILES[name] for name in own if name in _IN_FILES)]

    of_table = known_names(table, of_head=False)
    of_head = [] if head is None else known_names(head, of_head=True)
    found = [next((name for name in known if name in names), "") for known in (of_table, of_head)]
    if head is table and any(found):
        return list(filter(None, found))
    wanted = found if of_head else found[:1]
    return wanted if all(wanted) else None


def _matrices(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weights of the input and the output embedding; None for an output that a model has
    not.
    """
    table = getattr(input_embedding(model), "weight", None)
    if table is None or table.ndim != 2:
        raise ValueError(
            f"a vocabulary needs an embedding table of tokens; {type(model).__name__} has none."
        )
    return table, getattr(output_embedding(model), "weight", None)
