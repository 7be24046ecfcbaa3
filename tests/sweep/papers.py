"""Small models and texts behind the names that the presets of papers ask for."""

import json
from copy import deepcopy
from pathlib import Path

import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from embedgeo.text import builtin_corpus
from embedgeo.text.reading import parse_address
from tests.sweep.tiny import checkpoint_files, model, saved_files, tokenizer_files

ROOT = Path(__file__).parents[2]
FEWER = {
    "yamagiwa2025": {"sample": 1.0, "num_tokens": 3000, "seq_len": 32},
    "razzhigaev2024": {
        "num_tokens": 8192,
        "seq_len": 32,
        "batch_size": 64,
        "anisotropy_batch": 1024,
        "id_batches": 2,
    },
    "li2025": {"num_tokens": 2048, "seq_len": 32},
}
"""Options for the size of the models and texts here."""


def model_files(name, step):
    """Of an encoder, of a GPT-2, whose tokenizer has a token for the start, or of a GPT-NeoX."""
    kind = "bert" if "bert" in name else "gpt2" if "gpt2" in name else "gpt_neox"
    files = dict(checkpoint_files(step, kind))
    if kind == "gpt2":
        config = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = json.dumps(
            {**config, "bos_token": config["eos_token"]}
        ).encode()
    return files


def dataset_files(given, documents=120):
    """Of a dataset that has the configuration and the split of an address."""
    address = parse_address(given)
    split = {"split": address.split, "path": f"{address.split}.jsonl"}
    card = yaml.safe_dump(
        {"configs": [{"config_name": address.config or "default", "data_files": [split]}]}
    )
    rows = [
        {address.column: document}
        for document in "\n".join(builtin_corpus()).split("\n\n")[:documents]
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    return f"datasets/{address.name}", {
        "README.md": f"---\n{card}---\n".encode(),
        split["path"]: lines,
    }


def decoder_files(peak):
    """Of a GPT-2 of four blocks whose stream is that of its input, but for one large coordinate
    inside of it.

    The first block writes it, ``peak`` times as large as the others, with the sign of another
    coordinate, and the final norm takes it away again: so anisotropy is bell-shaped, or, with a
    peak of 0, flat.
    """
    network = GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=4, n_head=2)
    )
    torch.manual_seed(0)  # here, for versions of transformers draw other weights
    with torch.no_grad():
        network.transformer.wte.weight.normal_(0, 1)
        network.transformer.wte.weight[:, 0] = 0
        network.transformer.wpe.weight.zero_()
        for block in network.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
        first = network.transformer.h[0].mlp  # gelu(a) − gelu(−a) is a
        first.c_fc.weight.zero_()
        first.c_fc.weight[1, 0], first.c_fc.weight[1, 1] = 1, -1
        first.c_proj.weight[0, 0], first.c_proj.weight[1, 0] = peak, -peak
        network.transformer.ln_f.weight[0] = 0
    return tokenizer_files("gpt") | saved_files(network.save_pretrained)


def ranked_files(kept):
    """Of a GPT-NeoX whose final norm keeps this many of its 16 coordinates."""
    network = deepcopy(model(0, "gpt_neox"))
    with torch.no_grad():
        network.gpt_neox.final_layer_norm.weight[kept:] = 0
    return tokenizer_files("gpt") | saved_files(network.save_pretrained)
