"""A sweep whose checkpoints are measured by workers of a Ray cluster."""

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from huggingface_hub import constants

from embedgeo.formatting import listed, reason
from embedgeo.sweep.actor import Answer, RayWorker, Started
from embedgeo.sweep.measure import Study
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.processes import versions
from embedgeo.sweep.run import POLL_SECONDS, Sweep
from embedgeo.sweep.settings import SweepSettings

# of Ray's own for these resources
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# of workers over one checkpoint; and, for each worker, before they were ready, in a row
_MOST_DEATHS = 3
_PATIENCE_SECONDS = 60.0  # until a line tells that workers have found no place
_CLOSING_SECONDS = 5.0


@contextmanager
def connected(settings: SweepSettings) -> Iterator[None]:
    """Context of the cluster that is named or found, or else of one that is started on this machine
    meanwhile.
    """
    is_ours = not ray.is_initialized()  # or else the program's that has called this
    try:
        if is_ours:
            _connect(settings.ray_address)
        needed = {"CPU": 1, **(settings.resources or {})}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            all(node.get(name, 0) >= number for name, number in needed.items()) for node in nodes
        ):
            most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in needed}
            raise ValueError(
                f"resources must be what a node of the cluster can give to a worker; asked for "
                f"{_enumerated(needed)}, the most that nodes have is {_enumerated(most)}."
            )
        yield
    finally:
        if is_ours:
            ray.shutdown()


