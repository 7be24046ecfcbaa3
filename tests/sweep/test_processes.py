"""A sweep as processes: killed at any moment, several machines at once, several ranks."""

import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import load_sample
from tests.sweep.tiny import REPOSITORY, checkpoint_files, local_run, write_files

ROOT = Path(__file__).parents[2]
_TABLES = ("tokens", "spectra")
NUM_KILLS = int(os.environ.get("EMBEDGEO_KILLS", "3"))  # `make soak` asks for more


@pytest.fixture
def environment(hub, tmp_path):
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }


def run(command, environment, folder, **more):
    return subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **more,
    )


def forked(environment, *runs, parallel=False):
    job = json.dumps({"runs": list(runs), "parallel": parallel})
    command = [sys.executable, "-m", "tests.sweep.forked"]
    ended = run(command, environment, ROOT, input=job)
    assert ended.returncode == 0, ended.stderr
    statuses, seconds = json.loads(ended.stdout.splitlines()[-1])
    return statuses, ended.stdout + ended.stderr, seconds


def command(model, options, **more):
    given = {**options, **more}
    return ["sweep", "--model", model, *(f"--{k.replace('__', '.')}={v}" for k, v in given.items())]


def ablation(options):
    return ["ablate", *command(REPOSITORY, options)[1:]]


def results(out):
    """Bytes of the Parquet files and of metrics.csv; TensorBoard's values, of which there is one a
    tag and step.
    """
    out = Path(out)
    (run,) = (path for path in (out / "tensorboard").iterdir() if any(path.iterdir()))
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    values = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert max(Counter(steps).values()) == 1, tag
        values[tag] = [
            (event.step, np.float64(event.value).tobytes()) for event in events.Scalars(tag)
        ]
    tables = [
        path for name in ("checkpoints", *_TABLES, "samples") for path in (out / name).glob("*")
    ]
    files = {
        str(p.relative_to(out)): p.read_bytes()
        for p in (*tables, out / "metrics.csv", out / "manifest.json")
    }
    assert not any(p.name.startswith(".") for p in out.rglob("*")), "temporary files are left"
    return files, values


@pytest.mark.slow
def test_killed_at_random_moments_a_sweep_ends_with_the_same_files(
    hub, options, environment, tmp_path
):
    for step in range(4 if NUM_KILLS < 10 else 2 * NUM_KILLS):
        files = checkpoint_files(1 if step == 2 else step, with_tokenizer=step == 0)
        hub.add(REPOSITORY, f"step{step}", files)
    options |= dict.fromkeys(("token_tables", "save_samples", "spectrum"), "true")
    undisturbed = {**options, "out": str(tmp_path / "undisturbed")}
    (status,), _, (seconds,) = forked(environment, {"args": ablation(undisturbed)})
    assert status == 0
    longest = seconds * min(1, 3 / NUM_KILLS)
    seed = random.SystemRandom().randrange(10**6)
    moments = [random.Random(seed + i).uniform(0, longest) for i in range(NUM_KILLS)]
    args = ablation(options)
    statuses, said, _ = forked(
        environment, *({"args": args, "kill_after": t} for t in moments), {"args": args}
    )
    assert statuses[-1] == 0, (seed, said)
    assert set(statuses) <= {0, -9}, (seed, said)
    print(f"killed {statuses.count(-9)} times, seed {seed}")
    assert results(options["out"]) == results(undisturbed["out"]), seed
    assert not Path(environment["HF_HUB_CACHE"]).exists(), seed


@pytest.mark.slow
def test_machines_share_a_folder_by_shards_or_as_they_come(hub, options, environment, tmp_path):
    commits = [hub.add(REPOSITORY, f"step{step}", checkpoint_files(step)) for step in range(4)]
    hub.add(REPOSITORY, "step9", checkpoint_files(3))  # a duplicate
    alone, shards, free = ({**options, "out": str(tmp_path / name)} for name in "abc")
    pairs = [
        [command(REPOSITORY, shards, shard=f"{i}/2") for i in range(2)],
        [command(REPOSITORY, free)] * 2,
        [command(REPOSITORY, alone)],
    ]
    for runs in pairs:
        hub.requests.clear()
        each = [{"args": args} for args in runs]
        statuses, said, _ = forked(environment, *each, parallel=True)
        assert statuses == [0] * len(runs), said
        assert hub.downloads() == dict.fromkeys(commits, 1), said
    assert results(shards["out"]) == results(free["out"]) == results(alone["out"])


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(options, environment, tmp_path):
    trained = local_run(tmp_path / "run", steps=(1, 8))
    write_files(trained / "step3", {"config.json": b"{"})  # fails on both ranks, in step
    write_files(trained / "step9", checkpoint_files(8))
    options |= dict.fromkeys(("token_tables", "save_samples", "spectrum"), "true")
    folders = [tmp_path / name for name in ("one", "two")]
    one, two = (command(str(trained), {**options, "out": out}, jackknife=4) for out in folders)
    two += [f"--trainer.{each}" for each in ("devices=2", "strategy=ddp", "accelerator=cpu")]
    ended = run([sys.executable, "-m", "embedgeo.cli", *two], environment, tmp_path)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert ended.stdout.count("checkpoints done") == 1
    assert forked(environment, {"args": one})[0] == [3]
    a, b = (pd.read_csv(out / "metrics.csv") for out in folders)
    keys = ["revision", "layer", "metric"]
    pd.testing.assert_frame_equal(a[keys], b[keys])
    of_distances = a["metric"].str.contains("dimension")  # these are exact to 1e-6
    for rows, rtol in ((of_distances, 1e-6), (~of_distances, 1e-9)):
        for column in ("value", "stderr"):
            np.testing.assert_allclose(a[column][rows], b[column][rows], rtol=rtol, atol=1e-12)
    for step in (1, 8, 9):
        for tables in _TABLES:
            a, b = (pd.read_parquet(out / tables / f"step{step}.parquet") for out in folders)
            pd.testing.assert_frame_equal(a, b, rtol=1e-9, atol=1e-12)
        a, b = (load_sample(out, f"step{step}").layers for out in folders)
        for layer in a:
            assert a[layer].row_numbers.sort().values.tolist() == [*range(64)]  # all of them
            drawn = (each[layer].rows[each[layer].row_numbers.argsort()] for each in (a, b))
            torch.testing.assert_close(*drawn, rtol=0, atol=0)
            torch.testing.assert_close(
                a[layer].eigenvalues, b[layer].eigenvalues, rtol=1e-6, atol=1e-12
            )


@pytest.mark.slow
def test_each_node_downloads_for_itself(hub, options, environment, tmp_path):
    commits = [hub.add(REPOSITORY, f"step{step}", checkpoint_files(step)) for step in (1, 2)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    two = {"trainer__num_nodes": 2, "trainer__strategy": "ddp", "trainer__accelerator": "cpu"}
    args = [sys.executable, "-m", "embedgeo.cli", *command(REPOSITORY, options, **two)]
    nodes = [
        {**environment, **where, "NODE_RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda node: run(args, node, tmp_path), nodes))
    assert [node.returncode for node in ended] == [0, 0], [node.stderr for node in ended]
    assert hub.downloads() == dict.fromkeys(commits, 2)
    results(options["out"])  # no download is left
