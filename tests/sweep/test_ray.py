"""Sweeps on Ray: on a cluster of three nodes, which is slow, and on one that answers at once."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
import yaml
from filelock import FileLock
from ray.autoscaler._private import util
from ray.cluster_utils import Cluster

from embedgeo.checkpoints.sources import Checkpoint, parse_position
from embedgeo.results.folder import SweepFolder
from embedgeo.results.records import Record
from embedgeo.sweep import actor
from embedgeo.sweep import cluster as on_ray
from embedgeo.sweep.measure import Measured
from embedgeo.sweep.plan import Planned, SweepPlan
from embedgeo.sweep.processes import make_fabric, versions
from embedgeo.sweep.run import Sweep
from embedgeo.sweep.settings import SweepSettings
from tests.sweep.sweeping import ablate, sweep
from tests.sweep.tiny import REPOSITORY, checkpoint_files, local_run

# ray 2.50, of the processes of a cluster that it starts
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*/dev/null:ResourceWarning")

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
DOWNLOADS = Path(tempfile.gettempdir(), f"embedgeo-workers-{os.getuid()}")


@pytest.fixture(scope="module")
def cluster():
    with FileLock(f"{DOWNLOADS}.lock"):  # workers of other tests would be taken for its own
        cluster = Cluster()
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def run(hub):
    """Eight checkpoints, one of them a duplicate, one damaged; the commits of the others by
    step.
    """
    commits = {
        step: hub.add(REPOSITORY, f"step{step}", checkpoint_files(step))
        for step in (0, 1, 2, 4, 5, 6)
    }
    hub.add(REPOSITORY, "step3", checkpoint_files(1))
    hub.add(REPOSITORY, "step9", {**checkpoint_files(9), "config.json": b"{"})
    return commits


def on(cluster, **more):
    return {"on": "ray", "ray_address": cluster.address, "workers": 3, **more}


def files(out):
    """Bytes of what a sweep has written, and the reasons of failures."""
    out = Path(out)
    assert not any(path.name.startswith(".") for path in out.rglob("*"))
    tables = [path for kind in ("tokens", "spectra") for path in (out / kind).glob("*")]
    paths = [*(out / "checkpoints").iterdir(), *tables, *(out / "failed").glob("*")]
    return {str(path.relative_to(out)): path.read_bytes() for path in (*paths, out / "metrics.csv")}


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def fetching(name):
    """The process of the worker that downloads a checkpoint; none while nobody does."""
    return next(
        (
            int(path.parent.name.split("-")[-2])
            for path in DOWNLOADS.glob(f".tmp-*-downloads/{name}")
        ),
        None,
    )


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for /proc")
def test_a_worker_and_a_node_are_killed_and_the_files_are_those_of_a_local_sweep(
    cluster, hub, run, options, tmp_path, capsys
):
    options |= {"token_tables": True, "spectrum": True}
    local = {**options, "out": str(tmp_path / "local")}
    assert sweep(REPOSITORY, **local) == 3
    hub.requests.clear()
    # with which three workers begin: each fetches another one meanwhile, while these last
    for step in (0, 2, 5):
        hub.fail(WEIGHTS, run[step], "stall")
    measuring = {}

    def kill():
        wait_for(lambda: all(fetching(f"step{step}") for step in (0, 2, 5)))
        raylets = {
            node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes
        }
        measuring.update({parent(fetching(f"step{step}")): step for step in (0, 2, 5)})
        doomed = next(raylet for raylet in raylets if raylet in measuring)
        os.kill(
            fetching(f"step{next(step for raylet, step in measuring.items() if raylet != doomed)}"),
            signal.SIGKILL,
        )
        cluster.remove_node(raylets[doomed], allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    status = sweep(REPOSITORY, **options, **on(cluster))
    killer.join()
    cluster.add_node(num_cpus=1)
    assert status == 3
    assert len(measuring) == 3, "each on a node of its own"
    assert files(options["out"]) == files(local["out"])
    said = capsys.readouterr().out
    assert said.count("died over step") == 2, said
    assert said.count("duplicate: step3 has the weights of step1") == 2
    downloads = hub.downloads()
    assert all(1 <= downloads[commit] <= 3 for commit in run.values()), downloads


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for /proc")
def test_stopped_and_killed_the_driver_goes_on_where_it_was(cluster, hub, run, options, tmp_path):
    local = {**options, "out": str(tmp_path / "local")}
    assert ablate(REPOSITORY, **local) == 3
    hub.fail(WEIGHTS, run[2], "stall", "stall")
    given = {**options, **on(cluster, workers=1)}
    command = [sys.executable, "-m", "embedgeo.cli", "ablate", "--model", REPOSITORY]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    folder = SweepFolder(options["out"])
    for how in (signal.SIGINT, signal.SIGKILL):
        driver = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        at_work = wait_for(lambda: fetching("step2"))
        wait_for(lambda: "step1" in folder.done())  # from here on it waits for step2
        driver.send_signal(how)
        said, errors = driver.communicate(timeout=20)
        while_at_work = time.monotonic()
        if how == signal.SIGINT:
            assert (driver.returncode, errors) == (
                130,
                "embedgeo: stopped; started again, it goes on where it was\n",
            )
            assert "raylet" not in said
            # also what workers that were killed before have left
            assert list(DOWNLOADS.iterdir()) == []
        while is_alive(at_work):
            assert time.monotonic() < while_at_work + 20
            time.sleep(0.02)
        assert folder.done() == {"step0", "step1"}
    assert sweep(REPOSITORY, **given) == 3
    assert files(options["out"]) == files(local["out"])
    assert list(DOWNLOADS.iterdir()) == []


@pytest.mark.slow
def test_what_a_cluster_cannot_give_is_refused(cluster, run, options):
    with pytest.raises(
        ValueError, match="asked for 1 CPU, 1 GPU, the most that nodes have is 1 CPU, 0 GPU"
    ):
        sweep(REPOSITORY, **options, **on(cluster, resources={"GPU": 1}))
    with pytest.raises(
        ValueError, match=r"workers must be at most the checkpoints to measure, .* got 8 for 7"
    ):
        sweep(REPOSITORY, **options, **on(cluster, workers=8))
    assert not Path(options["out"]).exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"workers": 2}, "give --on ray with them"),
        ({"resources": {"GPU": 1}}, "give --on ray with them"),
        ({"ray_address": "auto"}, "give --on ray with them"),
        ({"on": "ray", "workers": 0}, "workers must be at least 1; got 0"),
        ({"on": "ray", "resources": {"GPU": -1}}, "resources must be numbers from 0 up"),
        ({"on": "ray", "trainer": {"devices": 2}}, "one process with one device"),
    ],
)
def test_options_that_make_no_sense_are_refused(more, why):
    with pytest.raises(ValueError, match=why):
        SweepSettings(REPOSITORY, **more)


def test_without_ray_the_command_that_installs_it_is_named(options, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r"needs ray, which is not installed: pip install 'embedgeo\[ray\]'"
    ):
        sweep(str(local_run(tmp_path / "run")), **options, on="ray")


def test_an_actor_imports_nothing_that_reads_its_environment():
    code = (
        "import sys, embedgeo.sweep.actor; sys.exit('huggingface_hub' in sys.modules or 'torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cluster_that_is_not_there_is_named_at_once(options, tmp_path):
    begun = time.monotonic()
    with pytest.raises(
        OSError, match=r"ray_address must be auto, or HOST:PORT of .* got 127\.0\.0\.1:1 .*refused"
    ):
        sweep(str(local_run(tmp_path / "run")), **options, on="ray", ray_address="127.0.0.1:1")
    assert time.monotonic() - begun < 30
    assert not Path(options["out"]).exists()


def test_a_cluster_that_ray_finds_and_cannot_reach_is_not_said_to_be_asked_for(
    options, tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        ray, "init", Mock(side_effect=ConnectionError("no answer from 10.0.0.1:6379"))
    )
    with pytest.raises(
        OSError, match=r"or local for a new one; got none, and Ray has found one .*10\.0\.0\.1"
    ):
        sweep(str(local_run(tmp_path / "run")), **options, on="ray")


def planned(name, path=None):
    return Planned(
        Checkpoint(name, "model", name, parse_position(name), path=path), weights_sha256=name
    )


class StandIn:
    """A cluster whose workers answer at once: each call of an actor's method is a function of its
    arguments.
    """

    exceptions = ray.exceptions

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, method):
        if method not in self.__dict__["answers"]:
            raise AttributeError(method)
        return Mock(remote=lambda *arguments: partial(self.answers[method], *arguments))

    def put(self, value):
        return value

    def remote(self, actor):
        return Mock(options=lambda **resources: Mock(remote=lambda environment: self))

    def wait(self, references, **how):
        return references[:1], references[1:]

    def get(self, reference):
        return reference()

    def kill(self, actor):
        pass


def sweep_on(stand_in, monkeypatch, folder, plan):
    monkeypatch.setattr(on_ray, "ray", stand_in)
    sweep = Sweep(
        make_fabric({}), SweepSettings("model", on="ray"), SweepPlan(plan, plan, plan), {}, folder
    )
    with sweep.at_work():
        on_ray.RemoteWorkers(sweep).measure_all()
    return sweep


def death(message):
    raise ray.exceptions.RayError(message)


def test_a_checkpoint_over_which_three_workers_died_has_failed(tmp_path, monkeypatch, capsys):
    folder = SweepFolder(tmp_path)
    folder.open({}, {})
    begun = []

    def measure(planned, upcoming):
        begun.append((planned.name, upcoming and upcoming.name))
        record = Record(layer="embed", layer_index=0, width=2, metric="Q", value=1.0, stderr=0.0)
        return (
            actor.Answer(Measured([record]), [])
            if planned.name == "step2"
            else death("out of memory")
        )

    workers = StandIn(
        start=lambda *given: actor.Started("node", versions()), measure=measure, close=list
    )
    sweep = sweep_on(workers, monkeypatch, folder, [planned("step1"), planned("step2")])
    assert begun == [("step1", "step2")] * 3 + [("step2", None)]
    assert (
        sweep.failures == folder.failures() == {"step1": "its worker died, 3 times: out of memory"}
    )
    assert folder.done() == {"step2"}
    said = capsys.readouterr().out
    assert said.count("the worker on node died over step1: it is measured again") == 2


def test_workers_that_die_before_they_are_ready_end_the_sweep_only_where_none_starts(
    tmp_path, monkeypatch
):
    folder = SweepFolder(tmp_path)
    folder.open({}, {})
    # nodes come and go, over days
    are_ready = [False, False, True, False, False, True, False, False, False]

    def start(*given):
        return actor.Started("node", versions()) if are_ready.pop(0) else death("no room")

    workers = StandIn(start=start, measure=lambda *given: death("no power"), close=list)
    with pytest.raises(OSError, match="workers must start on the cluster; 3 died: no room"):
        sweep_on(workers, monkeypatch, folder, [planned("step1")])
    assert not are_ready


def actor_death(message):
    error = ray.exceptions.ActorDiedError()
    error.error_msg = message
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            actor_death(
                "The actor died.\n\tclass_name: RayWorker\n\tactor_id: 401f\nThe actor is dead "
                "because its worker "
                "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
                "unexpectedly exits. Some "
                "common causes include: (1) memory. If the process was killed by the kernel OOM "
                "killer, consider more."
            ),
            "Worker unexpectedly exits. Some common causes include: (1) memory.",
        ),
        (
            actor_death("The actor died.\n\tip: 1\nIts node has died.\n\tthe raylet is gone"),
            "Its node has died.",
        ),
        (actor_death(""), "ActorDiedError"),
        (
            ray.exceptions.OutOfMemoryError(
                "1 worker was killed: low on memory.\nOOM kill reason: 4777951232B\n"
            ),
            "1 worker was killed: low on memory.",
        ),
    ],
)
def test_of_what_ray_says_about_a_death_one_line_is_told(tmp_path, monkeypatch, error, cause):
    def measure(*given):
        raise error

    workers = StandIn(
        start=lambda *given: actor.Started("node", versions()), measure=measure, close=list
    )
    folder = SweepFolder(tmp_path)
    folder.open({}, {})
    sweep = sweep_on(workers, monkeypatch, folder, [planned("step1")])
    assert sweep.failures == {"step1": f"its worker died, 3 times: {cause}"}


@pytest.mark.parametrize(
    ("torch", "error", "message"),
    [
        ("1.0", "", r"node has torch 1\.0, this machine"),
        ("+cu999", "", "the driver goes on"),
        ("+cu999", "no such device", "on node: no such device"),
    ],
)
def test_a_worker_with_other_packages_or_one_that_cannot_start_says_where(
    tmp_path, monkeypatch, torch, error, message
):
    def measure(*given):
        raise KeyboardInterrupt("the driver goes on")

    theirs = torch if torch == "1.0" else versions()["torch"].partition("+")[0] + torch
    workers = StandIn(
        start=lambda *given: actor.Started("node", {**versions(), "torch": theirs}, error),
        measure=measure,
        close=list,
    )
    folder = SweepFolder(tmp_path)
    folder.open({}, {})
    with pytest.raises((ValueError, KeyboardInterrupt), match=message):
        sweep_on(workers, monkeypatch, folder, [planned("step1")])


def test_a_worker_without_a_local_checkpoint_says_where(tmp_path):
    answer = actor.RayWorker({}).measure(planned("step1", tmp_path / "step1"), None)
    assert "must be on every node of the cluster" in answer.result
    assert str(tmp_path / "step1") in answer.result


def test_rays_launcher_accepts_the_cluster():
    config = yaml.safe_load((ROOT / "examples" / "ray-cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    assert config["head_node_type"] in config["available_node_types"]
