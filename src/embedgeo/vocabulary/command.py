"""The command ``embedgeo vocabulary``, from top to bottom."""

import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedgeo.checkpoints.loading import Matrices, needed_contents, read_matrices
from embedgeo.formatting import listed, short
from embedgeo.functional.vocabulary import copies, untrained_rows
from embedgeo.geometry.computing import MeasuredLayer, compute
from embedgeo.geometry.export import layer_sample, layer_tables
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import read_table
from embedgeo.results.records import Record, model_record
from embedgeo.results.samples import LayerSample
from embedgeo.sweep.measure import Downloads, Measured, metrics_function
from embedgeo.sweep.plan import Planned, describe, plan_of
from embedgeo.sweep.processes import make_fabric, muted_libraries, versions
from embedgeo.sweep.run import Sweep, finish, measure_here
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import MissingTokenizerError, find_tokenizer, small_files
from embedgeo.vocabulary import VocabularySettings

_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
_MOST = 6
"""Rows of each kind that are named in a line."""


@dataclass(frozen=True)
class Names:
    """What a tokenizer says of the rows of a matrix.

    Attributes:
        texts: by token id.
        unreachable: ids of tokens for bytes that UTF-8 never has: no text has them (Land & Bartolo 2024).
    """

    texts: Mapping[int, str]
    unreachable: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Names":
        """The names of a tokenizer's tokens: their texts, or their pieces where these are no text."""
        pieces = {number: str(piece) for piece, number in tokenizer.get_vocab().items()}
        spelled = {number: str(tokenizer.decode([number])) for number in pieces}
        texts = {i: text if text and "�" not in text else pieces[i] for i, text in spelled.items()}
        bytewise = {chr(byte) for byte in _NEVER_IN_UTF8}  # as byte-level tokenizers write these bytes
        fallback = {f"<0x{byte:02X}>" for byte in _NEVER_IN_UTF8}
        unreachable = {i for i, p in pieces.items() if p in fallback or (p in bytewise and "�" in spelled[i])}
        return cls(texts, frozenset(unreachable))


@dataclass(frozen=True)
class NamedRows:
    """Rows of a matrix that are to be known by name.

    Attributes:
        num_rows: of the matrix.
        first: for each row the first one that is the same, shape (n,).
        without_token: ids that the tokenizer does not have; None if there is no tokenizer.
        untrained: shape (n,), bool; None where that cannot be told.
    """

    num_rows: int
    first: Tensor
    without_token: Tensor | None
    untrained: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, names: Names | None) -> "NamedRows":
        """Those of a matrix, shape (n, d)."""
        first = copies(matrix)
        if names is None:
            return cls(len(matrix), first, None, None)
        ids = range(len(matrix))
        without = torch.tensor([i for i in ids if i not in names.texts], dtype=torch.int64)
        unused = torch.tensor([i for i in ids if i not in names.texts or i in names.unreachable], dtype=torch.int64)
        return cls(len(matrix), first, without, untrained_rows(matrix, unused))

    @property
    def num_copies(self) -> Tensor:
        """How many rows are the same as each row, itself counted, shape (n,)."""
        return self.first.bincount(minlength=self.num_rows)[self.first]

    def counts(self) -> dict[str, float]:
        """How many rows are of each kind; NaN where that is unknown."""
        without, untrained = self.without_token, self.untrained
        return {
            "duplicate_rows": float((self.num_copies > 1).sum()),
            "rows_without_token": torch.nan if without is None else float(len(without)),
            "untrained_rows": torch.nan if untrained is None else float(untrained.sum()),
        }

    def trained(self) -> Tensor:
        """Ids of the rows that a token uses and that do not look untrained."""
        kept = torch.ones(self.num_rows, dtype=torch.bool)
        if self.without_token is not None:
            kept[self.without_token] = False
        return (kept if self.untrained is None else kept & ~self.untrained).nonzero().flatten()

    def table(self, names: Names | None) -> pd.DataFrame:
        """A row for each: token_id, token, same_as (the first of its copies, or -1), without_token and untrained."""
        is_copy = self.num_copies > 1
        without, untrained = (torch.zeros(self.num_rows, dtype=torch.bool) for _ in range(2))
        if self.without_token is not None:
            without[self.without_token] = True
        if self.untrained is not None:
            untrained = self.untrained
        ids = (is_copy | without | untrained).nonzero().flatten()
        texts = {} if names is None else names.texts
        columns = {"same_as": self.first.where(is_copy, -1), "without_token": without, "untrained": untrained}
        table = pd.DataFrame({"token_id": ids.numpy(), **{key: each[ids].numpy() for key, each in columns.items()}})
        return table.assign(token=[texts.get(i, "") for i in ids.tolist()])


