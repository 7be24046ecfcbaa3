"""Measuring while a model trains: the part that all trainers share."""

import math
import operator
import re
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedgeo.capture.calls import (
    kept_state,
    kept_weights,
    mode_restorer,
    set_eval_modes,
)
from embedgeo.capture.forward_inputs import require_exclusions
from embedgeo.capture.layers import LayerSpec
from embedgeo.capture.torch_names import are_equal, has_compiled
from embedgeo.capture.units import RowUnit, require_word_ids
from embedgeo.formatting import listed, reason, shell_command
from embedgeo.functional.distributed import (
    Group,
    Meetings,
    OtherRankError,
    OwnGroup,
    all_gather_object,
    all_reduce_max,
    current_rank,
    has_other_ranks,
    is_distributed,
    num_ranks,
    own_copy,
    own_group,
    together,
)
from embedgeo.functional.rows import FEWEST_ROWS, massive_times
from embedgeo.geometry import Geometry
from embedgeo.layer_names import blocks_by_side
from embedgeo.metrics.defaults import default_metrics, metric_factory
from embedgeo.metrics.layer import MetricFactory
from embedgeo.metrics.memory import Memory, SeenRows
from embedgeo.random_states import kept_random_states
from embedgeo.results.events import Scalars, require_scalars, tagged_scalars
from embedgeo.results.findings import finding_lines
from embedgeo.results.records import Record, Records, block_means
from embedgeo.training.batches import LastBatches, digest, kept_generators
from embedgeo.training.clock import Clock
from embedgeo.training.distributed import kept_sharded
from embedgeo.training.loggers import Illustrations
from embedgeo.training.plan import (
    UNKNOWN_SHAPE,
    ExpectedRows,
    expected_rows,
    memory_sentences,
    missing_for_history,
    plan_sentences,
)
from embedgeo.training.weights import first_numbers, some_weights

if TYPE_CHECKING:
    from embedgeo.results.parquet import HistoryFile


_FAILED = "it has failed"
_LOST = "its rows were dropped"
_MOST_BATCHES = 2_000  # of a probe
_WATCHED_BATCHES = 25  # of one step, after which the weights are compared
# what the default metrics do without, the first one that fits the budget
_BOUNDS: Sequence[Sequence[str]] = (), ("scatter",), ("type_tables",), ("scatter", "type_tables")
_OF_ONE_RANK = "on_error", "folder", "pictures", "scalars"  # options that may differ


def log_spaced_steps(last: int = 512) -> tuple[int, ...]:
    """0 and the powers of two up to ``last``: the early steps at which Pythia was saved.

    >>> log_spaced_steps(10)
    (0, 1, 2, 4, 8)
    """
    return (0, *(2**k for k in range(last.bit_length()) if 2**k <= last))


