"""Peak memory of a large checkpoint: loaded, run, and in a sweep, each in a process of its own.

A GPT-NeoX of 254 million weights, in shards of at most 200 MB of safetensors.

python benchmarks/large.py   # some minutes, 2 GB of disk
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import embedgeo
from embedgeo.sweep import SweepSettings, sweep
from embedgeo.text import builtin_corpus, train_tokenizer

VOCABULARY, BATCH_SIZE, SEQ_LEN, NUM_TOKENS = 50_304, 2, 512, 2048
SIZE = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def make(folder: Path) -> None:
    """The same model in float32 and in bfloat16, with a tokenizer."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **SIZE)
    )
    tokenizer = train_tokenizer("\n".join(builtin_corpus()), 8192)
    for dtype in (torch.float32, torch.bfloat16):
        path = folder / str(dtype).removeprefix("torch.") / "step1"
        model.to(dtype).save_pretrained(path, max_shard_size="200MB")
        tokenizer.save_pretrained(path)


def imported(folder: Path) -> None:
    """Nothing but the imports."""
    from transformers import GPTNeoXForCausalLM

    assert GPTNeoXForCausalLM


def run(model: torch.nn.Module) -> None:
    with torch.inference_mode():
        model(torch.randint(VOCABULARY, (BATCH_SIZE, SEQ_LEN)), use_cache=False, logits_to_keep=1)


def plain(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    run(AutoModelForCausalLM.from_pretrained(folder / "float32" / "step1", dtype=torch.float32))


def loaded(folder: Path) -> None:
    (checkpoint,) = embedgeo.iter_checkpoints(str(folder / "float32"))
    run(checkpoint.load())


def swept(folder: Path, stored: str = "float32", **options: Any) -> None:
    with tempfile.TemporaryDirectory() as out:
        size: dict[str, Any] = {
            "num_tokens": NUM_TOKENS,
            "seq_len": SEQ_LEN,
            "batch_size": BATCH_SIZE,
            "out": out,
        }
        settings = SweepSettings(str(folder / stored), **size, device="cpu", **options)
        assert sweep(settings) == 0


LAST = {"layers": "final_norm"}
SIDES = {
    "the imports alone": imported,
    "from_pretrained, and a forward pass": plain,
    "loaded by embedgeo, and a forward pass": loaded,
    "a sweep, measured at all layers": swept,
    "a sweep, measured at final_norm": lambda folder: swept(folder, **LAST),
    "the same, --dtype bfloat16": lambda folder: swept(folder, dtype="bfloat16", **LAST),
    "the same, in float32 of a checkpoint in bfloat16": lambda folder: swept(
        folder, "bfloat16", **LAST
    ),
    'the same, --device-map \'{"": "disk"}\'': lambda folder: swept(
        folder, device_map={"": "disk"}, **LAST
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.only == "make":
        make(arguments.folder)
    elif arguments.only:
        SIDES[arguments.only](arguments.folder)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder))


def measure(folder: Path) -> None:
    def in_a_process(what: str) -> str:
        command = [sys.executable, __file__, "--only", what, "--folder", str(folder)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    in_a_process("make")
    size = sum(file.stat().st_size for file in (folder / "float32" / "step1").glob("*.safetensors"))
    base = 0
    print(f"the weights in float32: {size / 1e6:.0f} MB")
    for side in SIDES:
        peak = int(in_a_process(side).splitlines()[-1])
        base = base or peak
        print(f"{side}: {peak / 1e6:.0f} MB, {(peak - base) / size:+.2f} times the weights")


if __name__ == "__main__":
    main()
