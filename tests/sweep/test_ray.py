"""Sweeps on Ray: on a cluster of three nodes, of which workers and a node are killed."""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from ray.autoscaler._private import util
from ray.cluster_utils import Cluster

from embedgeo.results.folder import SweepFolder
from embedgeo.sweep.settings import SweepSettings
from tests.files import ROOT
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import REPOSITORY, checkpoint_files, local_run

pytestmark = [  # ray 2.50, of the processes of a cluster that it starts, and to every driver
    pytest.mark.filterwarnings("ignore:unclosed file .*/dev/null:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
]

WEIGHTS = "model.safetensors"
DOWNLOADS = Path(tempfile.gettempdir(), f"embedgeo-workers-{os.getuid()}")


@pytest.fixture
def cluster(monkeypatch):
    with FileLock(f"{DOWNLOADS}.lock"):  # workers of other tests would be taken for its own
        cluster = Cluster()
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def run(hub):
    """Five checkpoints, a duplicate and a damaged one; the commits of the five by step."""
    steps = (0, 1, 2, 4, 5)
    commits = {step: hub.add(REPOSITORY, f"step{step}", checkpoint_files(step)) for step in steps}
    hub.add(REPOSITORY, "step3", checkpoint_files(1))
    hub.add(REPOSITORY, "step9", {**checkpoint_files(9), "config.json": b"{"})
    return commits


ON_RAY = {"on": "ray", "workers": 3}


def files(out):
    """Bytes of what a sweep has written, and the reasons of failures."""
    assert not any(path.name.startswith(".") for path in out.rglob("*"))
    tables = (out / "tokens").glob("*")
    paths = [*(out / "checkpoints").iterdir(), *tables, *(out / "failed").glob("*")]
    # step 2 has been measured on this machine alone
    return {str(path.relative_to(out)): path.read_bytes() for path in paths if path.stem != "step2"}


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def fetching(name):
    """The process of the living worker that downloads a checkpoint; none while nobody does."""
    folders = DOWNLOADS.glob(f".embedgeo-*-downloads/{name}")
    pids = [int(path.parent.name.split("-")[-2]) for path in folders]
    return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), None)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def interrupt(options):
    """Send SIGINT to a sweep of one worker while that downloads step 2."""
    folder = SweepFolder(options["out"])
    workers = []

    def send():
        workers.append(wait_for(lambda: fetching("step2")))
        wait_for(lambda: "step1" in folder.done())  # from here on it waits for step2
        signal.raise_signal(signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(REPOSITORY, **options, on="ray")
    sender.join()
    assert list(DOWNLOADS.iterdir()) == []
    wait_for(lambda: not Path(f"/proc/{workers[0]}").exists())
    assert folder.done() == {"step0", "step1"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for /proc")
def test_stopped_and_with_workers_and_a_node_killed_a_sweep_has_the_files_of_a_local_one(
    cluster, hub, run, options, tmp_path, printed
):
    options |= {"token_tables": True, "spectrum": True}
    local = {**options, "out": tmp_path / "local"}
    failed = options["out"] / "failed" / "step2.txt"
    why = "asked for 1 CPU, 1 GPU, the most that nodes have is 1 CPU, 0"
    with pytest.raises(ValueError, match=why):
        sweep(REPOSITORY, **options, **ON_RAY, resources={"GPU": 1})
    assert not options["out"].exists()
    assert sweep(REPOSITORY, **local) == 3
    hub.fail(WEIGHTS, run[2], "stall")
    interrupt(options)
    hub.requests.clear()
    first = (2, 4, 5)  # with which three workers begin
    for step in first:
        hub.fail(WEIGHTS, run[step], *["stall"] * (9 if step == 2 else 1))

    def kill():
        wait_for(lambda: all(fetching(f"step{step}") for step in first))
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        workers = {step: fetching(f"step{step}") for step in first}
        # one of these is not on the head node, which stays
        doomed = next(
            nodes[parent(workers[step])] for step in (4, 5) if parent(workers[step]) in nodes
        )
        cluster.remove_node(doomed, allow_graceful=False)
        os.kill(workers[2], signal.SIGKILL)
        wait_for(lambda: fetching("step2") != workers[2])
        os.kill(wait_for(lambda: fetching("step2")), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    printed()
    assert sweep(REPOSITORY, **options, **ON_RAY) == 3
    killer.join()
    assert "the worker of step2 died: it is measured again" in printed()
    assert "its worker died, 2 times" in failed.read_text()
    assert files(options["out"]) == files(local["out"])


def test_options_that_make_no_sense_are_refused():
    for more, why in (
        ({"workers": 2}, "give --on ray with them"),
        ({"on": "ray", "workers": 0}, "workers must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=why):
            SweepSettings(REPOSITORY, **more)


def test_a_cluster_that_is_not_there_is_named_at_once(options, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        OSError, match=r"RAY_ADDRESS must be auto, or HOST:PORT of .* got 127\.0\.0\.1:1 .*refused"
    ):
        sweep(local_run(tmp_path / "run"), **options, on="ray")
    assert not options["out"].exists()


def test_rays_launcher_accepts_the_cluster():
    config = yaml.safe_load((ROOT / "examples" / "ray-cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    assert config["head_node_type"] in config["available_node_types"]
