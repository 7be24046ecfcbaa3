"""Small models and texts behind the names that the presets of papers ask for."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from embedgeo.report.runs import runs_of_records
from embedgeo.studies.reproduce import Measured
from embedgeo.sweep import SweepSettings
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


def planted(values, steps=(0,), group="", tokens=None, facts=(), errors=0.0, **text):
    """What was measured of a model without a model: values of metrics by layer, of the input and
    blocks, and for several steps by step and layer; and a table of token types.
    """
    records = []
    for metric, of_metric in values.items():
        for step, at_layers in zip(steps, np.reshape(of_metric, (len(steps), -1)), strict=True):
            for i, value in enumerate(at_layers):
                layer = f"hidden.{i:02d}" if len(steps) == 1 else f"blocks.{i}"
                places = {"layer": layer, "layer_index": i, "width": 8}
                number = {"metric": metric, "value": float(value), "stderr": errors}
                records.append({"run": "m", "model": "m", "step": step, **places, **number})
    frame = pd.DataFrame(records)
    (run,) = runs_of_records(frame, **({} if tokens is None else {"tokens": tokens}))
    run = replace(run, has_steps=len(steps) > 1, facts=dict(facts))
    settings = SweepSettings(model="m", num_tokens=10**9)
    return Measured(run, "m", group, settings, {"model": "m"}, text)


def planted_types(num_types, slope, layers=5, seed=0, noise=0.01, outliers=()):
    """A table of token types whose V is 10 and the slope times M; with outliers (M, V)."""
    random = np.random.default_rng(seed)
    parts = []
    for i in range(layers):
        m = random.uniform(1, 2, num_types)
        v = 10 + slope * m + noise * random.standard_normal(num_types)
        m = np.concatenate([m, [each[0] for each in outliers]])
        v = np.concatenate([v, [each[1] for each in outliers]])
        n = 10 ** random.uniform(1, 4, len(m))
        part = {"layer": f"hidden.{i:02d}", "token_id": np.arange(len(m)), "n": n.round()}
        token = [f"t{j}" for j in range(len(m))]
        parts.append(pd.DataFrame({**part, "token": token, "Q": m + v, "M": m, "V": v}))
    return pd.concat(parts, ignore_index=True)
