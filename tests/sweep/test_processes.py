"""A sweep as processes: killed at any moment, several at once."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from tests.files import ROOT, events_of
from tests.sweep.forked import ANSWER
from tests.sweep.sweeping import command
from tests.sweep.tiny import REPOSITORY, checkpoint_files

NUM_KILLS = int(os.environ.get("EMBEDGEO_KILLS", "2"))  # `make soak` asks for more


@pytest.fixture
def forked(hub, tmp_path):
    """Runs commands at the same time: their exit statuses, and what they printed."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sweep.forked"],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def run(*runs):
        process.stdin.write(json.dumps(runs) + "\n")
        process.stdin.flush()
        said = ""
        for line in process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER)), said
            said += line
        raise AssertionError(said)

    with process:
        yield run
        process.stdin.close()


def results(out):
    """Bytes of the Parquet files and of metrics.csv; TensorBoard's values, of which there is one a
    tag and step.
    """
    (run,) = (path for path in (out / "tensorboard").iterdir() if any(path.iterdir()))
    events = events_of(run)
    values = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert max(Counter(steps).values()) == 1, tag
        values[tag] = [
            (event.step, np.float64(event.value).tobytes()) for event in events.Scalars(tag)
        ]
    tables = [
        path for name in ("checkpoints", "tokens", "samples") for path in (out / name).glob("*")
    ]
    files = {
        str(p.relative_to(out)): p.read_bytes()
        for p in (*tables, out / "metrics.csv", out / "manifest.json")
    }
    assert not any(p.name.startswith(".") for p in out.rglob("*")), "temporary files are left"
    return files, values


@pytest.mark.slow
def test_killed_at_random_moments_or_shared_by_processes_a_sweep_ends_with_the_same_files(
    hub, options, forked, tmp_path
):
    commits = []
    for step in range(3 if NUM_KILLS < 10 else 2 * NUM_KILLS):
        files = checkpoint_files(1 if step == 2 else step, with_tokenizer=step == 0)
        commits.append(hub.add(REPOSITORY, f"step{step}", files))
    options |= dict.fromkeys(("token_tables", "save_samples", "spectrum"), "true")
    alone, killed, shared = ({**options, "out": tmp_path / name} for name in "abc")
    begun = time.monotonic()
    statuses, said = forked({"args": command(REPOSITORY, alone)})
    longest = (time.monotonic() - begun) * min(1, 3 / NUM_KILLS)
    assert statuses == [0], said
    seed = random.SystemRandom().randrange(10**6)
    args = command(REPOSITORY, killed)
    ended = []
    for i in range(NUM_KILLS):
        moment = random.Random(seed + i).uniform(0, longest)
        statuses, said = forked({"args": args, "kill_after": moment})
        assert set(statuses) <= {0, -9}, (seed, said)
        ended += statuses
    statuses, said = forked({"args": args})
    assert statuses == [0], (seed, said)
    print(f"killed {ended.count(-9)} times, seed {seed}")
    assert results(killed["out"]) == results(alone["out"]), seed
    hub.requests.clear()
    statuses, said = forked(*[{"args": command(REPOSITORY, shared)}] * 2)
    assert statuses == [0, 0], said
    del commits[2]  # a duplicate
    assert hub.downloads() == dict.fromkeys(commits, 1), said
    assert results(shared["out"]) == results(alone["out"])
    assert not (tmp_path / "cache").exists(), seed
