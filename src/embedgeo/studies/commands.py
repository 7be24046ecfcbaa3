"""The commands of the studies, which import what they need when they run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embedgeo.extras import require_extra
from embedgeo.formatting import shell_command


def drift(folder: Path, rows: int = 1024) -> None:
    """Compare the same rows over the checkpoints of a sweep and through the layers, from its saved
    samples.

    ``embedgeo sweep --save-samples true`` and ``Geometry.save(…, save_samples=True)`` save them.
    Each checkpoint is compared with the one before and the first one, and each layer with the one
    below, in ``drift/<name>.parquet``: the report, ``metrics.csv`` and ``tensorboard/`` have these
    records with the others. ``cka.parquet`` has the similarity of steps with steps at some layers,
    and of layers with layers at some steps. What was interrupted goes on where it was; what is
    there already, of the same samples, is not computed again.

    Args:
        folder: of the sweep.
        rows: how many of the saved rows are compared; the adjusted linearity takes more than there
            are coordinates.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: there are no saved samples, a file is damaged, or ``rows`` is less than 4.
        OSError: the folder is not there, or cannot be written.
    """
    require_extra("report", "embedgeo drift", "pandas", "pyarrow", "rich", "safetensors")
    if rows < 4:
        raise ValueError(f"rows must be at least 4, or no similarity is defined; got {rows}.")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"drift takes the folder of a sweep; {folder} is none.")
    from embedgeo.studies.drift import Comparison

    comparison = Comparison(Path(folder), rows)
    num_new, num_all = comparison.write()
    if comparison.fewest_rows < rows:
        print(
            f"compared down to {comparison.fewest_rows} rows instead of {rows}: no more were "
            f"saved, or are in both"
        )
    print(f"{num_new} of {num_all} checkpoints compared now: {Path(folder) / 'drift'}")
    print(shell_command("embedgeo", "report", folder))


@dataclass(frozen=True)
class DoctorSettings:
    """The options of ``embedgeo doctor``.

    Args:
        model_or_config: a repository on the Hub or a local folder, of which only ``config.json`` is
            read; a function or class that makes the model, as ``package.module:make_model`` (the
            working directory is searched, too); or the YAML file of a LightningCLI, whose model and
            whose monitors are taken.
        model_class: the LightningModule of a YAML file whose ``model`` has no ``class_path``, as
            ``package.module.Class``.
        layers: as for ``sweep``; default: those of the file, else ``blocks``.
        metrics: ``auto``, or a function of a layer's width, as ``package.function``; default: those
            of the file, else ``auto``: those that a monitor chooses.
        rows: as for ``sweep``; default: those of the file, else ``tokens``.
        window: optimizer steps that are measured together; default: those of the file, else 1.
        batch_size: sequences of an optimizer step on one rank.
        seq_len: tokens in a sequence; default: 512, or as many as the model has positions.
        jackknife: number of groups for standard errors; default: those of the file, else 0.
        ranks: number of ranks that train, each on such batches of its own.
        trust_remote_code: run code that comes with a repository.
    """

    model_or_config: str
    model_class: str | None = None
    layers: str | list[str] | None = None
    metrics: str | None = None
    rows: Literal["tokens", "mean", "max", "first", "last", "words"] | None = None
    window: int | None = None
    batch_size: int = 8
    seq_len: int | None = None
    jackknife: int | None = None
    ranks: int = 1
    trust_remote_code: bool = False


def doctor(settings: DoctorSettings) -> None:
    """Say what a monitor would do on a model before a run starts: layers, sources, bytes, what
    to change.

    Nothing is trained, and no weights are downloaded.
    """
    require_extra("sweep", "embedgeo doctor")
    from embedgeo.studies.doctor import run_doctor

    run_doctor(settings)