def described(layer: str, dim: int, values: pd.Series, table: pd.DataFrame) -> str:
    """A line about the rows of a matrix that are to be known by name.

    Args:
        layer: the name of the matrix.
        dim: d.
        values: of the matrix, by metric.
        table: see `NamedRows.table`.
    """
    without, untrained, copied = table[table.without_token], table[table.untrained], table[table.same_as >= 0]
    parts = [f"{short(values['n'])} rows of {dim} measured"]
    if len(without):
        parts.append(f"{len(without)} without a token ({_ranges(without.token_id)})")
    if len(copied):
        groups = [" = ".join(_named(rows)) for _, rows in copied.groupby("same_as")]
        parts.append(f"{len(copied)} equal to another one ({'; '.join(groups[:3])})")
    if len(untrained):
        parts.append(f"{len(untrained)} look untrained ({', '.join(_named(untrained))})")
    if values["untrained_rows"] != values["untrained_rows"]:
        parts.append("untrained rows cannot be told from the others")
    return f"  {layer}: {'; '.join(parts)}"


def _named(rows: pd.DataFrame) -> Sequence[str]:
    named = [f"{row.token_id} {row.token!r}" if row.token else str(row.token_id) for row in rows.itertuples()]
    return named if len(named) <= _MOST else [*named[:_MOST], f"{len(named) - _MOST} more"]


