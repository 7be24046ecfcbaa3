"""A sweep as processes: killed at any moment, several at once."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.sweep.tiny import REPOSITORY, checkpoint_files

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


def command(model, options):
    return [
        "sweep",
        "--model",
        model,
        *(f"--{k.replace('_', '-')}={v}" for k, v in options.items()),
    ]


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
    for step in range(3 if NUM_KILLS < 10 else 2 * NUM_KILLS):
        files = checkpoint_files(1 if step == 2 else step, with_tokenizer=step == 0)
        hub.add(REPOSITORY, f"step{step}", files)
    options |= dict.fromkeys(("token_tables", "save_samples", "spectrum"), "true")
    undisturbed = {**options, "out": str(tmp_path / "undisturbed")}
    (status,), _, (seconds,) = forked(environment, {"args": command(REPOSITORY, undisturbed)})
    assert status == 0
    longest = seconds * min(1, 3 / NUM_KILLS)
    seed = random.SystemRandom().randrange(10**6)
    moments = [random.Random(seed + i).uniform(0, longest) for i in range(NUM_KILLS)]
    args = command(REPOSITORY, options)
    statuses, said, _ = forked(
        environment, *({"args": args, "kill_after": t} for t in moments), {"args": args}
    )
    assert statuses[-1] == 0, (seed, said)
    assert set(statuses) <= {0, -9}, (seed, said)
    print(f"killed {statuses.count(-9)} times, seed {seed}")
    assert results(options["out"]) == results(undisturbed["out"]), seed
    assert not Path(environment["HF_HUB_CACHE"]).exists(), seed


@pytest.mark.slow
def test_processes_share_a_folder(hub, options, environment, tmp_path):
    commits = [hub.add(REPOSITORY, f"step{step}", checkpoint_files(step)) for step in range(3)]
    hub.add(REPOSITORY, "step9", checkpoint_files(2))  # a duplicate
    alone, shared = ({**options, "out": str(tmp_path / name)} for name in "ab")
    for out, num_processes in ((alone, 1), (shared, 2)):
        hub.requests.clear()
        each = [{"args": command(REPOSITORY, out)}] * num_processes
        statuses, said, _ = forked(environment, *each, parallel=True)
        assert statuses == [0] * num_processes, said
        assert hub.downloads() == dict.fromkeys(commits, 1), said
    assert results(shared["out"]) == results(alone["out"])
