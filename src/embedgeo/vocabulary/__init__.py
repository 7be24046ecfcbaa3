"""Geometry of the embedding matrices, whose rows are the vocabulary; ``embedgeo vocabulary``
imports the rest late.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from embedgeo.extras import require_extra
from embedgeo.sweep import SweepSettings, require_sources, without_garbage_collection

MatrixRows = Literal["all", "trained"]
_RUN_OPTIONS = ("out", "shard", "evict", "dry_run")  # which do not change the results


@dataclass(frozen=True)
class VocabularySettings:
    """The options of ``embedgeo vocabulary``.

    Args:
        model: as for ``sweep``, of Hugging Face models.
        steps: as for ``sweep``.
        revisions: as for ``sweep``.
        tokenizer: as for ``sweep``; it tells which rows no token uses, and names the others. If
            there is none, rows go by their numbers.
        rows: ``all`` of a matrix; or the ``trained`` ones: those that a token uses and that do not
            look untrained.
        metrics: as for ``sweep``; there are no token types here, for each token has one row.
        spectrum: also compute what needs all eigenvalues, such as the effective rank.
        discard_fraction: as for ``sweep``.
        id_batches: as for ``sweep``.
        after_processing: as for ``sweep``.
        extra: as for ``sweep``.
        save_samples: as for ``sweep``.
        dtype: data type that the matrices are converted to.
        out: the folder; default: ``runs/vocabulary-<name>``.
        shard: as for ``sweep``.
        evict: as for ``sweep``.
        dry_run: only print the plan.
        trust_remote_code: run code that comes with a repository.

    Raises:
        ValueError: an option of the wrong type or outside its range.
    """

    model: str | list[str]
    steps: str | int | list[int] = "all"
    revisions: str = "*"
    tokenizer: str | None = None
    rows: MatrixRows = "all"
    metrics: str = "embedgeo.streaming_metrics"
    spectrum: bool = True
    discard_fraction: float = 0.1
    id_batches: int = 1
    after_processing: bool = False
    extra: str | list[str] | tuple[()] = ()
    save_samples: bool = False
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    out: str | None = None
    shard: str = "0/1"
    evict: bool = True
    dry_run: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.rows not in get_args(MatrixRows):
            raise ValueError(f"rows must be all or trained; got {self.rows!r}.")
        self.as_sweep()

    def as_sweep(self) -> SweepSettings:
        """The options that a sweep has, too; ``rows`` mean something else there."""
        return SweepSettings(
            **{name: value for name, value in asdict(self).items() if name != "rows"}
        )

    @property
    def folder(self) -> Path:
        """The folder: ``out``, or ``runs/vocabulary-`` and the name of the first model."""
        return Path(
            self.out or f"runs/vocabulary-{self.as_sweep().folder.name.removeprefix('sweep-')}"
        )

    def as_manifest(self) -> Mapping[str, Any]:
        """The settings that the results depend on, as recorded in ``manifest.json``."""
        recorded = {name: value for name, value in asdict(self).items() if name not in _RUN_OPTIONS}
        of_sweep = self.as_sweep()
        return {
            **recorded,
            "by": "embedgeo vocabulary",
            "model": list(of_sweep.models),
            "extra": of_sweep.extra_names,
        }


def vocabulary(settings: VocabularySettings) -> int:
    """Measure the input and the output embedding matrix of checkpoints, whose rows are the
    vocabulary.

    The results are in a folder like a sweep's, at layers ``input_embedding`` and
    ``output_embedding``. Rows that are copies of another one, that no token uses, or that look
    untrained are counted there and named in ``vocabulary/<name>.parquet``. Only these matrices are
    read, of safetensors files. Started again, it goes on where it was.

    Args:
        settings: the options.

    Returns:
        Exit status: 0 if all are done, 3 if some checkpoints failed, which the next run tries
        again.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: settings that do not fit each other, the model or the folder.
        OSError: the folder cannot be written, or the checkpoints cannot be listed.
    """
    require_extra("sweep", "embedgeo vocabulary")
    require_sources(settings.as_sweep().models, settings.tokenizer)

    with without_garbage_collection():
        from embedgeo.vocabulary.command import run_vocabulary

    return run_vocabulary(settings)
