"""The commands of the studies, which import what they need when they run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from embedgeo.extras import require_extra
from embedgeo.formatting import listed, shell_command
from embedgeo.presets import preset
from embedgeo.results.groups import groups_of, parse_groups
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
    settings = _with_groups_of_these(settings, paper.paper)
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
        if option in ("model", "model_group", *_NO_RESULTS):
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


def _with_groups_of_these(settings: SweepSettings, name: str) -> SweepSettings:
    """The settings without those models in the preset's groups that are not measured here."""
    asked = preset(name).get("model_group", ())
    if settings.model_group != asked:
        return settings
    groups: dict[str, list[str]] = {}
    for model, group in parse_groups(asked).items():
        try:
            groups_of({model: group}, settings.models)
        except ValueError:  # it is none of them
            continue
        groups.setdefault(group, []).append(model)
    return replace(settings, model_group=groups or ())


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


def drift(folder: Path) -> None:
    """Compare the same rows over the checkpoints of a sweep, from its saved samples.

    ``embedgeo sweep --save-samples true`` saves them. Each checkpoint is compared with the one
    before and with the first one, on at most 1,024 rows of a layer. ``drift/<name>.parquet`` has
    the records; the report, ``metrics.csv`` and ``tensorboard/`` have them with the others. What
    was interrupted goes on where it was.

    Args:
        folder: of the sweep.

    Raises:
        ImportError: a package is missing: see `embedgeo.extras`.
        ValueError: there are no saved samples of several steps, or a file is damaged.
        OSError: the folder is not there, or cannot be written.
    """
    require_extra("report", "embedgeo drift", "pandas", "pyarrow", "safetensors")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"drift takes the folder of a sweep; {folder} is none.")
    from embedgeo.drift import compare_samples

    num_new, num_all = compare_samples(Path(folder))
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
        source: a repository on the Hub or a local folder, of which only ``config.json`` is read; or
            a function or class that makes the model, as ``package.module:make_model`` (the working
            directory is searched, too).
        layers: as for ``sweep``.
        batch_size: sequences of an optimizer step on one rank.
        seq_len: tokens in a sequence; default: 512, or as many as the model has positions.
        jackknife: number of groups for standard errors.
        ranks: number of ranks that train, each on such batches of its own.
        trust_remote_code: run code that comes with a repository.
    """

    source: str
    layers: str | list[str] = "blocks"
    batch_size: int = 8
    seq_len: int | None = None
    jackknife: int = 0
    ranks: int = 1
    trust_remote_code: bool = False


def doctor(settings: DoctorSettings) -> None:
    """Say what a monitor would do on a model before a run starts: layers, sources, bytes, what
    to change.

    Nothing is trained, and no weights are downloaded.
    """
    require_extra("sweep", "embedgeo doctor")
    from embedgeo.doctor import run_doctor

    run_doctor(**asdict(settings))
