"""A check before a run of days starts; the command line imports this, and what it needs when it
runs.
"""

from dataclasses import dataclass
from typing import Literal

from embedgeo.extras import require_extra


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
    from embedgeo.doctor.command import run_doctor

    run_doctor(settings)
