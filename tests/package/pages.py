"""Pages of the documentation from top to bottom, each in a folder of its own that holds nothing:
`smoke.py` runs it.

The package is the installed one: of the sources there are the pages and the tests alone. Python
blocks find the names that `tests/docs/blocks.py` gives them, and commands the files that they name;
models of the Hub are tiny ones of a Hub on this machine. Of a page whose Python blocks need other
packages the commands are run alone. What stands in a block and takes a cluster, a server or an
installer is named, and not run.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from unittest import mock

from tests.sweep.hub_server import Hub

HUB = Hub()
# read by imports below
os.environ.update(HF_ENDPOINT=HUB.url, HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from embedgeo.cli import main as embedgeo_command
from embedgeo.glossary import FOREIGN
from embedgeo.text import builtin_corpus, train_tokenizer
from tests.docs import blocks
from tests.report.synthetic import make_sweep

STEPS = {
    "EleutherAI/pythia-70m": (0, 1, 512),
    "EleutherAI/pythia-2.8b": (0, 1),
    "EleutherAI/pythia-160m": (0, 1),
}
FINAL = ("google-bert/bert-base-uncased", "openai-community/gpt2")
SHORTER = MappingProxyType(
    {
        "embedgeo demo": "--max-steps 4 --num-layers 2 --hidden-size 32 --vocab-size 512",
        "embedgeo sweep": "--num-tokens 2048 --seq-len 64",
        "python pretrain.py": "--trainer.max_steps 2 --model.hidden_size 32 "
        "--model.num_layers 4 --model.num_heads 2",
        "python plain_loop.py": "--max-steps 4",
        "python accelerate_loop.py": "--max-steps 4",
    }
)
"""Options that are added to commands which otherwise take minutes, or a published data set."""

NOT_HERE = re.compile(
    r"(\w+=\S+ )*((pip|make|sbatch|accelerate|ray|python (torchtitan_llama.py|-m research))\b"
    r"|embedgeo sweep .*(--on ray|hf://|--device-map))|CUDA_VISIBLE_DEVICES="
)
"""Commands that take a cluster, a launcher, GPUs, an installer, a clone or a published data set.
"""

SWEEPS = ("runs/demo/sweep", "runs/a", "runs/b", "runs/seed0", "runs/seed1", "runs/seed2")


def made_models(folder):
    """Repositories of the Hub, and the same model as a folder with two steps: a GPT-NeoX of 2
    blocks, 16 wide.
    """
    tokenizer = train_tokenizer("\n\n".join(builtin_corpus()[:20]), 300)
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    size |= {"intermediate_size": 32, "max_position_embeddings": 512}

    def files(step):
        torch.manual_seed(step)
        place = folder / f"step{step}"
        model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=len(tokenizer), **size))
        for saved in (model, tokenizer):
            saved.save_pretrained(place)
        return {path.name: path.read_bytes() for path in place.iterdir()}

    for repository, steps in STEPS.items():
        for step in steps:
            HUB.add(repository, f"step{step}", files(step))
        HUB.add(repository, "main", files(steps[-1]))
    for seed, repository in enumerate(FINAL):
        HUB.add(repository, "main", files(seed))
    return folder


def give(page, models):
    """Put what the page's commands name, and no command of it makes, into the current folder."""
    text = blocks.text(page)
    makes_demo = re.search("^embedgeo demo", text, re.MULTILINE)
    for name in SWEEPS:
        if re.search(rf"\b{name}\b", text) and not (makes_demo and name.startswith("runs/demo")):
            make_sweep(Path(name), metrics=("M_over_Q", "anisotropy"))
    for name in ("runs/mine", "runs/large"):
        if re.search(rf"--model {name}\b", text):
            shutil.copytree(models, name)
    corpus = builtin_corpus()[20:40]
    Path("heldout.txt").write_text("\n\n".join(corpus), encoding="utf-8")
    with gzip.open("more.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": part}) + "\n" for part in corpus)


def run_command(page, line):
    """Run a line of a block as it stands, but for what makes it shorter, and the folder of all
    machines.
    """
    if NOT_HERE.match(line):
        print(f"  not run: {line}", flush=True)
        return
    started = time.monotonic()
    added = next((options for start, options in SHORTER.items() if line.startswith(start)), "")
    words = shlex.split(line.replace(" /shared/", " shared/"), comments=True) + shlex.split(added)
    match words[0]:
        case "embedgeo":
            failed = embedgeo_command(words[1:])
        case "python":
            failed = subprocess.run(
                [sys.executable, *words[1:]], stdin=subprocess.DEVNULL, check=False
            ).returncode
        case "tensorboard":
            failed = not any(
                Path(words[words.index("--logdir") + 1]).rglob("events.out.tfevents.*")
            )
        case _:
            failed = True
    if failed:
        sys.exit(f"{page}: {line}: status {failed}")
    print(f"  {time.monotonic() - started:4.1f} s  {shlex.join(words)}", flush=True)


def run_page(page, results):
    """Run the blocks of a page in order: Python in one namespace, and each line of a shell's."""
    names = blocks.names(results)
    languages = ("sh",) if page in blocks.INTEGRATIONS else ("python", "sh")
    with mock.patch.dict(FOREIGN.terms):
        for block in blocks.blocks(page, *languages):
            if block.language == "python":
                blocks.run_block(page, block, names)
                continue
            for line in re.sub(r"\\\n", " ", block.code).splitlines():
                if line.strip():
                    run_command(page, line.strip())


def main(folder, pages):
    models = made_models(folder / "models")
    results = blocks.sweep_folder(folder / "results")
    times = {}
    for page in pages:
        place = folder / "pages" / page.replace("/", "--")
        place.mkdir(parents=True)
        os.chdir(place)
        give(page, models)
        started = time.monotonic()
        run_page(page, results)
        times[page] = time.monotonic() - started
    print("\n".join(f"{seconds:6.1f} s  {page}" for page, seconds in times.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
