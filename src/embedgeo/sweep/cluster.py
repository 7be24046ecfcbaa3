"""The Ray cluster of a sweep: to connect with it, and what its nodes can give."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from embedgeo.results.wording import reason
from embedgeo.sweep.settings import SweepSettings


@contextmanager
def connected(settings: SweepSettings) -> Iterator[None]:
    """Be a driver of the cluster that is asked for or found, or else of one that is started on this machine meanwhile.

    Raises:
        ValueError: no node of the cluster can ever give a worker its resources.
        OSError: the cluster cannot be reached.
    """
    is_ours = not ray.is_initialized()  # or else the program's that has called this
    try:
        if is_ours:
            _connect(settings.ray_address)
        asked = resources_of(settings)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= number for name, number in asked.items()) for node in nodes):
            most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in asked}
            raise ValueError(
                f"resources must be what a node of the cluster can give to a worker; asked for {worded(asked)}, "
                f"the most that nodes have is {worded(most)}."
            )
        yield
    finally:
        if is_ours:
            ray.shutdown()


def _connect(address: str | None) -> None:
    given = address or os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if given not in (None, "auto", "local"):  # Ray itself tries for minutes
            host, _, port = given.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except SystemExit as stopped:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from stopped
    except Exception as error:
        raise ConnectionError(
            "ray_address must be auto, or HOST:PORT of a Ray cluster that runs, of which this machine is a node, or "
            f"local for a new one; got {given or 'none, and Ray has found one'} ({reason(error)})."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets one that exits with another status


def resources_of(settings: SweepSettings) -> dict[str, float]:
    """What each worker takes of its node."""
    return {"CPU": 1, **(settings.resources or {})}


def worded(resources: Mapping[str, float]) -> str:
    """Resources in a sentence."""
    return ", ".join(f"{number:g} {name}" for name, number in resources.items())
