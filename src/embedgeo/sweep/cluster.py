"""A sweep whose checkpoints are measured by tasks of a Ray cluster."""

import logging
import os
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from huggingface_hub import constants

from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import reason
from embedgeo.results.folder import versions
from embedgeo.sweep.measure import Downloads, Measured, Worker, metrics_function
from embedgeo.sweep.processes import muted_libraries
from embedgeo.sweep.progress import POLL_SECONDS, Sweep
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText

# of Ray's own for these resources
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_MOST_DEATHS = 2  # of workers over one checkpoint
_CLOSING_SECONDS = 5.0

Answer = tuple[Measured | str, list[str]]
"""The measurement of a checkpoint, or the reason why there is none; the warnings given
meanwhile.
"""


@contextmanager
def connected(settings: SweepSettings) -> Iterator[None]:
    """Context of the cluster that is named or found, or else of one that is started on this machine
    meanwhile.
    """
    is_ours = not ray.is_initialized()  # or else the program's that has called this
    try:
        if is_ours:
            _connect()
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


def _connect() -> None:
    address = os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address not in (None, "auto", "local"):  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except SystemExit as stopped:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from stopped
    except Exception as error:
        raise ConnectionError(
            "RAY_ADDRESS must be auto, or HOST:PORT of a Ray cluster that runs, of which this "
            "machine is a node, or local for a new one; got "
            f"{address or 'none, and Ray has found one'} ({reason(error)})."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets one that exits with another status


def _enumerated(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in resources.items())


def measure_on_cluster(sweep: Sweep) -> None:
    """Measure all checkpoints, each by a task; what was begun by one that dies is begun again
    once.
    """
    num_originals = sum(not each.duplicate_of for each in sweep.plan.pending)
    num_workers = min(sweep.settings.workers, max(1, num_originals))
    task = _task(sweep.settings)
    arguments = ray.put(sweep.settings), ray.put(sweep.texts), versions()
    under_way: dict[Any, tuple[Checkpoint, float]] = {}
    deaths: Counter[str] = Counter()
    try:
        while sweep.left or under_way:
            while len(under_way) < num_workers:
                begun = {checkpoint.original for checkpoint, _ in under_way.values()}
                checkpoint = sweep.reserve(
                    [each for each in sweep.left if each.original not in begun]
                )
                if checkpoint is None:
                    break
                sweep.left.remove(checkpoint)
                started = time.monotonic()
                if (result := sweep.known(checkpoint)) is None:
                    under_way[task.remote(checkpoint, *arguments)] = checkpoint, started
                else:
                    sweep.end(checkpoint, result, started)
            sweep.show_progress(checkpoint.name for checkpoint, _ in under_way.values())
            if not under_way:
                sweep.wait_for_others()
                continue
            for reference in ray.wait(list(under_way), timeout=POLL_SECONDS)[0]:
                checkpoint, started = under_way.pop(reference)
                result = _answer(reference, checkpoint, deaths)
                if result is None:
                    sweep.print(f"the worker of {checkpoint.name} died: it is measured again")
                    sweep.put_back(checkpoint)
                else:
                    sweep.end(checkpoint, result, started)
    finally:
        with suppress(Exception):  # as where the cluster is gone
            for reference in under_way:
                ray.cancel(reference)
            ray.wait(list(under_way), num_returns=len(under_way), timeout=_CLOSING_SECONDS)


def _task(settings: SweepSettings) -> Any:
    resources = {"CPU": 1, **(settings.resources or {})}
    options = {
        option: resources.pop(name) for name, option in _OPTIONS.items() if name in resources
    }
    # by which workers reach the Hub, but for the token; they wait, and take memory, as this one
    environment = {
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_DISABLE_XET": str(int(constants.HF_HUB_DISABLE_XET)),
        "HF_HUB_OFFLINE": str(int(constants.HF_HUB_OFFLINE)),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
    }
    return ray.remote(_measure).options(
        **options,
        resources=resources,
        max_retries=0,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": environment},
    )


def _answer(reference: Any, checkpoint: Checkpoint, deaths: Counter[str]) -> Measured | str | None:
    """The result of a task; None where its worker has died, and another one may not."""
    try:
        result, messages = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        why = reason(error.cause or error)
        raise ValueError(
            f"a worker must be able to start, with embedgeo on every node of the cluster; {why}"
        ) from error
    except ray.exceptions.RayError as error:
        deaths[checkpoint.name] += 1
        if deaths[checkpoint.name] < _MOST_DEATHS:
            return None
        return f"its worker died, {_MOST_DEATHS} times: {reason(error)}"
    for message in messages:
        warnings.warn(message, stacklevel=2)
    return result


def _measure(
    checkpoint: Checkpoint,
    settings: SweepSettings,
    texts: Mapping[str, ProbeText],
    wanted: Mapping[str, str],
) -> Answer:
    """Measure a checkpoint on a node, in a folder that is removed, also where the task is
    cancelled.
    """
    node = socket.gethostname()
    for name, own in versions().items():
        # +cpu, +cu130 are builds of one version
        if own.partition("+")[0] != wanted[name].partition("+")[0]:
            raise ValueError(
                f"the nodes of the cluster must have the driver's packages; {node} has "
                f"{name} {own}, the driver {wanted[name]}."
            )
    path = checkpoint.path
    if path is not None and not path.exists():
        where = f"every node of the cluster, under the same path; {node} has no {path}"
        return f"FileNotFoundError: a local checkpoint must be on {where}.", []
    folder = Path(tempfile.gettempdir(), f"embedgeo-workers-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} must be a folder of this user's; it is another's.")
    with Downloads(folder, evict=settings.evict) as downloads:
        worker = Worker(settings, texts, downloads, metrics_function(settings))
        with muted_libraries(), warnings.catch_warnings(record=True) as caught:
            # in a thread, for a cancelled task is told in the main one, once it does not wait
            measuring = ThreadPoolExecutor(1).submit(worker.measure, checkpoint, lambda: None)
            try:
                while not wait([measuring], POLL_SECONDS).done:
                    pass
                result: Measured | str = measuring.result()
            except KeyboardInterrupt:
                downloads.discard()
                os._exit(0)  # what is downloaded would be written on
            except Exception as error:
                result = reason(error)
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return result, messages