def _ranges(ids: Iterable[int]) -> str:
    """Numbers in ascending order, those in a row as a range.

    >>> _ranges([3, 7, 8, 9])
    '3, 7–9'
    """
    runs = [[i for _, i in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return listed([f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], _MOST)


INPUT, OUTPUT = "input_embedding", "output_embedding"
"""The names of the matrices, as layers."""


@dataclass
class MatrixWorker:
    """Measures the embedding matrices of checkpoints, one checkpoint at a time.

    Args:
        settings: the options that a sweep has, too.
        names: of the tokens of each model, by `Checkpoint.model`; None of one without a tokenizer.
        downloads: where to.
        only_trained: leave out rows that no token uses or that look untrained.
    """

    settings: SweepSettings
    names: Mapping[str, Names | None]
    downloads: Downloads
    only_trained: bool

    def measured(self, planned: Planned, choose_next: Callable[[], Planned | None]) -> Measured:
        """Measure the matrices of a checkpoint, while the files of the next one are fetched.

        Args:
            planned: the checkpoint.
            choose_next: chooses the next one.

        Raises:
            Exception: of any kind: it cannot be fetched, read or measured.
        """
        try:
            planned = self._narrowed(planned)
            path = self.downloads.start(planned).result()
            if path.is_file():
                raise ValueError(f"a vocabulary is that of a Hugging Face model; {path.name} is a file of Lightning's.")
            assert planned.contents is not None
            matrices = read_matrices(path, planned.contents, **self._loading)
            if (following := choose_next()) is not None:
                self.downloads.start(self._narrowed(following))
            return self._of_both(matrices, self.names[planned.checkpoint.model])
        finally:
            self.downloads.remove(planned)

    @property
    def _loading(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.settings.dtype), "trust_remote_code": self.settings.trust_remote_code}

    def _narrowed(self, planned: Planned) -> Planned:
        """The checkpoint with no more of its files on the Hub than have to be fetched."""
        contents = planned.contents
        if contents is None or planned.checkpoint.path is not None or len(contents.weights) < 3:
            return planned
        small = [file.name for file in contents.files if file.name == "config.json" or "index" in file.name]
        with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
            folder = small_files(planned, small, Path(name))
            trusted = self.settings.trust_remote_code
            return replace(planned, contents=needed_contents(contents, folder, trust_remote_code=trusted))

    def _of_both(self, matrices: Matrices, names: Names | None) -> Measured:
        """What there is to say of both matrices; where they are one, it is measured once."""
        of_input = self._of_one(INPUT, 0, matrices.input, names)
        parts = [of_input]
        if matrices.is_tied:
            records, tables, sample = of_input
            again = [Record(**{**record, "layer": OUTPUT, "layer_index": 1}) for record in records]
            tables = {kind: table.assign(layer=OUTPUT, layer_index=1) for kind, table in tables.items()}
            parts.append((again, tables, deepcopy(sample)))
        elif matrices.output is not None:
            parts.append(self._of_one(OUTPUT, 1, matrices.output, names))
        records = [record for records, _, _ in parts for record in records]
        if len(parts) > 1:
            records.append(model_record("tied_embeddings", float(matrices.is_tied)))
        samples = {layer: sample for layer, (_, _, sample) in zip((INPUT, OUTPUT), parts, strict=False) if sample}
        return Measured(
            records,
            {kind: pd.concat([tables[kind] for _, tables, _ in parts], ignore_index=True) for kind in of_input[1]},
            {"model_class": matrices.model_class},
            samples if self.settings.save_samples else None,
        )

    def _of_one(
        self, layer: str, layer_index: int, matrix: Tensor, names: Names | None
    ) -> tuple[list[Record], dict[str, pd.DataFrame], LayerSample | None]:
        """The records of a matrix, its tables by kind, and its sample, where that is asked for."""
        rows = NamedRows.of(matrix, names)
        kept = rows.trained() if self.only_trained else torch.arange(len(matrix))
        metrics = LayerMetrics(metrics_function(self.settings), matrix.shape[1], device=matrix.device)
        with torch.inference_mode():
            metrics.update(matrix if len(kept) == len(matrix) else matrix[kept])
            layers = [MeasuredLayer(layer, layer_index, metrics)]
            records = compute(layers)
            tables = layer_tables(layers)
            sample = layer_sample(metrics) if self.settings.save_samples else None
        if sample is not None and sample.row_numbers is not None:
            sample = replace(sample, row_numbers=kept[sample.row_numbers])
        for metric, count in rows.counts().items():
            records.append(Record(**{**records[0], "metric": metric, "value": count, "stderr": torch.nan}))
        tables["vocabulary"] = rows.table(names).assign(layer=layer, layer_index=layer_index)
        return records, tables, sample


def run_vocabulary(settings: VocabularySettings) -> int:
    """See `embedgeo.vocabulary.vocabulary`."""
    of_sweep = settings.as_sweep()
    metrics_function(of_sweep)  # which is refused before anything is downloaded
    manifest = settings.as_manifest()
    folder = SweepFolder(settings.folder)
    folder.require_settings(manifest)
    with muted_libraries():
        plan, mine = plan_of(of_sweep, folder)
        done = folder.done()
        if settings.dry_run:
            print(describe(mine, done))
            return 0
        pending = [planned for planned in mine if planned.name not in done or planned.is_stale]
        names = _names(pending, of_sweep)
        folder.open(manifest, {"versions": {"python": platform.python_version(), **versions()}})
        sweep = Sweep(make_fabric({"accelerator": "cpu"}), of_sweep, plan, pending, {}, folder)
        with sweep.at_work(), Downloads(folder.path, evict=settings.evict) as downloads:
            measure_here(sweep, MatrixWorker(of_sweep, names, downloads, only_trained=settings.rows == "trained"))
    status = finish(folder, plan, mine, sweep.failures)
    print(*_said(folder, mine), sep="\n")
    return status


def _names(plan: Sequence[Planned], settings: SweepSettings) -> dict[str, Names | None]:
    """What the tokenizers say of the rows, by model; it is said of models that have none."""
    models: dict[str, list[Planned]] = {}
    for planned in plan:
        models.setdefault(planned.checkpoint.model, []).append(planned)
    names: dict[str, Names | None] = {}
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as folder:
        for model, of_model in models.items():
            try:
                names[model] = Names.of(find_tokenizer(of_model, settings, Path(folder)).tokenizer)
            except MissingTokenizerError:
                names[model] = None
                print(f"{model} has no tokenizer: rows go by their numbers; name one by tokenizer=")
    return names


def _said(folder: SweepFolder, plan: Sequence[Planned]) -> Iterator[str]:
    """Lines about the rows of the last checkpoint that are to be known by name."""
    done = folder.done()
    last = next((planned.name for planned in reversed(plan) if planned.name in done), None)
    if last is None:
        return
    records, table = folder.read(last), read_table(folder.path / "vocabulary" / f"{last}.parquet")
    is_tied = bool(records[records["metric"] == "tied_embeddings"]["value"].any())
    yield f"{last}, named in vocabulary/{last}.parquet{': both matrices are one' if is_tied else ''}"
    for layer, of_layer in records[records["layer_index"] >= int(is_tied)].groupby("layer", sort=False):
        values = of_layer.set_index("metric")["value"]
        width = int(of_layer["width"].iloc[0])
        yield described(str(layer), width, values, table[table["layer"] == layer])
