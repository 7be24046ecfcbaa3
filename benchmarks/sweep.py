"""What a sweep costs beside loading each checkpoint and running it over the same batches: seconds and peak memory.

make bench
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from embedgeo.checkpoints import list_checkpoints, loading
from embedgeo.geometry import Geometry
from embedgeo.sweep import sweep
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer

NUM_TOKENS, SEQ_LEN, BATCH_SIZE = 65_536, 512, 8
SIZE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
VOCABULARY = 50_304


def make_run(folder: Path, num_checkpoints: int) -> None:
    """Checkpoints of Pythia-70m's shape, with a tokenizer."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = train_tokenizer("\n".join(builtin_corpus()), 8192)
    config = GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **SIZE)
    for step in range(num_checkpoints):
        torch.manual_seed(step)
        GPTNeoXForCausalLM(config).save_pretrained(folder / f"step{step}")
        tokenizer.save_pretrained(folder / f"step{step}")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(folder: Path) -> dict[str, object]:
    """Load and run each checkpoint; nothing is measured."""
    checkpoints = list_checkpoints(str(folder))
    tokenizer = loading.load_tokenizer(folder / "step0")
    documents = (tokenizer(document)["input_ids"] for document in builtin_corpus())
    tokens = cut_sequences(documents, SEQ_LEN, NUM_TOKENS)
    seconds = []
    for checkpoint in checkpoints:
        assert checkpoint.path is not None
        start = time.perf_counter()
        loaded = loading.load_model(checkpoint.path, checkpoint.contents(), dtype=torch.float32)
        with torch.inference_mode():
            for batch in tokens.split(BATCH_SIZE):
                loaded.model(input_ids=batch)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "peak": peak_bytes()}


def swept(folder: Path) -> dict[str, object]:
    """The sweep: seconds between one Parquet file and the next."""
    out = folder / "out"
    started = time.time()
    sweep(
        str(folder),
        num_tokens=NUM_TOKENS,
        seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        out=str(out),
        trainer={"accelerator": "cpu"},
    )
    times = [started, *sorted(path.stat().st_mtime for path in (out / "checkpoints").iterdir())]
    return {"seconds": [b - a for a, b in itertools.pairwise(times)], "peak": peak_bytes()}


def state_bytes(folder: Path) -> dict[str, object]:
    """Bytes of the metrics' states of one checkpoint, over the same batches."""
    model = loading.empty_model(loading.load_config(folder / "step0"))
    geometry = Geometry(model.to_empty(device="cpu"))
    tokenizer = loading.load_tokenizer(folder / "step0")
    documents = (tokenizer(document)["input_ids"] for document in builtin_corpus())
    tokens = cut_sequences(documents, SEQ_LEN, NUM_TOKENS).flatten()
    metrics = geometry._make_metrics(SIZE["hidden_size"])
    for metric in metrics:
        for ids in tokens.split(BATCH_SIZE * SEQ_LEN):
            metric.update(torch.randn(len(ids), SIZE["hidden_size"]), token_ids=ids)
    one = sum(t.nbytes for metric in metrics for t in metric.metric_state.values() if isinstance(t, torch.Tensor))
    return {"states": one * len(geometry.layers)}


def in_a_process(what: str, folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, __file__, "--only", what, "--folder", folder], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--only", choices=["plain", "swept", "state_bytes"])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        print(
            json.dumps({"plain": plain, "swept": swept, "state_bytes": state_bytes}[arguments.only](arguments.folder))
        )
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder, arguments.checkpoints)
        before, after = in_a_process("plain", folder), in_a_process("swept", folder)
        states = in_a_process("state_bytes", folder)["states"]
    seconds = [statistics.median(each["seconds"][1:]) for each in (before, after)]  # the first one warms up
    print(
        f"a checkpoint: {seconds[0]:.1f} s loaded and run, {seconds[1]:.1f} s in a sweep: {seconds[1] / seconds[0]:.2f}"
    )
    more = after["peak"] - before["peak"]
    print(f"peak memory: {before['peak'] / 1e6:.0f} MB loaded and run, {after['peak'] / 1e6:.0f} MB in a sweep:")
    print(f"  {more / 1e6:.0f} MB more, {more / states:.2f} times the {states / 1e6:.0f} MB of one checkpoint's states")


if __name__ == "__main__":
    main()
