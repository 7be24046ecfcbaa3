"""What a sweep has measured of a model, as claims of papers are about it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
import yaml
from numpy.typing import NDArray

import embedgeo
from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares, type_regressions
from research.claims import Paper
from research.verdicts import Series

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULTS = {  # of the sweep's options that printed values depend on
    "unit": "sequence",
    "min_words": 0,
    "max_words": 0,
    "special_tokens": "default",
    "count_special": False,
    "rows": "tokens",
    "types": "id",
    "count_range": [],
    "skip_first_positions": 0,
    "sample": 1.0,
    "seq_len": None,
}
_SEQ_LEN = 512  # of a sweep that is not told another one
_SPREADS = {  # over batches, of metrics that are means over these
    "anisotropy_batch_mean": "anisotropy_batch_std",
    "intrinsic_dimension": "intrinsic_dimension_std",
}
_DRAWS = 100  # of token types, with replacement
_LARGEST = 1e300  # value beyond which it counts as undefined
_LARGEST_OF_TYPE = 1e100  # value that can be squared
_TABLES = ("tokens", "jackknife", "occurrences")
_DECODERS = ("ForCausalLM", "LMHeadModel")


def preset(name: str) -> dict[str, Any]:
    """The options of a paper's preset."""
    options: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text("utf-8"))
    return options


def several(option: str | Sequence[str]) -> list[str]:
    """An option that takes one text or a list of them, as a list."""
    return [option] if isinstance(option, str) else [*option]


_NORMS = {
    "post-ln": ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Albert", "MPNet", "Electra"),
    "pre-ln": ("GPT2", "GPTNeoX", "Llama", "Gemma", "Bloom", "Qwen", "Olmo"),
}