class Schedule:
    """The steps 0, n, 2n … and extra steps; at each of them a window begins, of steps that are
    measured together.
    """

    def __init__(
        self, every_n_steps: int, extra_steps: Sequence[int] = (), window: int = 1
    ) -> None:
        if isinstance(extra_steps, str | int | float | Iterator):
            raise TypeError(f"extra_steps must be a list of integers; got {extra_steps!r}.")
        given: list[tuple[str, Any, int]] = [
            ("every_n_steps", every_n_steps, 1),
            ("window", window, 1),
            *(("extra_steps", step, 0) for step in extra_steps),
        ]
        for name, value, least in given:
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(
                    f"{name} must be an integer, a number of optimizer steps; got {value!r}."
                )
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}.")
        self.every_n_steps = every_n_steps
        self.extra_steps = frozenset(extra_steps)
        self.window = window
        before_extra = {step // every_n_steps * every_n_steps for step in extra_steps}
        starts = {0, *before_extra, *extra_steps}
        gap = min(self.next_after(step) - step for step in starts)
        if window > gap:
            raise ValueError(
                f"window must not reach into the next measured step, {gap} steps on; got {window}."
            )

    def __str__(self) -> str:
        extra = sorted(step for step in self.extra_steps if step % self.every_n_steps)
        regular = "every step" if self.every_n_steps == 1 else f"every {self.every_n_steps} steps"
        return regular + (f" and at {listed(extra)}" if extra else "")

    def next_after(self, step: int) -> int:
        """The first scheduled step after this one."""
        regular = (step // self.every_n_steps + 1) * self.every_n_steps
        return min([regular, *(extra for extra in self.extra_steps if extra > step)])


@dataclass(frozen=True)
class TrainingRun:
    """A training run, as a trainer has begun it."""

    model: nn.Module
    device: torch.device  # of this process
    process_group: Group = None  # the ranks that have different rows; None: all
    writes_files: bool = True
    folder: Path | None = None  # in which the trainer writes its results
    first_step: int = 0  # at most, of a run that is not resumed
    batches_a_step: int = 1  # that gradients are accumulated over


Method = TypeVar("Method", bound=Callable[..., None])


def _guarded(method: Method) -> Method:
    """Decorator of what a trainer's event asks for: exceptions go to `Monitor._fail`."""

    @wraps(method)
    def guarded(self: "Monitor", *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self._fail(error)

    return guarded  # type: ignore[return-value]


@dataclass(eq=False, repr=False)
class Monitor(ABC):
    """Measures the geometry of embeddings at chosen steps of training: the base class of the
    monitors for trainers.

    Arguments and errors are those of `embedgeo.GeometryMonitor`; ``history`` has a record for each
    step, layer and metric that this process has measured; a later fit drops those of its own steps
    and after. A subclass runs the model, logs, and calls on every rank:

    - ``_reset()`` before another run, and ``_start(run, step)`` before its first batch;
    - ``_before_batch(step, batch)`` and ``_after_batch(step)`` before the forward pass of each
      training batch and after its backward pass and, where there is one, the optimizer step;
    - ``_finish(step)`` after the last batch, and ``_stop()`` at the end, also after an exception.

    ``step`` is the number of optimizer steps taken so far. Between measured steps nothing is
    on the model, the random states are left as they are, and no exception in here reaches the
    training loop unless ``on_error="raise"``.
    """

    every_n_steps: int = 100
    extra_steps: Sequence[int] = ()
    layers: LayerSpec = "blocks"
    metrics: MetricFactory | Literal["auto"] | None = None
    window: int = 1
    probe: Iterable[Any] | dict[str, Any] | None = None
    probe_forward: Callable[[Any, Any], Any] | None = None
    skip_first_positions: int = 0
    ignore_token_ids: Sequence[int] = ()
    token_ids: Callable[[Any], Tensor] | None = None
    mask: Callable[[Any], Tensor] | None = None
    prefix: str = "geometry"
    on_error: Literal["warn", "raise"] = "warn"
    seed: int = 0
    rows: RowUnit = "tokens"
    measure_last: bool = True
    folder: str | Path | None = None
    jackknife: int = 0
    word_ids: Callable[[Any], Tensor] | None = None
    pictures: bool = True
    scalars: Scalars = "headlines"
    listeners: Sequence[Any] = ()
    skip_massive: bool | float = False
    max_bytes: int = 2**30

    wait_seconds = 60.0
    """How long a rank waits for the others before a measurement, at most: also a fourth of the time
    limit of the default process group. A rank that is not there by then loses the measurement.
    After each such one the next wait is half as long, until all ranks have come again."""

    _given_up: Sequence[str] = ()  # the writers of histories of a run that is tried again
    _tag_start = ""  # what the trainer puts in front of the tags of scalars
    _step_rule = "step must be the number of optimizer steps taken."

    def __post_init__(self) -> None:
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.on_error not in ("warn", "raise"):
            raise ValueError(f'on_error must be "warn" or "raise"; got {self.on_error!r}.')
        require_word_ids(self.rows, self.word_ids)
        require_exclusions(self.skip_first_positions, self.ignore_token_ids)
        massive_times(self.skip_massive)
        require_scalars(self.scalars)
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive integer; got {self.max_bytes!r}.")
        _require_prefix(self.prefix)
        self.schedule = Schedule(self.every_n_steps, self.extra_steps, self.window)
        self.probe = _require_probe(self.probe, self.window)
        self.listeners = _require_listeners(self.listeners, has_probe=self.probe is not None)
        self._named_listeners = _by_occurrence(self.listeners)
        self._broken = dict[str, str]()  # why, by name; on all ranks when they meet next
        self.history = Records()
        self.origin = dict[str, str]()  # what the values depend on, as the file has it
        make = None if self.metrics == "auto" else self.metrics
        self._chooses_metrics = make is None
        self._compared = {  # between ranks
            **{
                name: _described(option)
                for name, option in options.items()
                if name not in _OF_ONE_RANK
            },
            "extra_steps": sorted(self.schedule.extra_steps),
            "probe": self.probe is not None,
            "listeners": [type(listener).__qualname__ for listener in self.listeners],
        }
        names = "layers", "skip_first_positions", "ignore_token_ids", "skip_massive", "rows"
        self._settings: dict[str, Any] = {
            **{name: options[name] for name in (*names, "jackknife")},
            "metrics": metric_factory(make, seed=self.seed, jackknife=self.jackknife),
        }
        self._keeps_batches = self.measure_last and self.probe is None
        self._geometry: Geometry | None = None
        self._run: TrainingRun | None = None
        self._file: HistoryFile | None = None
        self._meetings: Meetings | None = None  # of all ranks, where there are several
        self._ranks: OwnGroup | None = None  # all, where there are several
        self._row_group: Group = None  # those that have different rows
        self._sequence_mesh: DeviceMesh | None = None
        self._has_said_eager = False
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but the run, which is one process's own."""
        of_run = (
            "_illustrations",
            "_run",
            "_geometry",
            "_file",
            "_ranks",
            "_row_group",
            "_meetings",
        )
        return {**vars(self), **dict.fromkeys(of_run)}

    @abstractmethod
    def _forward(self, batch: Any) -> None:
        """Run the model on a batch, of the probe or of training, outside of a training step."""

    @abstractmethod
    def _log(self, step: int, records: list[Record]) -> None:
        """Log the records measured at a step."""

    @abstractmethod
    def _loggers(self) -> Iterable[object]:
        """The loggers to which this process writes more than scalars."""

    def _to_device(self, batch: Any) -> Any:
        assert self._run is not None
        return move_data_to_device(batch, self._run.device)

    def _set_train_mode(self) -> None:  # noqa: B027 (most trainers leave the model in it)
        """Put the model into the mode that it has in a training step."""

    def make_geometry(self, model: nn.Module, run: TrainingRun | None = None) -> Geometry:
        """The metrics at the layers of a model that it measures."""
        return Geometry(
            model,
            **self._settings,
            no_grad_passes=False,
            on_error=self._fail,
            device=None if run is None else run.device,
            process_group=self._row_group,
            sequence_mesh=self._sequence_mesh,
            all_ranks=self._ranks,
        )

    def _reset(self) -> None:
        # scheduled steps up to this one are done; None before the start
        self._last_step: int | None = None
        self._window_start: int | None = None  # of the window that is open
        self._has_lost_rows = False  # by an exception in a batch of it
        self._last_batches = LastBatches(self.schedule.window)
        self._measured_step: int | None = None  # the last one
        self._clock = Clock(torch.device("cpu"))
        self._now = -1  # the step of the last batch
        self._num_batches = 0  # of that step, so far
        self._watched: Sequence[Tensor] = []  # a few parameters
        self._numbers: list[Tensor] = []  # of these, in an earlier batch of it
        # what the metrics do without, by name, from the first batch on
        self._bounds: Sequence[str] | None = None
        self._opened = False  # what is measured has been said
        self._warned_of_silence = False
        self._was_silent = False  # the last measurement had no records
        self._warned_of_weights = False
        self._had_token_ids = False  # at the last measurement
        self._num_probe_batches = 0  # at the last measurement
        self._probe_digest = ""
        self._warned_of_probe = False
        self._failed = False
        self._cannot_write = False
        self._has_missed = False  # a measurement to which not all ranks came
        self._num_missed = 0  # of these, the last ones in a row
        self._history_run = ""  # its id in the history file; of one that goes on, the file's
        for name in self._named_listeners:
            self._ask(name, "reset")

    def _state(self) -> dict[str, Any]:
        """Place of the run in its schedule, and the states of the listeners, for a checkpoint.

        ``torch.distributed.checkpoint`` fills the keys that are there before the start, takes a
        tuple as one value, and loses an empty dict.
        """
        states = [(name, self._ask(name, "state_dict")) for name in self._named_listeners]
        return {
            "last_step": self._last_step,
            "window_start": self._window_start,
            "history_run": self._history_run,
            "bounds": self._bounds,
            "listeners": tuple(each for each in states if each[1] is not None),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._last_step = state.get("last_step")
        self._window_start = state.get("window_start")
        self._history_run = state.get("history_run", "")
        self._bounds = state.get("bounds")
        states = dict(state.get("listeners", ()))
        for name in self._named_listeners.keys() & states.keys():
            self._ask(name, "load_state_dict", states.pop(name))
        if states:
            self._warn(
                f"the checkpoint has states of listeners that are not among listeners=: "
                f"{listed([*states])}. They are dropped. Give the listeners of the run that it is "
                "of."
            )

    def _ask(self, name: str, method: str, *args: Any) -> Any:
        """What a method of a listener returns; None if it has none, or fails."""
        call = getattr(self._named_listeners[name], method, None)
        if not callable(call) or name in self._broken:
            return None
        try:
            return call(*args)
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._take_out(name, f"in {method}", reason(error))
            return None

    def _take_out(self, name: str, where: str, why: str) -> None:
        self._broken[name] = why
        kind = _described(self._named_listeners[name])
        self._warn(
            f"the listener {kind} failed {where} and is not called any more, measuring and "
            f"training go on: {why}"
        )

    def _start(self, run: TrainingRun, step: int) -> None:
        self._geometry = None
        try:
            if self._have_begun():
                self._join_ranks(run.process_group)
                with together(self._ranks):
                    geometry = self.make_geometry(run.model, run)
                    geometry.keeps_samples = bool(self.listeners)
                self._geometry = geometry
        except (TypeError, ValueError):  # what was asked for cannot be measured
            raise
        except Exception as error:
            self._fail(error)
        self._run = run
        self._clock = Clock(run.device)
        self._first_step = step
        self._watched = some_weights(run.model)
        if self._geometry is None:
            self._window_start = None
            return
        if self._last_step is None:
            if step <= run.first_step:
                runs = [uuid4().hex]
                with self._own_work(), together(self._ranks):  # one id, whose state is loaded
                    runs = runs if self._ranks is None else all_gather_object(runs[0], self._ranks)
                self._history_run = runs[0]
            self._last_step = step - 1
        if self._window_start is not None and step >= self._window_start + self.schedule.window:
            self._window_start = None
        self._illustrations = Illustrations(
            self.prefix, self._tag_start, self.on_error, self.pictures, self.scalars
        )
        self.origin = {
            **self._geometry.origin(),
            "measured_on": "training batches" if self.probe is None else "a probe",
            "window": str(self.window),
        }
        folder = self.folder or run.folder
        with self._own_work():
            if run.writes_files and folder is not None and not missing_for_history():
                from embedgeo.results.parquet import HistoryFile

                self._file = HistoryFile(
                    Path(folder),
                    self.prefix,
                    self.origin,
                    start=step,
                    run=self._history_run,
                    replaces=self._given_up,
                )

    def _open(self, batch: Any) -> bool:
        """Choose the metrics, if that is left to the monitor, and say what is measured; False if
        not all ranks have come. Every rank calls this before its first batch.
        """
        self._opened = True
        geometry = self._geometry
        if not self._all_come("the first batch"):
            self._geometry = None
            return False
        assert geometry is not None
        with self._own_work():
            with together(self._ranks):
                ranks = num_ranks(self._row_group)
                rows = self.plan(batch, ranks)
                seen = self.seen_rows(geometry, rows, ranks)
                if self._ranks is not None:
                    own = torch.tensor(seen, device=geometry.device)
                    seen = SeenRows(*all_reduce_max(own, self._ranks).tolist())
                widths = [None] * len(geometry.layers)
                bounds, memory = self.choose_metrics(geometry, seen, ranks, widths)
                self._bounds = tuple(bounds) if self._chooses_metrics else None
                geometry.together = memory.together
            planned = plan_sentences(
                geometry,
                self.schedule,
                getattr(self._file, "path", None),
                rows,
                gives_ids=self.token_ids is not None,
                gives_mask=self.mask is not None,
            )
            notes = memory_sentences(memory, self.max_bytes, bounds)
            self._say(f"\n{type(self).__name__}: ".join([*planned[:2], *notes, *planned[2:]]))
        return True

    def plan(
        self, batch: Any, ranks: int, default: tuple[int, int] = UNKNOWN_SHAPE
    ) -> ExpectedRows:
        """The rows of a measurement; ``default``: the shape of batches that do not tell theirs."""
        batches_a_step = 1 if self._run is None else self._run.batches_a_step
        num_batches = self.schedule.window * batches_a_step
        return expected_rows(num_batches, self.probe, batch, self.rows, ranks, default)

    def seen_rows(self, geometry: Geometry, rows: ExpectedRows, ranks: int) -> SeenRows:
        """The rows of a measurement, as metrics see them on a rank."""
        gives_ids = self.token_ids is not None
        num_types = geometry.num_token_types(rows.on_rank * ranks, gives_ids=gives_ids)
        return SeenRows(rows.on_rank, -(-rows.num_batches // ranks), num_types)

    def choose_metrics(
        self, geometry: Geometry, seen: SeenRows, ranks: int, widths: Sequence[int | None]
    ) -> tuple[dict[str, Any], Memory]:
        """Choose metrics that fit the budget, if that is left to the monitor.

        Returns:
            What they do without, as arguments of `embedgeo.default_metrics`, and the most memory
            that they take at layers of these widths.
        """
        choices = _BOUNDS[: len(_BOUNDS) if self._chooses_metrics else 1]
        for names in choices if self._bounds is None else [self._bounds]:
            bounds: dict[str, Any] = dict.fromkeys(names, False)
            if self._chooses_metrics:
                geometry.use_metrics(partial(default_metrics, seed=self.seed, **bounds))
            memory = geometry.memory(seen, ranks, self.max_bytes, widths)
            if memory.peak <= self.max_bytes:
                break
        return bounds, memory

    def _have_begun(self) -> bool:
        """Tell if all ranks have come with the same options; otherwise monitoring is off."""
        if self._meetings is None and has_other_ranks() and not self._failed:
            meetings = Meetings(self.prefix)
            differing = meetings.begin(self.wait_seconds, self._compared)
            if differing is None:
                raise OtherRankError(
                    "a monitor must be on every rank; some have not come to its start in time. "
                    "Make it on all ranks."
                )
            self._meetings = meetings
            if differing:
                raise OtherRankError(
                    f"options must be the same on every rank; {differing}= differs. Give one value "
                    "to all."
                )
        return not self._failed

    def _all_come(self, occasion: str, said: str = "") -> bool:
        """Tell if ranks may go on together: all have come to an occasion, and none has failed or
        said why not.
        """
        if self._meetings is not None:
            answer: str | None = _FAILED
            try:
                wait = max(0.1, self.wait_seconds * 0.5**self._num_missed)
                answer = self._meetings.come(occasion, wait, _FAILED if self._failed else said)
            except Exception as error:
                self._fail(error)
            if answer is None:
                self._num_missed += 1
                self._leave_out(occasion)
                return False
            self._num_missed = 0
            if answer == _FAILED and not self._failed:
                self._fail(OtherRankError(f"it failed on another rank before {occasion}"))
            said = answer
        if said == _LOST:
            self._reset_rows()
            self._warn(f"{occasion} is not measured, for an exception ended a batch of it.")
        if self._failed:
            self._geometry = None  # all ranks know it
        return not (said or self._failed)

    def _leave_out(self, occasion: str) -> None:
        """Drop the rows of a measurement to which not all ranks have come, with one warning."""
        self._window_start = None
        self._reset_rows()
        if not self._has_missed:
            self._has_missed = True
            message = (
                f"every rank must come to a measurement; at {occasion} some have not come in time, "
                "or have ended, so it is left out, as will be all others to which they do not come."
            )
            if self.on_error == "raise":
                raise OtherRankError(message)
            self._warn(message)

    def _reset_rows(self) -> None:
        if self._geometry is not None:
            self._geometry.reset()

    def _join_ranks(self, process_group: Group) -> None:
        """Make the process groups of the run, none of which is the training's; every rank calls
        this.
        """
        self._row_group = process_group
        if has_other_ranks():
            self._ranks = own_group()
            if process_group is None:
                self._row_group = self._ranks
            elif not isinstance(process_group, OwnGroup):
                self._row_group = own_copy(process_group, self._ranks)

    @_guarded
    def _leave_ranks(self) -> None:
        if self._meetings is not None:
            self._meetings.leave()
        for group in (self._ranks, self._row_group):
            if isinstance(group, OwnGroup):
                group.end()
        self._meetings = None
        self._ranks = None
        self._row_group = None

    @_guarded
    def _before_batch(self, step: int, batch: Any) -> None:
        if step != self._now:
            self._now = step
            self._num_batches = 0
            self._numbers = []
        self._num_batches += 1
        if self._geometry is None:
            return
        is_plain = self._window_start is None and not self._is_due(step)
        self._clock.begin(is_plain=is_plain and self._opened)
        if self._num_batches % _WATCHED_BATCHES == 0:
            self._require_still_weights()
        if not (self._opened or self._open(batch)):
            return
        if self._keeps_batches and batch is not None:
            self._last_batches.add(step, batch)
        if self._window_start is None and self._take_due(step):
            if self.probe is not None:
                self._measure_probe(step)
            # some exchange positions in the forward pass
            elif self._sequence_mesh is None or self._all_come(f"the start of step {step}"):
                self._window_start = step
        if self._window_start is not None:
            with self._own_work():
                if self._num_batches == 1:
                    self._geometry.probe.forget_weights()
                self._attach(batch)

    def _require_still_weights(self) -> None:
        """Raise ValueError, with nothing kept, if the weights have changed within a step."""
        before, self._numbers = self._numbers, first_numbers(self._watched)
        if not all(map(are_equal, before, self._numbers)):
            self._detach()
            self._geometry = None
            self._window_start = None
            self._last_batches = LastBatches(self.schedule.window)
            raise ValueError(
                f"step is still {self._now} in the {self._num_batches}th batch, while weights have "
                f"changed: {self._step_rule}"
            )

    def _is_due(self, step: int) -> bool:
        """Tell whether there is a scheduled step up to this one that has not been taken yet."""
        assert self._last_step is not None
        return self.schedule.next_after(self._last_step) <= step

    def _take_due(self, step: int) -> bool:
        is_due = self._is_due(step)
        self._last_step = step
        return is_due

    def _attach(self, batch: Any) -> None:
        assert self._geometry is not None
        probe = self._geometry.probe
        if self.probe is None and not self._has_said_eager and has_compiled(self._geometry.model):
            self._has_said_eager = True
            self._say(
                "in measured steps all that torch.compile has made runs eagerly, with the rounding "
                "of eager mode and other random numbers: a probe avoids both."
            )
        probe.attach()
        for name in ("token_ids", "mask", "word_ids"):
            function = getattr(self, name)
            setattr(probe, name, None if function is None else function(batch))

    @_guarded
    def _detach(self) -> None:
        if self._geometry is not None:
            self._geometry.probe.detach()

    @_guarded
    def _after_batch(self, step: int) -> None:
        self._detach()
        start = self._window_start
        if start is not None and step >= start + self.schedule.window:
            self._measure(start)
        elif (
            self.probe is not None
            and self._geometry is not None
            and self._opened  # what is measured is chosen before
            and self._is_due(step)
        ):
            self._clock.begin(is_plain=False)
            self._take_due(step)
            self._measure_probe(step)
        self._clock.end()

    @_guarded
    def _finish(self, step: int) -> None:
        self._detach()
        if self._ranks is not None and not is_distributed():
            self._leave_out_last(step)
        if self._window_start is not None:
            self._measure(self._window_start)
        if self._geometry is not None and not self._opened and step > self._first_step:
            self._warn(
                "no batch has come to it, so nothing was measured of training: the loop of this "
                "Trainer may not call training_step. Use StepMonitor in that loop."
            )
        if self._is_last_due(step):
            self._clock.begin(is_plain=False)
            measure = self._measure_recent if self.probe is None else self._measure_probe
            measure(step, self._why_not_last(step))
        if not self._failed:
            with self._own_work():
                self._illustrate(last=True)
        self._clock.end()

    def _is_last_due(self, step: int) -> bool:
        """Tell whether the last weights are to be measured and are not yet."""
        return (
            self.measure_last
            and self._geometry is not None
            and step != self._first_step
            and (self._was_silent or step != self._measured_step)
        )

    def _why_not_last(self, step: int) -> str:
        """Why the last weights cannot be measured on this rank; it has been said."""
        return ""

    def _leave_out_last(self, step: int) -> None:
        """Drop what is not computed yet, which would be of this rank's rows alone."""
        if self._is_last_due(step) or (self._geometry and self._window_start is not None):
            self._warn(
                "the process group must be there until the last measurement is complete; it was "
                "destroyed before, and what was not complete is left out. End training, or call "
                "close(), before destroy_process_group()."
            )
        self._window_start = None
        self._geometry = None

    def _stop(self) -> None:
        """Leave the run, after an exception too; its place in the schedule may still be saved to a
        checkpoint.
        """
        with ExitStack() as stack:  # each of them is called, whatever the others raise
            for undo in (self._close_file, self._leave_ranks, self._detach):
                stack.callback(undo)
        self._run = None
        self._geometry = None
        self._last_batches = LastBatches(self.schedule.window)
        self._watched = []
        self._numbers = []

    @_guarded
    def _close_file(self) -> None:
        if self._run is not None and (said := str(self._clock)):
            self._say(f"{said}.")
        if self._file is None:
            return
        file = self._file
        self._file = None
        self._write(file.close)
        with suppress(OSError):
            if not self._cannot_write and file.path.exists():
                command = shell_command("embedgeo", "report", file.path.parent)
                self._say(f"its history is in {file.path}; to look at it: {command}")

    def _measure_probe(self, step: int, why_not: str = "") -> None:
        assert self.probe is not None
        if not self._all_come(f"the probe of step {step}", why_not):
            return
        with self._own_work():
            num_batches = self._run_model(self.probe)
            if num_batches < self._num_probe_batches:
                self._warn(
                    f"probe must give the same batches at every measurement; at step {step} it "
                    f"gave {num_batches}, before {self._num_probe_batches}. Give fixed batches, "
                    "such as a list."
                )
            self._num_probe_batches = num_batches
        self._measure(step)

    def _measure_recent(self, step: int, why_not: str = "") -> None:
        """Measure the last weights on the last full training batches, if there are any, run again
        as in a training step.
        """
        batches = self._last_batches.full()
        if self._last_batches.have_changed:
            batches = []
            self._warn(
                f"the weights of the last step, {step}, are not measured, because tensors of the "
                "last training batches were written to since. Give a probe=, or each batch tensors "
                "of its own."
            )
        if not self._all_come(f"the last step, {step}", why_not or "no batch" * (not batches)):
            return
        assert self._geometry is not None
        try:
            with kept_random_states():
                self._run_model(batches, as_training=True)
        except Exception as error:
            self._geometry.reset()
            if self.on_error == "raise":
                raise
            if self._failed:
                return
            self._warn(
                f"the weights of the last step, {step}, are not measured, because the model could "
                f"not be run on a training batch as in its training step ({reason(error)}). "
                "Give probe_forward=, a function of the module and a batch, or measure_last=False."
            )
        else:
            self._measure(step)

    def _run_model(self, batches: Iterable[Any], *, as_training: bool = False) -> int:
        """Run the model on batches, and count them; weights, their shards, modes and what modules
        hold are what they were afterwards.

        It runs without gradients.

        Ranks share the batches, one each in a round. All ranks run the model in a round or none
        does, because they gather sharded parameters together: a rank without a batch of its own
        repeats another one, not measured. ``as_training`` it runs as in a training step, dropout
        included, on batches of this rank alone, as they were given to it in training. An error of
        one rank is raised on all of them, as are other batches of a probe, and another number of
        them.
        """
        run = self._run
        assert run is not None
        assert self._geometry is not None
        is_shared = is_distributed() and not as_training
        num_sharing = num_ranks(self._row_group) if is_shared else 1
        rank = current_rank(self._row_group) if is_shared else 0
        num_batches = 0
        digests = list[int]()
        with together(self._ranks), ExitStack() as stack, torch.no_grad():
            stack.enter_context(kept_generators(batches))
            stack.enter_context(kept_state(run.model))
            stack.enter_context(self._geometry.probe.exclusive())
            stack.callback(self._detach)
            stack.callback(mode_restorer(run.model))
            stack.enter_context(kept_sharded(run.model))
            inputs = self._geometry.inputs
            told = inputs.told
            if as_training:
                inputs.told = set()
                self._set_train_mode()
            else:
                set_eval_modes(run.model)
            remaining = iter(batches)
            while True:
                if num_batches > _MOST_BATCHES:
                    raise ValueError(
                        f"probe must end; it gives more than {_MOST_BATCHES:,} batches. Give a "
                        "list, or a loader with a limit."
                    )
                taken = [*islice(remaining, num_sharing)]
                if taken:
                    digests += [] if as_training else map(digest, taken)
                    own = taken[min(rank, len(taken) - 1)]
                    # a module may change a batch on its way to the device, and has done so
                    own = own if as_training else self._to_device(copy(own))
                    if rank < len(taken):
                        self._geometry.probe.forget_weights()
                        self._attach(own)
                # what fails before this on one rank keeps all from running the model
                _require_same_batches(taken, self._ranks, as_training=as_training)
                if not taken:
                    if as_training and (missing := told - inputs.told):
                        what = listed(sorted(missing))
                        raise ValueError(f"the layers get no {what}, which they have in training")
                    if not as_training:
                        self._know_probe(digests)
                    return num_batches
                with kept_weights(run.model):
                    self._forward(own)
                self._detach()
                num_batches += len(taken)

    def _know_probe(self, digests: Sequence[int]) -> None:
        """Record what a probe is, once it has been so twice: masks may be drawn anew."""
        if digest(()) in digests:  # a batch that nothing is known of
            return
        own = f"{digest([*map(str, digests)]):x}"
        before = self._probe_digest
        if digests and before and own != before and not self._warned_of_probe:
            self._warned_of_probe = True
            self._warn(
                "the probe's batches are others than at the last measurement, so values change "
                "with them, too. Give fixed batches, such as a list."
            )
        self._probe_digest = own
        if own != before:
            return
        earlier = own if self._file is None else self._file.origin.get("probe", own)
        self.origin["probe"] = earlier
        if own not in earlier:
            self.origin["probe"] = f"{earlier}, {own}"
            self._warn(
                "the batches of the probe are others than those of earlier steps in its history "
                "file: do not compare them."
            )

    def _measure(self, step: int) -> None:
        """Close the window, compute and log the metrics, unless a rank has failed; every rank calls
        this.
        """
        self._window_start = None
        geometry = self._geometry
        assert geometry is not None
        assert self._run is not None
        has_lost = self._has_lost_rows
        self._has_lost_rows = False
        if not self._all_come(f"step {step}", _LOST if has_lost else ""):
            return
        is_first = self._measured_step is None
        self._measured_step = step
        is_agreed = False
        with self._own_work():
            try:
                with together(self._ranks, f"before step {step}"):
                    records = geometry.records()
                    why_silent = geometry.why_silent()
                    silent = geometry.silent_layers()
                is_agreed = True
                self._record(step, records, silent, geometry)
            finally:
                geometry.reset()
            # once, a module may have skipped the batch; of a probe the number of batches is told
            has_lost = bool(blocks_by_side(silent) and (records or self._was_silent))
            if not (is_first or records or self._was_silent):
                self._say(f"step {step} is not measured: no forward pass reached the layers.")
            self._was_silent = not records and self.probe is None
            if is_first or (has_lost and not self._warned_of_silence):
                self._warned_of_silence = has_lost
                self._warn_of_nothing(
                    step, records, why_silent, geometry.num_rows, has_lost=has_lost
                )
            had_ids = self._had_token_ids or (is_first and geometry.inputs.tables)
            if had_ids and geometry.num_rows and not geometry.had_token_ids:
                self._warn(
                    f"at step {step} no token ids were found, so what needs them is missing from "
                    "then on: its embedding table is another one, or not called. Give token_ids=, "
                    "or begin another monitor."
                )
            self._had_token_ids = geometry.had_token_ids
            if is_first and (lines := finding_lines(records)):
                self._say(f"at step {step}, {' '.join(lines)}")
            if geometry.probe.has_left_out and not self._warned_of_weights:
                self._warned_of_weights = True
                self._say(
                    "forward passes after a change of the weights within a step, as the second one "
                    "of SAM, are not measured."
                )
            if is_first and geometry.has_few_rows:
                self._say(
                    f"a forward pass has fewer than {FEWEST_ROWS} rows that count: none of them is "
                    "called massive, and numbers without massive rows are missing or hold them."
                )
        if not is_agreed:
            self._geometry = None  # all ranks know that one has failed

    def _record(
        self, step: int, records: list[Record], silent: list[str], geometry: Geometry
    ) -> None:
        means = block_means(records, silent, geometry.deviations())
        logged = [Record(step=step, **each) for each in [*records, *means]]
        measured = [*logged, *self._hear(step, logged, geometry)]
        last = self.history[-1]["step"] if self.history else -1
        if last > step:
            self._say(f"its history drops what an earlier fit measured from step {step} on.")
        if last >= step:  # of a fit before, which ended there
            del self.history[bisect_left(self.history, step, key=operator.itemgetter("step")) :]
        self.history.extend(measured)
        if records:
            self._clock.count()
        self.origin |= geometry.origin_of_metrics()
        if self._file is not None:
            self._file.origin |= self.origin
            self._write(partial(self._file.add, measured))
            self._history_run = self._file.run
        if not self._failed:
            self._illustrate()
        self._log(step, measured)  # ends W&B's row

    def _illustrate(self, *, last: bool = False) -> None:
        earlier = tuple if self._file is None else self._file.earlier
        self._illustrations.write(self._loggers(), self.history, earlier, last=last)

    def _warn_of_nothing(
        self, step: int, records: list[Record], why_silent: str, num_rows: int, *, has_lost: bool
    ) -> None:
        """Say which layers have no rows at the first measurement, or that none has any."""
        # on all ranks
        has_values = any(record["value"] and not math.isnan(record["value"]) for record in records)
        if why_silent:
            some = (
                f" At step {step} there is no mean over blocks, for all that were there at the "
                "start must have rows. A probe= runs skipped ones, in eval mode; a replaced one "
                "needs another monitor."
            )
            self._warn(why_silent + some * has_lost)
        elif not (has_values or num_rows):
            self._warn(
                f"no token is left to measure at step {step}: skip_first_positions, "
                f"ignore_token_ids and the mask leave out all of them, or the batches are empty."
            )

    def _hear(self, step: int, records: list[Record], geometry: Geometry) -> list[Record]:
        """Call the listeners with copies of the records of a step, and return those that they add.

        One that fails is taken out on all ranks, with one warning.
        """
        outcomes = list[tuple[list[Record], str]]()
        for name, listener in self._named_listeners.items():
            added = list[Record]()
            why = self._broken.get(name, "")
            try:
                if not why:
                    added = _added(step, listener(step, [*Records(records)], geometry))
            except Exception as error:
                if self.on_error == "raise":
                    raise
                why = reason(error)
            outcomes.append((added, why))
        whys = [[why for _, why in outcomes]]
        if self._ranks is not None and outcomes:
            with together(self._ranks):
                whys += all_gather_object(whys[0], self._ranks)
        heard = list[Record]()
        for name, (added, _), of_ranks in zip(
            self._named_listeners, outcomes, zip(*whys, strict=True), strict=True
        ):
            if why := next(filter(None, of_ranks), ""):
                if current_rank() == 0 and name not in self._broken:
                    self._take_out(name, f"at step {step}", why)
                self._broken[name] = why
            else:
                heard += {(r["layer"], r["metric"]): r for r in added}.values()
        self.listeners = [
            each for name, each in self._named_listeners.items() if name not in self._broken
        ]
        return heard

    def _scalars(self, records: Iterable[Record]) -> dict[str, float]:
        """The scalars by tag that loggers get."""
        return tagged_scalars(records, self.prefix, self.scalars)

    @_guarded
    def _write_rest(self) -> None:
        """Write what the history file does not have yet; nothing that fails reaches the caller."""
        if self._file is not None:
            self._write(self._file.write)

    def _write(self, write: Callable[[], str]) -> None:
        """Write the history file; where that fails, measuring and logging go on, and it is tried
        again.
        """
        try:
            if said := write():
                self._say(said)
        except (OSError, ValueError) as error:
            if self.on_error == "raise":
                raise
            if not self._cannot_write:
                self._cannot_write = True
                self._warn(
                    f"its history file cannot be written, measuring and logging go on: "
                    f"{reason(error)}"
                )

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Context that keeps the random states and passes exceptions to `_fail`."""
        with kept_random_states():
            try:
                yield
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Turn monitoring off on this rank; the other ranks follow at the next measurement."""
        if self.on_error == "raise":
            raise error
        if not self._failed:
            self._failed = True
            kind = "" if isinstance(error, OtherRankError) else f"{type(error).__name__}: "
            cause = " ".join([f"{kind}{error}", *getattr(error, "__notes__", [])])
            # of another monitor, or another run, Python would leave out the same words
            globals().pop("__warningregistry__", None)
            warnings.warn(
                f"{type(self).__name__} is off for the rest of this run, training goes on: {cause}",
                stacklevel=1,
            )
        if self._geometry is not None:
            self._geometry.switch_off()

    def _say(self, message: str) -> None:
        # Lightning does not know the ranks of processes that torch has spawned
        if current_rank() == 0:
            rank_zero_info(f"{type(self).__name__}: {message}")

    def _warn(self, message: str) -> None:
        warnings.warn(f"{type(self).__name__}: {message}", stacklevel=2)


class _Combined:
    """The batches of Lightning's combined loader, which gives each with its place."""

    def __init__(self, loader: CombinedLoader) -> None:
        self._loader = loader
        self.flattened = loader.flattened

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, *_ in self._loader)


def instantiated(value: Any) -> Any:
    """A value with each dict of a ``class_path`` and its ``init_args`` replaced by an instance,
    from the inside out.

    `lightning.pytorch.cli.LightningCLI` leaves these dicts to the monitor, because jsonargparse
    would not pass arguments on to a data set inside a ``torch.utils.data.DataLoader``.
    """
    if isinstance(value, list):
        return [instantiated(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: instantiated(item) for key, item in value.items()}
    if "class_path" not in items:
        return items
    # needs jsonargparse, as what has read the file
    from lightning.pytorch.cli import instantiate_class

    return instantiate_class((), items)


def _require_probe(probe: Any, window: int) -> Any:
    """The probe, that of a configuration made; TypeError or ValueError if it cannot be one."""
    if isinstance(probe, dict):
        probe = instantiated(probe)
    if isinstance(probe, CombinedLoader):
        probe = _Combined(probe)
    if isinstance(probe, Iterator):
        raise TypeError(
            "probe must be iterable more than once, as a DataLoader is; got an iterator."
        )
    if isinstance(probe, Mapping | Tensor):  # which give names, or rows
        raise TypeError(
            f"probe must give batches, as a DataLoader or a list does; got {type(probe).__name__}. "
            "Give [batch] for one batch; join several loaders by Lightning's CombinedLoader."
        )
    if window > 1 and probe is not None:
        raise ValueError(
            f"window combines training batches and must be 1 when a probe is given; got {window}."
        )
    if probe is not None and operator.length_hint(probe, 1) == 0:
        raise ValueError(
            f"probe must have at least one batch; got {type(probe).__name__} of length 0."
        )
    return probe


def _require_listeners(listeners: Sequence[Any], *, has_probe: bool) -> list[Any]:
    """The listeners, those of a configuration made; TypeError or ValueError if one cannot be
    called, or lacks a probe.
    """
    rule = "listeners must be a list of functions of a step, its records and the geometry"
    if not isinstance(listeners, list | tuple):
        raise TypeError(f"{rule}; got {type(listeners).__name__}.")
    made = [instantiated(listener) for listener in listeners]
    for listener in made:
        if not callable(listener):
            raise TypeError(f"{rule}; got {type(listener).__name__}.")
        if getattr(listener, "needs_probe", False) and not has_probe:
            raise ValueError(
                f"a {type(listener).__name__} needs the same rows at every measurement; this "
                "monitor measures training batches. Give probe=, fixed held-out batches."
            )
    return made


def _described(option: Any) -> str:
    """An option as ranks compare it, without addresses: of a function its name."""
    if isinstance(option, list | tuple):
        return f"[{', '.join(map(_described, option))}]"
    if callable(option):
        return str(getattr(option, "__qualname__", type(option).__qualname__))
    return repr(option)


def _added(step: int, records: Iterable[Mapping[str, Any]] | None) -> list[Record]:
    """The records that a listener has returned, of plain values; TypeError or ValueError if they
    are something else.
    """
    made = list[Record]()
    for record in () if records is None else records:
        keys = [key for key in Record.__annotations__ if key not in ("step", "deviations")]
        if {*record} - {"step"} != {*keys}:
            raise ValueError(
                f"a listener must return records with the keys {listed(keys)}; got {record!r}."
            )
        if not (isinstance(record["layer"], str) and isinstance(record["metric"], str)):
            raise TypeError(f"layer and metric of a record must be texts; got {record!r}.")
        plain: Any = {
            **record,
            "step": step,
            "layer_index": operator.index(record["layer_index"]),
            "width": operator.index(record["width"]),
            "value": float(record["value"]),
            "stderr": float(record["stderr"]),
        }
        made.append(plain)
    return made


def _by_occurrence(listeners: Iterable[object]) -> dict[str, Any]:
    """Listeners by name: the class, and which one of it."""
    counts = Counter[str]()
    named = dict[str, Any]()
    for listener in listeners:
        kind = f"{type(listener).__module__}.{type(listener).__qualname__}"
        named[f"{kind} {counts[kind]}"] = listener
        counts[kind] += 1
    return named


def _require_prefix(prefix: str) -> None:
    if re.search(r"^\.|(^|\.)[0-9]*$", str(prefix)):
        raise ValueError(
            "prefix must not be empty, begin or end with a dot, end in a dot and a number, nor be "
            f"a number; got {prefix!r}. history.{prefix}.parquet would be another run's: put a "
            "letter there."
        )


def _require_same_batches(taken: list[Any], ranks: Group, *, as_training: bool) -> None:
    """Raise ValueError if the ranks have taken other batches, or another number of them where these
    are each rank's own; each of them must call this.
    """
    if ranks is None:
        return
    own = torch.tensor([len(taken), 0 if as_training else digest(taken)])
    most, least = all_reduce_max(torch.stack((own, -own)), ranks)
    differs = (most != -least).tolist()
    how = f"one rank has {-int(least[0])} left, another one {int(most[0])}"
    if as_training and differs[0]:
        raise ValueError(
            f"the last training batches must be as many on every rank; {how}. Give probe= instead."
        )
    if any(differs):
        raise ValueError(
            "probe must give the same batches on every rank, because ranks share them; "
            f"{how if differs[0] else 'their tensors or texts differ'}. Do not shard or shuffle "
            "the probe's data, as accelerator.prepare does."
        )
