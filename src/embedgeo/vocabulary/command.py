"""The command ``embedgeo vocabulary``, from top to bottom."""

import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import read_table
from embedgeo.sweep.command import finish, plan_for
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.metrics import metric_factory
from embedgeo.sweep.plan import Planned, describe, parse_shard, shard_of
from embedgeo.sweep.processes import make_fabric
from embedgeo.sweep.quiet import quiet
from embedgeo.sweep.run import Sweep
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.tokenizers import MissingTokenizerError, find_tokenizer
from embedgeo.sweep.worker import versions
from embedgeo.vocabulary import VocabularySettings
from embedgeo.vocabulary.measuring import MatrixWorker
from embedgeo.vocabulary.named import Names, described


def run_vocabulary(settings: VocabularySettings) -> int:
    """See `embedgeo.vocabulary.vocabulary`."""
    given, part = settings.as_sweep(), parse_shard(settings.shard)
    metric_factory(given)  # before anything is downloaded
    asked = settings.as_manifest()
    folder = SweepFolder(settings.folder)
    folder.require_same(asked)
    with quiet():
        plan, done = plan_for(given, folder), folder.done()
        mine = shard_of(plan, part)
        if settings.dry_run:
            print(describe(mine, done))
            return 0
        pending = [each for each in mine if each.name not in done or each.is_stale]
        names = _names(pending, given)
        folder.open(asked, {"versions": {"python": platform.python_version(), **versions()}})
        fabric = make_fabric({"accelerator": "cpu"})
        run = VocabularySweep(fabric, given, plan, pending, {}, folder, names, settings.rows == "trained")
        failures = run.run()
    status = finish(folder, plan, mine, failures)
    print(*_said(folder, mine), sep="\n")
    return status


@dataclass
class VocabularySweep(Sweep):
    """A sweep over embedding matrices.

    Args:
        names: see `MatrixWorker`.
        only_trained: likewise.
    """

    names: Mapping[str, Names | None]
    only_trained: bool

    def _worker(self, downloads: Downloads) -> MatrixWorker:
        return MatrixWorker(self.settings, self.names, downloads, self.only_trained)


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
