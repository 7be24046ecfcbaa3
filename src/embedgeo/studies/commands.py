"""The commands of the studies, which import what they need when they run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from embedgeo.extras import require_extra
from embedgeo.formatting import shell_command
from embedgeo.sweep import SweepSettings, require_sources, sweep

try:
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
except ImportError:  # then there is no command line, which checks them
    NonNegativeInt = int
    PositiveInt = int
    PositiveFloat = float

MatrixRows = Literal["all", "trained"]
AblationParts = Literal["ablation", "logit_lens", "both"]
_NO_RESULTS = ("out", "shard", "evict", "dry_run")  # which do not change the results


@dataclass(frozen=True)
class AblationSettings:
    """The options of ``embedgeo ablate`` beside those of the sweep.

    Args:
        parts: what is measured: the ``ablation`` of each layer; the ``logit_lens``: the loss of
            what the final norm and the head make of each layer's hidden state
            (`embedgeo.logit_lens`), one more pass a layer; or ``both``.

    Raises:
        ValueError: ``parts`` is none of these.
    """

    parts: AblationParts = "ablation"

    def __post_init__(self) -> None:
        if self.parts not in get_args(AblationParts):
            raise ValueError(f"parts must be ablation, logit_lens or both; got {self.parts!r}.")


def ablate(ablation: AblationSettings, settings: SweepSettings) -> int:
    """Measure what the loss needs of each layer's output, over the checkpoints of a training run.

    It is a sweep that also replaces the output of one layer after the other by what lacks its
    offset, its top directions, its largest coordinates, its context or its tokens
    (`embedgeo.ablation`), and writes the change of the loss beside the geometry. It takes 22 more
    passes a layer and one, as long as ``removed_directions`` are three; rows are replaced with the
    first ``skip_first_positions`` (or 1) of them, and without.

    Args:
        ablation: what else is measured.
        settings: the options of the sweep.

    Returns:
        As ``sweep`` does, which also tells what is raised.
    """
    require_extra("sweep", "embedgeo ablate")
    require_sources(settings.models, settings.tokenizer)
    from embedgeo.studies.ablate import SHOWN, announcement, checkpoint_records
    from embedgeo.sweep.measure import Study

    if settings.out is None:
        name = settings.folder.name.removeprefix("sweep-")
        settings = replace(settings, out=f"runs/ablate-{name}")
    measure = partial(checkpoint_records, parts=ablation.parts)
    announce = partial(announcement, parts=ablation.parts)
    return sweep(settings, Study({"ablate": ablation.parts}, measure, announce, SHOWN))


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
        recorded = {name: value for name, value in asdict(self).items() if name not in _NO_RESULTS}
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

    from embedgeo.studies.vocabulary import run_vocabulary

    return run_vocabulary(settings)


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
class DemoSettings:
    """The options of ``embedgeo demo``.

    Args:
        out: folder to write to. An earlier demo in it is replaced; a folder with anything else is
            refused.
        max_steps: optimizer steps.
        every_n_steps: measure at every so many steps, besides 0, 1, 2, 4 … 512 and the last.
        num_layers: transformer blocks.
        hidden_size: width of the embeddings, a multiple of 32.
        vocab_size: tokens of the tokenizer, which is trained first.
        seq_len: tokens in a sequence, for training and measuring.
        batch_size: sequences in a training batch.
        learning_rate: the highest, reached after a twentieth of the steps.
        seed: of the weights and the order of the text.
    """

    out: Path = Path("runs/demo")
    max_steps: PositiveInt = 300
    every_n_steps: PositiveInt = 25
    num_layers: PositiveInt = 6
    hidden_size: PositiveInt = 128
    vocab_size: PositiveInt = 2048
    seq_len: PositiveInt = 256
    batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 3e-3
    seed: NonNegativeInt = 0


def demo(settings: DemoSettings) -> None:
    """Train a small language model on Python's documentation and watch its geometry.

    Takes about two minutes on two cores, and needs neither a network nor a GPU.
    """
    require_extra("report,sweep", "embedgeo demo")
    from embedgeo.studies.demo import run_demo

    run_demo(settings)


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