@dataclass(frozen=True)
class Measured:
    """A training run or a final model of a sweep."""

    model: str  # what follows the last slash of its name
    label: str  # tells it from others with this name
    group: str  # encoder, decoder, or unknown
    records: pd.DataFrame  # of layers: step, layer, layer_index, width, metric, value, stderr
    asked: Mapping[str, Any] = field(default_factory=dict)  # the options of the sweep
    preset: Mapping[str, Any] = field(default_factory=dict)  # those of the paper's preset
    texts: Sequence[str] = ()  # files of the text
    text: Mapping[str, Any] = field(default_factory=dict)  # what the manifest has of the text
    facts: Mapping[str, str] = field(default_factory=dict)  # of the last checkpoint
    has_steps: bool = False
    tables: Mapping[str, Mapping[int, Path]] = field(default_factory=dict)  # by kind and step
    with_baseline: Path | None = None  # the values of a report, beside those of Gaussian rows

    # ── layers, steps, options

    @cached_property
    def metrics(self) -> set[str]:
        """Keys of the metrics that have records."""
        return set(self.records["metric"])

    @cached_property
    def steps(self) -> list[int]:
        """The measured steps."""
        return sorted(int(step) for step in self.records["step"].unique())

    @cached_property
    def depth(self) -> list[str]:
        """The layers from the input up, without means over several."""
        by_index = self.records.drop_duplicates("layer").sort_values("layer_index")
        return [layer for layer in by_index["layer"] if "mean(" not in layer]

    @property
    def layers(self) -> list[str]:
        """`depth`; empty for a model of two sides, which has two such ways."""
        sides = {side for layer in self.depth for side in re.findall(r"^(\w+coder\.|)", layer)}
        return self.depth if len(sides) == 1 else []

    @property
    def blocks(self) -> list[str]:
        """The blocks; where none is a layer, the hidden states above the input, or all layers."""
        blocks = [layer for layer in self.depth if re.fullmatch(r"(\w+\.)?block\.\d+", layer)]
        hidden = [layer for layer in self.depth if re.fullmatch(r"(\w+\.)?hidden\.\d+", layer)]
        return blocks or [layer for layer in hidden if int(layer[-2:])] or self.depth

    @property
    def middle(self) -> str:
        """The paper's middle layer, of which L / 2 blocks are below."""
        stream = [layer for layer in self.layers if not layer.endswith("final_norm")] or self.layers
        return stream[len(stream) // 2]

    @property
    def length(self) -> int:
        """Tokens in a sequence, or at most those of a text."""
        return self.asked.get("seq_len") or _SEQ_LEN

    def unlike_rows(self, rows: str) -> str:
        """Say how the kind of rows differs from this one, or from the preset's; empty if not."""
        here, asked = self.asked.get("rows", "tokens"), rows or self.preset.get("rows", "tokens")
        return "" if here == asked else f"other rows: rows is {here!r}, the paper has {asked!r}"

    def unlike(self, options: Sequence[str]) -> str:
        """Say how the text, or else the first of these options, differs from the preset's."""
        if [*self.texts] != several(self.preset.get("text", ())):
            names = [Path(text).name for text in self.texts]
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            named = ", ".join(names[:2]) + more or "the built-in one"
            return f"another text than the preset's: {named}"
        for name in options:
            there = self.preset.get(name, DEFAULTS[name])
            here = self.asked.get(name, there)
            if here != (_SEQ_LEN if name == "seq_len" and there is None else there):
                return f"other rows: {name.replace('_', ' ')} is {here!r}, the preset has {there!r}"
        return ""

    # ── values and their errors

    def table(self, metric: str, column: str = "value") -> pd.DataFrame:
        """A metric at each step (rows) and layer (columns); NaN where it is not finite."""
        of_metric = self.records[self.records["metric"] == metric]
        found = of_metric.pivot(index="step", columns="layer", values=column)
        found = found.reindex(index=self.steps, columns=self.depth).astype(float)
        return found.where(found.abs() <= _LARGEST)

    @property
    def architecture(self) -> str:
        """Where the norms of models of this class stand: "post-ln" or "pre-ln"; "" of others."""
        kind = self.facts.get("model_class", "")
        known = (name for name, classes in _NORMS.items() if kind.startswith(classes))
        return next(known, "")

    @property
    def num_rows(self) -> float:
        """Rows at a layer, as a rule."""
        rows = self.records[self.records["metric"] == "n"]["value"]
        return float(rows.median()) if len(rows) else nan

    def num_types(self) -> float:
        """Token types in the regressions of the last checkpoint."""
        if "token_types_regressed" not in self.metrics:
            return nan
        return float(self.table("token_types_regressed").iloc[-1].max())

    def baseline(self, metric: str, layer: str) -> float:
        """The value of Gaussian rows with the same counts at a layer of the last step."""
        if self.with_baseline is None or not self.with_baseline.exists():
            return nan
        last = self.records[self.records["step"] == self.steps[-1]]
        own = last[(last["metric"] == metric) & (last["layer"] == layer)]
        both = own.merge(pd.read_csv(self.with_baseline), on=["step", "layer", "metric"])
        both = both[np.isclose(both["value_x"], both["value_y"], rtol=1e-12, atol=0)]
        return float(both["gaussian"].iloc[0]) if len(both) else nan

    def num_massive(self, metric: str) -> float:
        """The most massive rows of a layer, where a metric is known without them; else 0."""
        if _without_massive(metric) not in self.metrics or "n_massive" not in self.metrics:
            return 0.0
        return float(self.table("n_massive")[self.layers].max(axis=None))

    def without_massive(self, metric: str) -> "Measured":
        """The same run, with a metric of the rows that are not massive where there are such."""
        records = self.records.set_index(["step", "layer"])
        known = records[records["metric"] == _without_massive(metric)].assign(metric=metric)
        whole = records[records["metric"] == metric]
        others = records[records["metric"] != metric]
        kept = whole[~whole.index.isin(known.index)]
        return replace(self, records=pd.concat([others, kept, known]).reset_index())

    def profile(self, metric: str) -> Series:
        """A metric at the layers of the last step where it has a value."""
        of_types = self.over_types.get(metric)
        if metric not in self.metrics:
            return of_types or Series([], np.empty(0), np.empty((0, 1)))
        values = self.table(metric)[self.layers].iloc[-1].dropna()
        errors = self._errors(metric).iloc[-1][values.index]
        places = [(self.steps[-1], layer) for layer in values.index]
        found = self._series(metric, values, errors, self._deviations(metric, places))
        if of_types is None or [*of_types.names] != found.names:
            return found
        parts = [of_types.deviations]
        if np.isfinite(found.deviations).all():
            parts.append(found.deviations)
        return found._replace(deviations=np.hstack(parts))

    def course(self, metric: str, layer: str = "") -> tuple[Series, list[int]]:
        """A metric over the steps where it has a value, at a layer or as the mean over blocks."""
        layers = [layer] if layer else self.blocks
        table, errors = self.table(metric)[layers], self._errors(metric)[layers]
        values = table.mean(axis=1).dropna()
        # blocks may err together: the mean of their errors bounds that of the mean
        widths = errors.fillna(inf).where(table.notna()).mean(axis=1).replace(inf, nan)
        steps = [int(step) for step in values.index]
        found = self._deviations(metric, [(step, each) for step in steps for each in layers])
        if found is not None:
            of_layers = found.reshape(len(steps), len(layers), -1)
            found = np.asarray(of_layers.mean(axis=1), dtype=np.float64)
        named = values.set_axis([f"step {step:,}" for step in steps])
        return self._series(metric, named, widths.loc[steps], found), steps

    def _series(
        self,
        metric: str,
        values: "pd.Series[float]",
        errors: "pd.Series[float]",
        deviations: NDArray[np.float64] | None,
    ) -> Series:
        if deviations is None:
            deviations = np.diag(errors.to_numpy(dtype=float))
        names = [str(name) for name in values.index]
        return Series(names, values.to_numpy(dtype=float), deviations, self._degrees(metric))

    def _errors(self, metric: str) -> pd.DataFrame:
        """Standard errors of a metric: the jackknife's, or from the spread of batches."""
        table = self.table(metric)
        if self._has_spread(metric):
            spread = self.table(_SPREADS[metric])
            return spread.where(table.notna() & (spread >= 0)) / sqrt(self._batches(metric))
        errors = self.table(metric, "stderr")
        return errors.where(table.notna() & (errors >= 0))

    def _has_spread(self, metric: str) -> bool:
        """Test for a spread over batches where there are no standard errors."""
        is_known = _SPREADS.get(metric) in self.metrics
        return is_known and not (self.table(metric, "stderr") >= 0).any(axis=None)

    @cached_property
    def _groups(self) -> dict[str, pd.DataFrame]:
        """Deviations of the jackknife's groups by metric: a row for each step and layer."""
        parts = {}
        for step, path in sorted(self.tables.get("jackknife", {}).items()):
            table = pd.read_parquet(path)
            table = table[table["layer"].isin(self.depth)]
            table = table.drop_duplicates(["layer", "metric", "group"])
            index = ["metric", "layer"]
            parts[step] = table.pivot(index=index, columns="group", values="deviation")
        if not parts:
            return {}
        of_metrics = pd.concat(parts, names=["step"]).groupby("metric")
        return {str(metric): of_metric.droplevel("metric") for metric, of_metric in of_metrics}

    def _deviations(
        self, metric: str, places: Sequence[tuple[int, str]]
    ) -> NDArray[np.float64] | None:
        """Deviations of the groups at steps and layers; None where any is not known."""
        if metric not in self._groups or not places:
            return None
        index = pd.MultiIndex.from_tuples(places)
        found = self._groups[metric].reindex(index).to_numpy(dtype=float)
        return found if np.isfinite(found).all() and found.shape[1] > 1 else None

    def _degrees(self, metric: str) -> float:
        """Degrees of freedom of the standard errors: their groups or batches, less one."""
        if jackknife := self.asked.get("jackknife"):
            of_groups = self._groups.get(metric, pd.DataFrame()).fillna(0.0)
            return max(1, (int(of_groups.ne(0).any().sum()) or jackknife) - 1)
        return max(1, self._batches(metric) - 1) if self._has_spread(metric) else inf

    def _batches(self, metric: str) -> float:
        if metric == "intrinsic_dimension":
            return self.asked["id_batches"]
        return self.num_rows // self.asked["anisotropy_batch"]

    # ── token types

    @cached_property
    def types(self) -> pd.DataFrame:
        """The token types of the last checkpoint that has a table of them, at all layers."""
        found = self.tables.get("tokens", {})
        if not found:
            return pd.DataFrame(columns=["layer", "token_id", "token", "n", "Q", "M", "V"])
        table = pd.read_parquet(found[max(found)])
        table = table[table["layer"].isin(self.depth) & (table["n"] >= 1)]
        table = table[(table[["n", "Q", "M", "V"]].abs() <= _LARGEST_OF_TYPE).all(axis=1)]
        ids = table["token_id"].astype("string")
        return table.assign(token=table["token"].astype("string").fillna(ids))

    @cached_property
    def over_types(self) -> dict[str, Series]:
        """What `regressions` finds over the token types of the last checkpoint, at all layers.

        Their errors have what the choice of types does, from draws of types with replacement.
        """
        table = self.types[self.types["n"].between(*REGRESSION_COUNT_RANGE)]
        layers = [layer for layer in self.layers if layer in set(table["layer"])]
        if not layers:
            return {}
        columns = [name for name in ("n", "Q", "M", "V", "num_tokens") if name in table]
        wide = table.pivot(index="layer", columns="token_id", values=columns).dropna(axis=1)
        values = {
            name: torch.tensor(wide.loc[layers, name].to_numpy(dtype=float)) for name in columns
        }
        whole = regressions(values)
        count = values["n"].shape[-1]
        drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
        samples = [
            regressions({name: each[:, places] for name, each in values.items()})
            for places in drawn
        ]
        found = {}
        for name, value in whole.items():
            draws = torch.stack([sample[name] for sample in samples], -1)
            deviations = (draws - draws.mean(-1, keepdim=True)) / sqrt(_DRAWS - 1)
            found[name] = Series(layers, value.numpy(), deviations.numpy())
        return found


def _without_massive(metric: str) -> str:
    """The key of a metric without massive rows; over batches it is that of all rows together."""
    return f"{'anisotropy' if metric == 'anisotropy_batch_mean' else metric}_without_massive"


def regressions(types: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbers over token types at each layer, shape (layers, types): those of `type_regressions`,
    and the slopes of Q, M and V as they are, in shares of their means.

    ``Q_raw_slope`` is the slope on log10 n, ``Q_size_slope`` that on the number of tokens of words.
    """
    of_layers = []
    for i in range(len(types["n"])):
        here = {key: each[i] for key, each in types.items()}
        found = type_regressions({key: here[key] for key in "nQMV"})
        del found["token_types_regressed"]
        abscissae = {"raw": here["n"].log10()}
        if "num_tokens" in here:
            abscissae["size"] = here["num_tokens"]
        for name, x in abscissae.items():
            for key in "QMV":
                slope, _ = least_squares(x, here[key])
                found[f"{key}_{name}_slope"] = slope / here[key].mean()
        of_layers.append(found)
    return {key: torch.stack([found[key] for found in of_layers]) for key in of_layers[0]}


def read_measured(folder: Path, paper: Paper, with_baseline: Path | None = None) -> list[Measured]:
    """The training runs and final models of a sweep, in the order in which it was given them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    results = embedgeo.load_results(folder)
    results = results[results["layer_index"] >= 0]
    results = results.drop_duplicates(["run", "model", "step", "layer", "metric"], keep="last")
    files = {}
    for path in folder.glob("checkpoints/[!.]*.parquet"):
        columns = ["model", "revision", "step"]
        first = pd.read_parquet(path, columns=columns).iloc[0].astype(object)
        metadata = pq.read_schema(path).metadata or {}
        facts = {key.decode(): value.decode() for key, value in metadata.items()}
        files[tuple(first.where(first.notna(), ""))] = (path.name, facts)
    runs: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for key, part in results.groupby(["run", "model", "revision", "step"], sort=False):
        _, facts = files[key[1:]]
        is_final = facts.get("has_step") == "false"
        runs.setdefault((key[0], key[1] if is_final else ""), []).append(part)
    finals = [Path(model).name for _, model in runs if model]
    order = [model.rstrip("/") for model in manifest["asked"]["model"]]
    found = []
    for (run, final), parts in runs.items():
        last = parts[-1].iloc[0]
        name, model = str(last["model"]), str(last["model"]).rstrip("/")
        label = run
        if final:
            label = Path(final).name if finals.count(Path(final).name) == 1 else final
        paths: dict[str, dict[int, Path]] = {kind: {} for kind in _TABLES}
        for part in parts:
            first = part.iloc[0]
            file, facts = files[first["model"], first["revision"], first["step"]]
            for kind in _TABLES:
                if (folder / kind / file).exists():
                    paths[kind][int(first["step"])] = folder / kind / file
        text = manifest.get("text", {})
        one = Measured(
            model=Path(model).name,
            label=label,
            group=_group(Path(model).name, facts.get("model_class", ""), paper),
            records=pd.concat(parts, ignore_index=True),
            asked=manifest["asked"],
            preset=preset(paper.name),
            texts=manifest.get("text_files", ()),
            text=text if "sha256" in text else text.get(name, {}),
            facts=facts,
            has_steps=not final,
            tables=paths,
            with_baseline=with_baseline,
        )
        found.append((order.index(model) if model in order else len(order), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _group(model: str, kind: str, paper: Paper) -> str:
    """The group of a model: the paper's, or else by the class that it was loaded as."""
    for group, models in paper.groups.items():
        if model in models:
            return group
    if kind.endswith(_DECODERS):
        return "decoder"
    return "encoder" if kind.endswith("ForMaskedLM") else ""
