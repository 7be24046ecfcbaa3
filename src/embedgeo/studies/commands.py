"""The commands of the studies, which import what they need when they run."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from embedgeo.extras import require_extra
from embedgeo.formatting import listed, shell_command
from embedgeo.presets import preset
from embedgeo.sweep import SweepSettings, sweep

try:
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
except ImportError:  # then there is no command line, which checks them
    NonNegativeInt = int
    PositiveInt = int
    PositiveFloat = float

_NO_RESULTS = ("out", "evict", "dry_run")  # which do not change the results


@dataclass(frozen=True)
class PaperSettings:
    """The options of ``embedgeo reproduce`` beside those of the sweep.

    Args:
        paper: what to compare with. The preset of this name gives the options of the sweep; those
            that are given in place of them come after it.
        claims: a YAML file of claims to compare with in place of the package's own ``papers.yaml``,
            and in its form.
    """

    paper: Literal["yamagiwa2025", "razzhigaev2024", "li2025"]
    claims: Path | None = None


def reproduce(paper: PaperSettings, settings: SweepSettings) -> int:
    """Measure as a paper did, and set what it prints beside what was measured, each with a verdict.

    It is a sweep with the preset of the paper, any of whose options can be given in place of the
    preset's. Then ``reproduce/<paper>.html`` and ``reproduce/<paper>.csv`` in the folder of the
    sweep have a row for each figure and table that the numbers speak to: what the paper prints or
    shows, what was measured, the difference with its standard error, and whether the claim holds,
    does not hold, or cannot be compared, and why. Below them are the figures of the report in
    ``reproduce/<paper>/``, which is written at the layers that the paper draws.

    Args:
        paper: which paper, and its claims.
        settings: the options of the sweep.

    Returns:
        As ``sweep`` does, which also tells what is raised.

    Raises:
        ValueError: the file of claims cannot be read, or has none of the paper.
    """
    require_extra("report,sweep", "embedgeo reproduce")
    from embedgeo.studies.claims import read_claims

    claims = read_claims(paper.paper, paper.claims)
    print(f"{_options(settings, paper.paper)}. The paper's text: {claims.text}")
    status = sweep(settings)
    if settings.dry_run:
        return status
    from embedgeo.studies.reproduce import write_comparison

    write_comparison(claims, settings)
    return status


def _options(settings: SweepSettings, name: str) -> str:
    """The options of a preset as they are here, and others that are given, in a line."""
    asked = SweepSettings(**preset(name))
    shown = []
    for option in dict.fromkeys([*preset(name), *(field.name for field in fields(settings))]):
        here, there = (_in_words(getattr(each, option)) for each in (settings, asked))
        if option in ("model", *_NO_RESULTS):
            continue
        if option in preset(name) or here != there:
            shown.append(f"{option} {here}" + ("" if here == there else f" (preset: {there})"))
    line = f"{name}: {', '.join(shown)}"
    if settings.texts != asked.texts and settings.sample == asked.sample < 1:
        line += (
            f". Of this text, too, only a share of {settings.sample:g} is taken, as the preset "
            "takes of its own: --sample 1 takes all"
        )
    return line


def _in_words(value: object) -> str:
    return listed(value) if isinstance(value, list | tuple) else str(value)


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