def _connect(address: str | None) -> None:
    known = address or os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if known not in (None, "auto", "local"):  # Ray itself tries for minutes
            host, _, port = known.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        with warnings.catch_warnings():  # ray 2.50 gives every driver its advice on a variable
            warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except SystemExit as stopped:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from stopped
    except Exception as error:
        raise ConnectionError(
            "ray_address must be auto, or HOST:PORT of a Ray cluster that runs, of which this "
            "machine is a node, or "
            f"local for a new one; got {known or 'none, and Ray has found one'} ({reason(error)})."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets one that exits with another status


def _enumerated(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in resources.items())


@dataclass(eq=False)
class _RemoteWorker:
    """A worker of the cluster, as the driver sees it."""

    actor: Any
    node: str = ""  # empty until it is ready
    planned: Planned | None = None
    upcoming: Planned | None = None  # which it fetches meanwhile, to measure it next
    started: float = 0.0


class RemoteWorkers:
    """The workers of a sweep; each that dies is replaced, and its checkpoint is left to others, up
    to three deaths.
    """

    def __init__(self, sweep: Sweep, study: Study | None) -> None:
        num_originals = sum(not planned.duplicate_of for planned in sweep.plan.pending)
        self._sweep = sweep
        self._resources = {"CPU": 1, **(sweep.settings.resources or {})}
        self._num_workers = min(sweep.settings.workers, max(1, num_originals))
        self._arguments = ray.put(sweep.settings), ray.put(sweep.texts), study
        self._workers: list[_RemoteWorker] = []
        self._answers: dict[Any, _RemoteWorker] = {}  # that are waited for
        self._deaths: Counter[str] = Counter()
        self._deaths_at_start = 0
        self._last_start = 0.0

    def measure_all(self) -> None:
        """Measure all checkpoints, then end the workers."""
        try:
            while self._sweep.left or any(
                worker.planned or worker.upcoming for worker in self._workers
            ):
                self._start_workers()
                for worker in self._workers:
                    if worker.node and worker.planned is None:
                        self._assign(worker)
                self._show_progress()
                self._take_answers()
        finally:
            with suppress(Exception):  # as where the cluster is gone
                if closing := [
                    worker.actor.close.remote() for worker in self._workers if worker.node
                ]:
                    ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_SECONDS)
                for worker in self._workers:
                    ray.kill(worker.actor)

    def _start_workers(self) -> None:
        resources = dict(self._resources)
        options = {
            option: resources.pop(name) for name, option in _OPTIONS.items() if name in resources
        }
        actors: Any = ray.remote(RayWorker).options(
            **options, resources=resources, max_concurrency=2, scheduling_strategy="SPREAD"
        )
        # by which workers reach the Hub, but for the token; they wait, and take memory, as this one
        environment = {
            "HF_ENDPOINT": constants.ENDPOINT,
            "HF_HUB_DISABLE_XET": str(int(constants.HF_HUB_DISABLE_XET)),
            "HF_HUB_OFFLINE": str(int(constants.HF_HUB_OFFLINE)),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
        }
        for _ in range(self._num_workers - len(self._workers)):
            worker = _RemoteWorker(actors.remote(environment))
            self._workers.append(worker)
            self._answers[worker.actor.start.remote(*self._arguments)] = worker
            self._last_start = time.monotonic()

    def _assign(self, worker: _RemoteWorker) -> None:
        """Give a worker what it has fetched, or the next checkpoint that cannot be copied."""
        while (planned := worker.upcoming or self._choose()) is not None:
            worker.upcoming = None
            started = time.monotonic()
            try:
                result = planned.error or self._sweep.copied(planned)
            except Exception as error:
                result = reason(error)
            if result is None:
                worker.planned = planned
                worker.started = started
                # otherwise what is left is for who is ready first
                if len(self._sweep.left) >= self._num_workers:
                    worker.upcoming = self._choose(to_fetch=True)
                self._answers[worker.actor.measure.remote(planned, worker.upcoming)] = worker
                return
            self._sweep.end(planned, self._sweep.num_ended + 1, result, started)

    def _choose(self, *, to_fetch: bool = False) -> Planned | None:
        """The next checkpoint, but for those with the weights of one that is under way."""
        under_way = {
            p.original
            for worker in self._workers
            for p in (worker.planned, worker.upcoming)
            if p is not None
        }
        free = [planned for planned in self._sweep.left if planned.original not in under_way]
        chosen = self._sweep.reserve(
            [p for p in free if not (to_fetch and (p.duplicate_of or p.error))]
        )
        if chosen is not None:
            self._sweep.left.remove(chosen)
        return chosen

    def _show_progress(self) -> None:
        names = [worker.planned.name for worker in self._workers if worker.planned is not None]
        self._sweep.show_progress(
            listed(names), self._sweep.num_ended + len(names), self._sweep.num_ended
        )
        num_ready = sum(bool(worker.node) for worker in self._workers)
        if self._sweep.left and num_ready and not names:
            self._sweep.print_waiting()
        if (
            num_ready < self._num_workers
            and time.monotonic() - self._last_start > _PATIENCE_SECONDS
        ):
            self._sweep.print_once(
                f"{num_ready} of {self._num_workers} workers have started; the others do once the "
                f"cluster has {_enumerated(self._resources)} free for each"
            )

    def _take_answers(self) -> None:
        if not self._answers:
            time.sleep(POLL_SECONDS)
            return
        for reference in ray.wait(list(self._answers), timeout=POLL_SECONDS)[0]:
            worker = self._answers.pop(reference)
            try:
                answer = ray.get(reference)
            # it cannot be imported, or its answer not be sent
            except ray.exceptions.RayTaskError as error:
                why = reason(error.cause or error)
                if not worker.node:
                    raise ValueError(
                        f"embedgeo must be installed on every node of the cluster; {why}"
                    ) from error
                self._take(worker, Answer(why))
            except Exception as error:
                self._remove_dead(worker, error)
            else:
                self._take(worker, answer)

    def _take(self, worker: _RemoteWorker, answer: Started | Answer) -> None:
        if isinstance(answer, Started):
            _require_same_packages(answer)
            worker.node = answer.node
            self._deaths_at_start = 0
            return
        for message in answer.warnings:
            warnings.warn(message, stacklevel=2)
        assert worker.planned is not None
        self._sweep.end(worker.planned, self._sweep.num_ended + 1, answer.result, worker.started)
        worker.planned = None

    def _remove_dead(self, worker: _RemoteWorker, error: Exception) -> None:
        self._workers.remove(worker)
        ray.kill(worker.actor)  # it may only be out of reach
        planned = worker.planned
        if planned is None:
            self._deaths_at_start += 1
            if self._deaths_at_start >= _MOST_DEATHS * self._num_workers:
                raise ConnectionError(
                    f"workers must start on the cluster; {self._deaths_at_start} died: "
                    f"{_cause_of_death(error)}"
                )
            return
        if worker.upcoming is not None:
            self._sweep.put_back(worker.upcoming)
        self._deaths[planned.name] += 1
        if self._deaths[planned.name] == _MOST_DEATHS:
            why = f"its worker died, {_MOST_DEATHS} times: {_cause_of_death(error)}"
            self._sweep.end(planned, self._sweep.num_ended + 1, why, worker.started)
        else:
            self._sweep.print(
                f"the worker on {worker.node} died over {planned.name}: it is measured again"
            )
            self._sweep.put_back(planned)


def _require_same_packages(started: Started) -> None:
    if started.error:
        raise ValueError(f"a worker must be able to start; on {started.node}: {started.error}")
    for name, own in versions().items():
        other = started.versions.get(name, "none")
        # +cpu, +cu130 are builds of one version
        if other.partition("+")[0] != own.partition("+")[0]:
            raise ValueError(
                f"the nodes of the cluster must have the driver's packages; {started.node} has "
                f"{name} {other}, this machine {own}."
            )


def _cause_of_death(error: Exception) -> str:
    """The line of Ray's message that tells the cause of a death, without what identifies the
    worker.
    """
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")] or [
        type(error).__name__
    ]
    line = (
        lines[1] if isinstance(error, ray.exceptions.RayActorError) and len(lines) > 1 else lines[0]
    )
    return line.rpartition("Worker exit detail: ")[2].partition(" If the process was killed")[0][
        :400
    ]
