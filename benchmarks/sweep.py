"""What a sweep costs beside loading each checkpoint and running it over the same batches: seconds
and peak memory.

python benchmarks/sweep.py                                # some minutes
EMBEDGEO_SWEEP_TOKENS=4096 python benchmarks/sweep.py     # of 4,096 tokens instead of 65,536
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from embedgeo.checkpoints import loading
from embedgeo.checkpoints.loading import load_config
from embedgeo.checkpoints.sources import list_checkpoints
from embedgeo.geometry import Geometry
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep import SweepSettings, sweep
from embedgeo.sweep.progress import Sweep
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer

NUM_TOKENS = int(os.environ.get("EMBEDGEO_SWEEP_TOKENS", "65536"))
SEQ_LEN, BATCH_SIZE = 512, 8
SIZE = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
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


def clocks() -> tuple[float, float]:
    """Wall and processor seconds: the latter say more on a machine that others use, too."""
    return time.perf_counter(), time.process_time()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(folder: Path, steps: list[int], **forward: int) -> dict[str, Any]:
    """Load and run checkpoints; nothing is measured."""
    tokenizer = loading.load_tokenizer(folder / "step0")
    documents = (tokenizer(document)["input_ids"] for document in builtin_corpus())
    tokens = cut_sequences(documents, SEQ_LEN, NUM_TOKENS)
    seconds = []
    for checkpoint in (
        checkpoint for checkpoint in list_checkpoints(str(folder)) if checkpoint.step in steps
    ):
        assert checkpoint.path is not None
        contents = checkpoint.read_contents()
        start = clocks()
        loaded = loading.load_model(checkpoint.path, contents, dtype=torch.float32)
        with torch.inference_mode():
            for batch in tokens.split(BATCH_SIZE):
                loaded(input_ids=batch, **forward)
        del loaded
        seconds.append([after - before for before, after in zip(start, clocks(), strict=True)])
    return {"seconds": seconds, "peak": peak_bytes()}


def without_logits(folder: Path, steps: list[int]) -> dict[str, Any]:
    """The same, but for the logits: of the last position only."""
    return plain(folder, steps, logits_to_keep=1)


def swept(folder: Path, steps: list[int]) -> dict[str, Any]:
    """The same checkpoints in a sweep: seconds from the start of each to its Parquet file."""
    seconds, begun = [], []
    known, write = Sweep.known, SweepFolder.write

    def begin(self: Sweep, *arguments: Any) -> Any:
        begun.append(clocks())
        return known(self, *arguments)

    def end(self: SweepFolder, *arguments: Any) -> None:
        write(self, *arguments)
        seconds.append([after - before for before, after in zip(begun[-1], clocks(), strict=True)])

    Sweep.known, SweepFolder.write = begin, end  # type: ignore[method-assign]
    try:
        sweep(
            SweepSettings(
                str(folder),
                steps=steps,
                num_tokens=NUM_TOKENS,
                seq_len=SEQ_LEN,
                batch_size=BATCH_SIZE,
                out=str(folder / f"out-{'-'.join(map(str, steps))}"),
                device="cpu",
            )
        )
    finally:
        Sweep.known, SweepFolder.write = known, write  # type: ignore[method-assign]
    return {"seconds": seconds, "peak": peak_bytes()}


def interleaved(folder: Path, steps: list[int]) -> dict[str, Any]:
    """Each checkpoint both ways, one after the other; the first one does not count."""
    plain(folder, steps[:1]), swept(folder, steps[:1])
    pairs = [
        [plain(folder, [step])["seconds"][0], swept(folder, [step])["seconds"][0]]
        for step in steps[1:]
    ]
    return {"pairs": pairs}


def state_bytes(folder: Path, steps: list[int]) -> dict[str, Any]:
    """Bytes of the metrics' states of one checkpoint, over the same batches."""
    model = loading.empty_model(load_config(folder / f"step{steps[0]}"))
    geometry = Geometry(model.to_empty(device="cpu"))
    tokenizer = loading.load_tokenizer(folder / "step0")
    documents = (tokenizer(document)["input_ids"] for document in builtin_corpus())
    tokens = cut_sequences(documents, SEQ_LEN, NUM_TOKENS).flatten()
    metrics = geometry.make_metrics(SIZE["hidden_size"])
    for metric in metrics:
        for ids in tokens.split(BATCH_SIZE * SEQ_LEN):
            metric.update(torch.randn(len(ids), SIZE["hidden_size"]), token_ids=ids)
    one = sum(
        t.nbytes
        for metric in metrics
        for t in metric.metric_state.values()
        if isinstance(t, torch.Tensor)
    )
    return {"states": one * len(geometry.layers)}


def in_a_process(what: str, folder: Path, num_checkpoints: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--only",
        what,
        "--folder",
        folder,
        "--checkpoints",
        str(num_checkpoints),
    ]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line has it
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


SIDES = {side.__name__: side for side in (plain, without_logits, swept, interleaved, state_bytes)}


def say_seconds(pairs: list[list[list[float]]]) -> None:
    for i, clock in enumerate(("wall", "processor")):
        a, b = (statistics.median(pair[side][i] for pair in pairs) for side in (0, 1))
        print(
            f"a checkpoint, {clock} time: {a:.1f} s loaded and run, {b:.1f} s in a sweep: "
            f"{b / a:.2f}"
        )


def say_memory(folder: Path) -> None:
    states = in_a_process("state_bytes", folder, 1)["states"]
    peak = in_a_process("swept", folder, 2)["peak"]
    print(
        f"peak memory of a sweep: {peak / 1e6:.0f} MB; states of one checkpoint: "
        f"{states / 1e6:.0f} MB"
    )
    for side, words in (
        ("plain", "loaded and run"),
        ("without_logits", "loaded and run, without the logits"),
    ):
        before = in_a_process(side, folder, 2)["peak"]
        more = peak - before
        print(
            f"  {words}: {before / 1e6:.0f} MB; the sweep: {more / 1e6:+.0f} MB, "
            f"{more / states:+.2f} times the states"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoints", type=int, default=4, help="at least 2: the first one does not count"
    )
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        print(
            json.dumps(SIDES[arguments.only](arguments.folder, list(range(arguments.checkpoints))))
        )
        return
    if arguments.checkpoints < 2:
        parser.error("--checkpoints must be 2 or more: the first one does not count")
    with tempfile.TemporaryDirectory() as name:
        make_run(Path(name), arguments.checkpoints)
        say_seconds(in_a_process("interleaved", Path(name), arguments.checkpoints)["pairs"])
        say_memory(Path(name))


if __name__ == "__main__":
    main()
