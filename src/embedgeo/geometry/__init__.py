"""Metrics at the layers of a model: what the monitor, the sweep and `observe` have in common."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from embedgeo import __version__
from embedgeo.capture import meshes
from embedgeo.capture.forward_inputs import ForwardInputs, PerToken, RowTokens
from embedgeo.capture.layers import Layer, LayerSpec, resolve_layers
from embedgeo.capture.probe import Probe
from embedgeo.capture.structure import (
    measured_model,
    model_of,
    model_width,
    require_whole_sequences,
    weights_device,
)
from embedgeo.capture.torch_names import is_whole
from embedgeo.capture.units import (
    RowUnit,
    Units,
    find_texts,
    find_words,
    require_row_unit,
    require_word_ids,
)
from embedgeo.extras import require_extra
from embedgeo.functional.distributed import (
    Group,
    Meetings,
    OtherRankError,
    Ranks,
    all_reduce_max,
    current_rank,
    has_other_ranks,
    is_distributed,
    num_ranks,
    together,
)
from embedgeo.functional.precision import state_device
from embedgeo.functional.rows import massive_times, row_ids
from embedgeo.geometry import export
from embedgeo.geometry.computing import MeasuredLayer, compute, threads_for
from embedgeo.geometry.undoing import undoing
from embedgeo.glossary import DEFINITIONS
from embedgeo.metrics import defaults
from embedgeo.metrics.layer import LayerMetrics, MetricFactory
from embedgeo.metrics.memory import Memory, SeenRows, planned_memory
from embedgeo.results import saving
from embedgeo.results.records import Deviations, Record
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd

_UNKNOWN_WIDTH = 4096  # that of a model is taken for, where nothing tells it


class Geometry:
    """Metrics for each layer of a model, updated by the forward passes that run while ``probe`` is
    attached.

    Args:
        model: any module. It and the arguments up to ``jackknife`` are those of `observe`.
        on_error: called with an exception raised in a hook, to which a note with the layer is
            added; default: raised.
        device: the device on which ranks exchange values; default: that of the parameters.
        process_group: the ranks that have different rows; others repeat theirs (tensor
            parallelism). Default: those that the mesh of the parameters tells, or all.
        sequence_mesh: the ranks of which each may have a part of the positions (sequence
            parallelism).
        all_ranks: all ranks of a monitor, which has let them meet.

    Attributes:
        layers: of the model, in forward order.
        make_metrics: makes the metrics of a layer, given its width.
        inputs: reads token ids and masks.
        probe: attaches the hooks, as a context manager.
        settings: what the results depend on beside model and data, as `save` records it.
        device: the device on which ranks exchange values.
        keeps_samples: whether `records` keeps the sampled rows of all ranks until `reset`.
        num_rows: of the layer that had the most on this rank at the last `reset`.
        has_few_rows: whether a forward pass, on any rank, had too few rows to tell massive ones,
            at the last `records`.

    Raises:
        TypeError, ValueError: a bad argument, layers that are not found, two metrics with the
            same key, or parameters on a mesh of context parallelism.
    """

    wait_seconds = 60.0
    """How long a rank waits for the others before it exchanges values with them, at most: also a
    fourth of the time limit of the default process group."""

    together = 2**28
    """Bytes of the states of layers, about, that ranks exchange together."""

    keeps_samples = False
    num_rows = 0
    has_few_rows = False
    _has_kept = False  # since `records`
    _is_off = False
    had_token_ids = False  # before the last `reset`
    _has_token_ids = False
    _warned_of_silence = False
    _warned_of_groups = False
    _warned_of_ranks = False
    _row_mark: Tensor | int = 0  # of the rows of the first layer

    def __init__(
        self,
        model: nn.Module,
        layers: LayerSpec = "blocks",
        metrics: MetricFactory | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        *,
        rows: RowUnit = "tokens",
        token_ids: PerToken | None = None,
        mask: PerToken | None = None,
        word_ids: PerToken | None = None,
        no_grad_passes: bool = True,
        jackknife: int = 0,
        on_error: Callable[[Exception], None] | None = None,
        device: torch.device | None = None,
        process_group: Group = None,
        sequence_mesh: DeviceMesh | None = None,
        all_ranks: Group = None,
        skip_massive: bool | float = False,
    ) -> None:
        require_row_unit(rows)
        if word_ids is not None:  # they may be given to the probe later, too
            require_word_ids(rows, word_ids)
        self.make_metrics = defaults.metric_factory(metrics, jackknife=jackknife)
        self.model, chosen_layers = _chosen(model, layers)
        self.layers = resolve_layers(self.model, chosen_layers)
        require_whole_sequences(self.model)
        self.inputs = ForwardInputs(
            self.model, skip_first_positions, ignore_token_ids, self.layers, whole=model
        )
        self.probe = Probe(
            self.layers,
            self.inputs,
            self._update,
            on_error,
            no_grad_passes=no_grad_passes,
            undoing=self._undoing,
        )
        self.probe.token_ids = token_ids
        self.probe.mask = mask
        self.probe.word_ids = word_ids
        self.probe.sequence_mesh = sequence_mesh
        weights = measured_model(self.model).parameters()
        dtypes = [str(weight.dtype) for weight in weights if weight.is_floating_point()]
        self.settings: dict[str, Any] = {
            "layers": export.recorded_layers(layers),
            "rows": rows,
            "skip_first_positions": skip_first_positions,
            "ignore_token_ids": list(ignore_token_ids),
            "skip_massive": skip_massive is not False and massive_times(skip_massive),
            "jackknife": jackknife,
            "dtype": "".join(dtypes[:1]).removeprefix("torch."),
        }
        self.device = state_device(device or weights_device(self.model))
        self._all_ranks = all_ranks
        self._group = process_group
        self._is_own = process_group is None and on_error is None  # no monitor has seen to that
        self._metrics = dict[str, LayerMetrics]()
        self._take_mesh()
        # by layer and width, of an earlier measurement
        self._empty = dict[tuple[str, int], list[Metric]]()

    def __enter__(self) -> Self:
        self.probe.attach()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.probe.detach()
        if error is not None:
            return
        self._warn_of_silence()
        num_rows = [metrics.num_rows for metrics in self._metrics.values()]
        if num_rows and not any(num_rows):
            warnings.warn(
                "No token is left to measure: skip_first_positions, ignore_token_ids and the mask "
                "leave out all of them, or the batches are empty.",
                stacklevel=2,
            )
        if self.inputs.has_unread_ids and not (
            self._has_token_ids or self.settings["rows"] == "mean"
        ):
            warnings.warn(
                "The model is given integers, such as token ids, but no embedding table of the "
                "measured part is called with them, so values over token types are absent. Give "
                "token_ids=.",
                stacklevel=2,
            )

    def records(self) -> list[Record]:
        """A record for each metric at each layer, over the rows of all ranks; every rank must call
        this.

        Layers that no forward pass has reached, on any rank, are left out.
        """
        self._meet()
        with together(self._all_ranks):  # an exception of one is raised on all of them
            records = compute(
                self.measured_layers(), self.together, keep_samples=self.keeps_samples
            )
            self._has_kept = self.keeps_samples
            if self._group is None:
                return records
            repeat_rows = self._group is not self._all_ranks
            return _with_values_of_all(
                records, self.device, self._all_ranks, repeat_rows=repeat_rows
            )

    def compute(self) -> dict[str, dict[str, float]]:
        """The values of `records` as ``{layer: {metric: value}}``; a warning, once, where nothing
        was measured.
        """
        values = dict[str, dict[str, float]]()
        records = self.records()
        if not records:
            self._warn_of_silence()
        for record in records:
            values.setdefault(record["layer"], {})[record["metric"]] = record["value"]
        return values

    def to_frame(self) -> "pd.DataFrame":
        """The values of `records` as a table with the columns layer, layer_index, metric, value and
        stderr.
        """
        require_extra("report", "Geometry.to_frame", "pandas")
        import pandas as pd

        return pd.DataFrame(
            self.records(), columns=["layer", "layer_index", "metric", "value", "stderr"]
        )

    def token_tables(self) -> "pd.DataFrame":
        """`embedgeo.TokenMoments.table` of every layer; empty if there is none. Every rank must
        call this.
        """
        self._meet()
        return export.tables_of_types(self.measured_layers())

    def layer_tables(self) -> "dict[str, pd.DataFrame]":
        """Tables of layers that metrics have, and deviations of the groups (``jackknife``), if any.

        Every rank must call this. There are deviations after `records` or `compute`: of a
        difference or a mean of values from the same groups take those of the deviations; its
        squared standard error is the sum of squares.
        """
        self._meet()
        return export.layer_tables(self.measured_layers())

    def deviations(self) -> Deviations:
        """The deviations of `layer_tables` that `records` has made, by layer and metric."""
        return {
            (layer.name, key): of_groups.tolist()
            for layer in self.measured_layers()
            for key, of_groups in export.deviations(layer).items()
        }

    def samples(self) -> dict[str, LayerSample]:
        """Copies, on the host, of the sampled rows, the mean and the eigenvalues at every layer.

        Every rank must call this. A listener of a monitor may call it on one rank: there are then
        the rows alone, those of all ranks, with their numbers and ids. A layer whose metrics sample
        no rows is absent there.

        Raises:
            ValueError: the metrics hold none of these.
        """
        if self._has_kept:
            names = [layer.name for layer in self.layers if layer.name in self._metrics]
            metrics = {name: self._metrics[name] for name in names}
        else:
            self._meet()
            metrics = {each.name: each.metrics for each in self.measured_layers()}
            defaults.require_samples(metrics.values())
        samples = {
            name: export.layer_sample(each, kept=self._has_kept) for name, each in metrics.items()
        }
        return {name: sample for name, sample in samples.items() if sample is not None}

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        model: str,
        step: int | None = None,
        save_samples: bool = False,
    ) -> None:
        """Write what was measured into a folder as `embedgeo sweep` makes it, for `embedgeo
        report`.

        The checkpoint is called ``<model>`` or ``<model>--step<N>``; what the folder has under that
        name is replaced, with a warning, and what it has under others stays. Nothing changes here:
        more rows may follow. Every rank must call this, and rank 0 writes.

        Args:
            folder: a new one, or one that this method has made with the same settings.
            model: name of the model; those of one name are a series of steps.
            step: the number of optimizer steps that the weights have taken; None: they are no
                step's, as a final model's.
            save_samples: also write ``samples/<name>.safetensors``, for `embedgeo.load_sample`.

        Raises:
            ValueError: no name or a negative step, nothing was measured, or the folder holds
                something else: a sweep, results of other settings, or another model's under a name
                that looks the same.
            OSError: it cannot be written, as under a name that is too long.
            RuntimeError: rank 0 has failed.
        """
        packages = ["pandas", "pyarrow", *(["safetensors"] if save_samples else [])]
        require_extra("report", "Geometry.save", *packages)
        name = saving.checkpoint_name(model, step)
        records = self.records()
        if not records:
            raise ValueError(
                f"there must be something to save; {self.why_silent() or 'there are no layers.'}"
            )
        samples = self.samples() if save_samples else None
        tables = self.layer_tables()
        inner = measured_model(self.model)
        facts = {
            "model_class": type(inner).__name__,
            "num_parameters": str(sum(parameter.numel() for parameter in inner.parameters())),
            **({"has_step": "false"} if step is None else {}),
        }
        settings = {
            "by": "Geometry.save",
            **self.settings,
            **self.origin_of_metrics(),
            "save_samples": save_samples,
        }
        failure: Exception | None = None
        if current_rank() == 0:
            try:
                saving.write_checkpoint(
                    folder, settings, name, model, step, records, tables, facts, samples
                )
            except Exception as error:
                failure = error
        failed = torch.tensor(int(failure is not None), device=self.device)
        if bool(all_reduce_max(failed) if is_distributed() else failed):
            raise failure or RuntimeError(f"rank 0 could not write {folder}: it says why.")

    def origin_of_metrics(self) -> dict[str, str]:
        """The classes of the metrics, with digests of their arguments, once they have seen rows."""
        metrics = next(iter(self._metrics.values()), None)
        dtype, autocast = self.settings["dtype"], self.probe.autocast_dtype
        if autocast is not None:
            dtype = f"{dtype} ({str(autocast).removeprefix('torch.')} autocast)"
        return {} if metrics is None else {**export.recorded_metrics(metrics), "dtype": dtype}

    def origin(self) -> dict[str, str]:
        """Model, settings and versions that the values depend on, as histories record them."""
        inner = measured_model(self.model)
        model = str(
            getattr(getattr(inner, "config", None), "name_or_path", "") or type(inner).__name__
        )
        return {
            "model": model,
            **{key: str(value) for key, value in self.settings.items()},
            "definitions": str(DEFINITIONS),
            "embedgeo": __version__,
            "torch": str(torch.__version__),
            "ranks": str(num_ranks(self._group)),
        }

    def silent_layers(self) -> list[str]:
        """Names of the layers without rows: no forward pass has reached them, after `records` on no
        rank.
        """
        known = {*self._metrics, *self.probe.left_out}  # of the latter a warning has told
        return [layer.name for layer in self.layers if layer.name not in known]

    def why_silent(self) -> str:
        """A sentence that names the `silent_layers` and the reason; empty if there are none."""
        silent = self.silent_layers()
        names = ", ".join(silent)
        if not silent:
            return ""
        if self.probe.layers_without_gradients.issuperset(silent):
            return (
                f"only forward passes without gradients reached {names}, which do not count in "
                "training: give a probe= to measure there."
            )
        is_unread = self._is_own and not self._metrics
        where = " inside `with embedgeo.observe(model) as geometry:`" * is_unread
        return f"no forward pass reached {names}{where}."

    def _warn_of_silence(self) -> None:
        """Warn of the `silent_layers`, once, where the user called."""
        if not self._warned_of_silence and (why := self.why_silent()):
            self._warned_of_silence = True
            warnings.warn(f"{why[0].upper()}{why[1:]} Nothing was measured there.", stacklevel=3)

    def reset(self) -> None:
        """Drop the rows seen so far and free their memory."""
        self.num_rows = max((metrics.num_rows for metrics in self._metrics.values()), default=0)
        self._drop([*self._metrics])
        self._has_kept = False
        self.had_token_ids = self._has_token_ids
        self._has_token_ids = False
        self.probe.layers_without_gradients.clear()
        self.inputs.first_position = None
        self._row_mark = 0

    def _drop(self, layers: Iterable[str]) -> None:
        dropped = {name: self._metrics.pop(name) for name in layers}
        empty = {(name, metrics.dim): metrics.reset() for name, metrics in dropped.items()}
        self._empty |= {key: metrics for key, metrics in empty.items() if metrics}

    def _undoing(self) -> Callable[[], None]:
        """A function that drops the rows that come from now on, of a forward pass that fails."""
        self._take_mesh()
        layers = {**self._metrics}
        put_back = undoing(layers.values())

        def undo() -> None:
            if all(self._metrics.get(name) is each for name, each in layers.items()):
                self._drop(self._metrics.keys() - layers.keys())
                put_back()

        return undo

    def use_metrics(self, make: MetricFactory) -> None:
        """Measure by the metrics that ``make`` makes; before any rows are seen."""
        self._empty.clear()
        self.make_metrics = make

    def memory(
        self,
        seen: SeenRows,
        num_ranks: int,
        budget: int,
        widths: Iterable[int | None],
    ) -> Memory:
        """The most memory that a measurement of layers of these widths, None where they are not
        known, takes on a rank: see `embedgeo.metrics.memory.planned_memory`.
        """
        guess = model_width(self.model) or _UNKNOWN_WIDTH
        counts = Counter(width or guess for width in widths)
        layers = [(self.make_metrics(width), number) for width, number in counts.items()]
        return planned_memory(
            layers,
            seen,
            self.device,
            num_ranks=num_ranks,
            budget=budget,
            jackknife=self.settings["jackknife"],
        )

    def num_token_types(self, num_rows: int, *, gives_ids: bool) -> int:
        """The most token types that so many rows may have; 0 if they have none.

        ``gives_ids``: token ids are given, and not read from the model.
        """
        unit = self.settings["rows"]
        if unit == "mean" or not (gives_ids or self.inputs.tables):
            return 0
        return num_rows if unit == "words" else min(num_rows, self.inputs.num_token_types)

    def close(self) -> None:
        """Let go of what was measured, and of the model without waiting for the garbage
        collector.
        """
        self.reset()
        del self.probe  # it refers back to the geometry

    def switch_off(self) -> None:
        """Drop the rows seen and take no more; collectives inside forward passes are still taken
        part in.
        """
        self._is_off = True
        self.reset()

    def _meet(self) -> None:
        """Wait until all ranks have come, with the same settings, where no monitor has seen to
        that: no collective may begin without one, among those of training.
        """
        self._take_mesh()
        if self._all_ranks is None and has_other_ranks():
            self._come()

    def _take_mesh(self) -> None:
        """Until there are rows, ask the parameters for their mesh: they may be made parallel later.
        Every rank must call this.
        """
        is_open = self._is_own and not self._metrics and has_other_ranks()
        if is_open and (mesh := meshes.mesh_of(self.model)):
            self._come()
            self._is_own = False
            self._group = meshes.shared_group(mesh)
            self.probe.sequence_mesh = meshes.sequence_mesh(mesh)

    def _come(self) -> None:
        meetings = Meetings("observe")
        names = [layer.name for layer in self.layers]
        of_model = {"layers": names, "model": model_width(self.model)}
        answer = meetings.begin(self.wait_seconds, self.settings | of_model)
        meetings.leave()
        if answer is None:
            raise OtherRankError(
                "values are those of the rows of all ranks; some have not come to this call in "
                "time. Call it on every rank."
            )
        if answer:
            raise ValueError(
                f"ranks must observe one model alike; {answer} differs. Give one value to all."
            )

    def measured_layers(self) -> list[MeasuredLayer]:
        """The layers that have rows on any rank, with their metrics; every rank must call this."""
        marks = (self._row_mark, self._weight_mark()) if is_distributed() else (0, 0)
        of_layers = [self._known_of(layer, marks) for layer in self.layers]
        known = torch.tensor(of_layers, dtype=torch.float64)
        if is_distributed():
            known = all_reduce_max(known.to(self.device), self._all_ranks).cpu()
        ranks = num_ranks(self._group)
        sizes, firsts, groups, num_sequences, of_rows, of_weights = known.split(
            [4, 2, self.settings["jackknife"], ranks, ranks, ranks], dim=1
        )
        self._warn_of_ranks(of_rows[0].tolist(), of_weights[0].tolist())
        least, most = (-firsts.amax(0) * firsts.new_tensor([1, -1])).tolist()
        if most > least:
            raise ValueError(
                f"each rank must have whole sequences; position ids begin at {int(least)} on "
                f"one rank and at {int(most)} on another one, as under context parallelism. Sweep "
                "over the checkpoints."
            )
        self.has_few_rows = bool(sizes[:, 3].any())
        for layer, (dim, _, has_massive, _) in zip(self.layers, sizes.tolist(), strict=True):
            if dim and layer.name not in self._metrics:  # only other ranks have reached it
                no_rows = torch.zeros(0, int(dim), device=self.device)
                self._add_metrics(layer, int(dim)).update(
                    no_rows, row_ids(no_rows, no_rows[:, 0].long())
                )
            if has_massive:
                self._metrics[layer.name].split_off()
        self._complete_groups(groups > 0, num_sequences.sum(1).long())
        return [
            MeasuredLayer(
                layer.name,
                index,
                self._metrics[layer.name],
                int(sizes[index, 1]),
            )
            for index, layer in enumerate(self.layers)
            if layer.name in self._metrics
        ]

    def _weight_mark(self) -> Tensor | int:
        """A mark of the first weight that is trained; 0 where this rank lacks it, or has a part."""
        weight = next((each for each in self.model.parameters() if each.requires_grad), None)
        return _mark(weight) if weight is not None and is_whole(weight) else 0

    def _warn_of_ranks(self, of_rows: list[float], of_weights: list[float]) -> None:
        """Warn, once, of ranks that have the very same rows, or other weights, by their marks."""
        seen = [*filter(None, of_rows)]
        found = ""
        if len({*filter(None, of_weights)}) > 1:
            found = "other weights, whose rows are put together"
        if len({*seen}) < len(seen):
            found = "the very same rows, which count once for each"
        if found and not self._warned_of_ranks and current_rank() == 0:
            self._warned_of_ranks = True
            warnings.warn(
                f"ranks must have rows of their own, and train one model; some have {found}. "
                "Split the data (by a DistributedSampler, say), keep the weights alike (by DDP, "
                "say), or, where ranks share the work on each row, give a monitor device_mesh=, "
                "or Geometry, in place of observe, process_group=.",
                stacklevel=1,
            )

    def _known_of(self, layer: Layer, marks: Iterable[Tensor | int]) -> list[float]:
        """What this rank knows of a layer; zeros where no forward pass has reached it.

        Its width, bytes, and whether it has massive rows and passes of few rows; where position ids
        begin, negative and positive; a mark of each group of the jackknife that has a sequence; and
        for each rank a number of sequences and the marks, of which this rank knows its own.
        """
        first = self.inputs.first_position
        firsts = (-inf, -inf) if first is None else (-first, first)
        own = [0.0] * 4
        groups = [0.0] * self.settings["jackknife"]
        of_rank = [0.0, *map(float, marks)]
        metrics = self._metrics.get(layer.name)
        if metrics is not None:
            num_bytes = metrics.num_bytes if is_distributed() else 0
            own = [metrics.dim, num_bytes, metrics.massive is not None, metrics.has_few_rows]
            for group in metrics.whole.by_group:
                groups[group] = 1
            of_rank[0] = metrics.num_sequences
        placed = Ranks.of(self._group).placed(torch.tensor(of_rank, dtype=torch.float64))
        return [*own, *firsts, *groups, *placed.T.flatten().tolist()]

    def _complete_groups(self, marks: Tensor, num_sequences: Tensor) -> None:
        """Have all ranks know the same groups of the jackknife, given for each layer those that
        have a sequence on any rank, and the number of its sequences on all ranks.
        """
        num_groups = self.settings["jackknife"]
        reached = [i for i, layer in enumerate(self.layers) if layer.name in self._metrics]
        if not num_groups or not reached:
            return
        for index in reached:
            metrics = self._metrics[self.layers[index].name]
            metrics.complete(marks[index].nonzero().flatten().tolist(), int(num_sequences[index]))
        least = int(num_sequences[reached].min())
        if least < num_groups and not self._warned_of_groups:
            self._warned_of_groups = True
            warnings.warn(
                f"jackknife must not be more groups than there are sequences; got {num_groups} for "
                f"{least}, so standard errors are from {least} groups at most. Take fewer groups, "
                "or more sequences.",
                stacklevel=1,
            )

    def _update(self, layer: Layer, hidden: Tensor, tokens: RowTokens) -> None:
        hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
        if not self._is_off:
            with threads_for(hidden.numel()):
                self._update_layer(layer, hidden, tokens)

    def _update_layer(self, layer: Layer, hidden: Tensor, tokens: RowTokens) -> None:
        metrics = self._metrics.get(layer.name)
        if metrics is None:
            metrics = self._add_metrics(layer, hidden.shape[-1])
        if has_other_ranks() and layer is self.layers[0]:
            self._row_mark = _mark(hidden, self._row_mark)
        self._has_token_ids |= tokens.token_ids is not None
        shape = hidden.shape[:-1]
        device = hidden.device
        unit: RowUnit = self.settings["rows"]
        # what depends on the ids of tokens or words alone is made once for all layers of a forward
        # pass
        if unit == "tokens":
            ids = tokens.prepared_once(
                device,
                lambda: row_ids(
                    hidden, tokens.token_ids, tokens.mask, self.inputs.sequence_ids(shape)
                ),
            )
            metrics.update(hidden, ids)
        else:
            units = tokens.prepared_once(device, lambda: self._units(unit, hidden, tokens))
            metrics.update(units.rows(hidden), units.ids)

    def _units(
        self, unit: Literal["mean", "first", "last", "words"], hidden: Tensor, tokens: RowTokens
    ) -> Units:
        sequence_ids = self.inputs.sequence_ids(hidden.shape[:-1])
        if unit != "words":
            return find_texts(unit, hidden, sequence_ids, tokens.token_ids, tokens.mask)
        require_word_ids(unit, tokens.word_ids)
        assert tokens.word_ids is not None
        ids = {"token_ids" if self.probe.token_ids is None else "types": tokens.token_ids}
        return find_words(hidden.device, tokens.word_ids, sequence_ids, **ids, mask=tokens.mask)

    def _add_metrics(self, layer: Layer, dim: int) -> LayerMetrics:
        make = self.make_metrics
        metrics = LayerMetrics(
            make,
            dim,
            device=self.device,
            process_group=self._group,
            jackknife=self.settings["jackknife"],
            times=massive_times(self.settings["skip_massive"]),
            skip_massive=bool(self.settings["skip_massive"]),
            metrics=self._empty.pop((layer.name, dim), None),
        )
        self._metrics[layer.name] = metrics
        return metrics


def _mark(tensor: Tensor, before: Tensor | int = 0) -> Tensor:
    """A number made of up to some 4,096 numbers of a tensor, from all of it, and of the mark of
    those before; 0 where all are 0.
    """
    some = tensor.detach().flatten()[:: max(1, tensor.numel() // 4096)]
    bits = some.float().view(torch.int32).long()
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return ((bits * places).sum() + 31 * before) % 2**50


def _chosen(model: nn.Module, layers: LayerSpec) -> tuple[nn.Module, Any]:
    """The model and the layers that a function of the model chooses: these, or a part of it."""
    chosen: Any = layers
    if callable(layers) and not isinstance(layers, nn.Module):
        chosen = layers(model)
        if isinstance(chosen, nn.Module):
            return chosen, "blocks"
    if isinstance(chosen, Mapping):
        return model_of(model, chosen.values()), chosen
    return model, chosen


def _with_values_of_all(
    records: list[Record], device: torch.device, process_group: Group, *, repeat_rows: bool
) -> list[Record]:
    """The records with the same values on all ranks of the group, which must all call this.

    Ranks may differ in the last digit, of another library's call; all take the largest value.

    Raises:
        ValueError: ranks that ``repeat_rows`` have other values; it names the first.
    """
    if not records:
        return records
    nan = torch.finfo(torch.float64).min  # stands for NaN, which has no order
    own = torch.tensor([(each["value"], each["stderr"]) for each in records], dtype=torch.float64)
    value, stderr = own.nan_to_num(nan=nan, posinf=torch.inf, neginf=-torch.inf).unbind(1)
    largest = torch.stack((value, -value, stderr)).to(device)
    largest = all_reduce_max(largest, process_group).cpu()
    most, negative_least, _ = largest.nan_to_num()
    differs = most + negative_least > 1e-3 * torch.maximum(most.abs(), negative_least.abs())
    if repeat_rows and bool(differs.any()):
        first = records[int(differs.nonzero()[0])]
        raise ValueError(
            "ranks that run one model in parallel must see the same rows at a layer; "
            f"{first['metric']} at layer {first['layer']!r} differs between them: each rank has a "
            "part of it, or they train several models. Leave the layer out, or train one model."
        )
    values, _, errors = torch.where(largest == nan, torch.nan, largest).tolist()
    return [
        Record(**{**record, "value": value, "stderr": error})
        for record, value, error in zip(records, values, errors, strict=True)
    ]


def observe(
    model: nn.Module,
    layers: LayerSpec = "blocks",
    metrics: MetricFactory | None = None,
    skip_first_positions: int = 0,
    ignore_token_ids: Sequence[int] = (),
    rows: RowUnit = "tokens",
    *,
    token_ids: PerToken | None = None,
    mask: PerToken | None = None,
    word_ids: PerToken | None = None,
    jackknife: int = 0,
    skip_massive: bool | float = False,
) -> Geometry:
    """Measure the geometry of the hidden states of the forward passes that run inside.

    Args:
        model: any module.
        layers: ``"blocks"``, ``"hidden_states"``, a pattern of names, a list or a
            callable: see `embedgeo.capture.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given the layer's width; default:
            `embedgeo.default_metrics`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        rows: what a row is: a token (``"tokens"``), or a sequence, by the ``"mean"``, the
            ``"first"`` or the ``"last"`` of its tokens that count. Means have no token ids: the
            metrics that need them are absent. Or a word (``"words"``), by the mean of its tokens
            that count; words of the same token ids are a token type. Averaging makes norms smaller,
            the more so the more tokens a word has, and rare words have more: do not compare Q, M
            and V of words of different lengths (Yamagiwa & Shimodaira 2025, appendix J).
        token_ids: the token ids, or a function that returns those of a batch; default: those that
            the input embedding is called with. The batch is what the model is called with (of
            Hugging Face models, the innermost one that has the layers): its only argument, as in
            ``model(batch)``, or a dict of its arguments by name, as in ``model(**batch)``.
        mask: the mask (True = count), or a function that returns that of a batch; default: the
            attention mask that the model is called with.
        word_ids: for words, the number of each token's word within its sequence, -1 for tokens of
            no word, or a function that returns those of a batch; a tokenizer's ``word_ids()`` has
            them. ``token_ids`` are then the types of the words, of which a word's first token has
            it; ``ignore_token_ids`` are still tokens.
        jackknife: G, the number of groups of whole sequences for standard errors (16 is a good
            choice), which needs up to G + 1 times the memory; 0: there are none.
        skip_massive: leave massive rows out of all numbers (True), or those beyond so many times
            the median norm. ``n_massive`` says how many. Default: all rows count, and numbers
            without the massive ones have keys that end in ``_without_massive``. A row is massive
            where its norm is beyond 4 times the median norm of the rows of its layer that count in
            its forward pass, on this rank; in passes of fewer than 100 rows none is. So these
            numbers change with how rows are split over passes and ranks.

    Returns:
        Geometry: a context manager; its ``compute()`` returns ``{layer: {metric: float}}``, its
            ``to_frame()`` a table.

    Raises:
        TypeError, ValueError: as `Geometry` does.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> with observe(model, layers="1") as geometry:
    ...     _ = model(torch.tensor([[1, 2, 3, 1]]))
    >>> geometry.compute()["01"]["n"]
    4.0
    """
    return Geometry(
        model,
        layers,
        metrics,
        skip_first_positions,
        ignore_token_ids,
        rows=rows,
        token_ids=token_ids,
        mask=mask,
        word_ids=word_ids,
        jackknife=jackknife,
        skip_massive=skip_massive,
    )
