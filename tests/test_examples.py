import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent


def run_example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=True,
    )


def test_pretrain_runs_with_the_monitor_that_its_configuration_adds(tmp_path: Path) -> None:
    text = tmp_path / "my.txt"
    text.write_text("\n\n".join(f"Paragraph {i} says that {i} is followed by {i + 1}." for i in range(400)))
    small = {
        "--data.files": f"[{text}]",
        "--data.vocab_size": 300,
        "--data.seq_len": 32,
        "--model.vocab_size": 300,
        "--model.hidden_size": 32,
        "--model.num_layers": 4,
        "--model.num_heads": 2,
        "--trainer.max_steps": 4,
        "--trainer.accelerator": "cpu",
        "--trainer.logger.save_dir": tmp_path,
    }
    done = run_example(
        "pretrain.py", "fit", "--config", ROOT / "configs" / "pretrain.yaml", *(x for kv in small.items() for x in kv)
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("GeometryMonitor: ")]
    assert ["written to" in line for line in said] == [True, False]
    assert said[1].endswith(f"report {tmp_path / 'pretrain' / 'version_0'}")
    events = EventAccumulator(str(tmp_path / "pretrain" / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    layers = ("embed", "block.00", "block.03", "mean(last4)")
    assert {f"geometry.anisotropy/{layer}" for layer in layers} <= set(events.Tags()["scalars"])
    assert [scalar.step for scalar in events.Scalars("geometry.anisotropy/embed")] == [0, 1, 2, 4]
    assert sorted(pd.read_parquet(tmp_path / "pretrain" / "version_0" / "history.parquet")["step"].unique()) == [
        0,
        1,
        2,
        4,
    ]


def test_observe_prints_a_table_of_layers() -> None:
    printed = run_example("observe.py").stdout
    for word in ("embed", "block.03", "final_norm", "V_W_over_V_unbiased", "mean(last4)", "isoscore"):
        assert word in printed
