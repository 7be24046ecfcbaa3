"""A small model that is really trained: the weights of its steps, as the files of checkpoints."""

import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests.sweep.tiny import tokenizer_files

LOG_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
EVEN_STEPS = tuple(range(72, 168, 8))
STEPS = (*LOG_STEPS, *EVEN_STEPS)  # 20 of them, spaced as those of published runs


def _model(seed):
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=300, max_position_embeddings=64, **sizes))


@cache
def trained(seed=0, optimizer="adamw", lr=1e-3, steps=STEPS):
    """Weights by step, of a model that learns to continue sequences which repeat themselves."""
    with torch.random.fork_rng():
        model = _model(seed)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        stepper = kind(model.parameters(), lr)
        rows = torch.randint(300, (64, 8)).repeat(1, 3)
        found = {}
        for step in range(max(steps) + 1):
            if step in steps:
                found[step] = {name: value.clone() for name, value in model.state_dict().items()}
            for group in stepper.param_groups:
                group["lr"] = lr * min(1, (step + 1) / 10)
            batch = rows[torch.randint(64, (8,))]
            model(input_ids=batch, labels=batch).loss.backward()
            stepper.step()
            stepper.zero_grad()
    return found


def files_of(weights, *, shards=False, as_bin=False):
    """Files of a checkpoint with these weights: name -> bytes."""
    model = _model(0)
    model.load_state_dict(weights)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        if as_bin:
            files = {name: data for name, data in files.items() if "safetensors" not in name}
            torch.save(weights, Path(folder) / "weights")
            files["pytorch_model.bin"] = (Path(folder) / "weights").read_bytes()
    return files | tokenizer_files()
