"""What is measured of each model family of transformers, beside its own ``output_hidden_states``.

python -m benchmarks.families [--out docs/families.csv] [TYPE …]
    builds a small random model of every configuration that an auto class of language models knows
    (causal, masked, sequence to sequence), runs a padded batch, and compares n, Q and M of
    ``layers="hidden_states"`` with those of the hidden states that the model returns. A table says
    of each family: equal, refused and by which sentence, wrong, or why it was not built. The exit
    status is 1 where one is wrong.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

import embedgeo
from embedgeo import EmbeddingMoments
from embedgeo.formatting import reason

AUTO_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}
TOLERANCE = 1e-5
MOST_PARAMETERS = 20_000_000
VOCABULARY = 128
LAYERS = 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_ff": 64,
    "d_kv": 8,
    "d_inner": 64,
    "embedding_size": 32,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "layer_types": None,
    "use_cache": False,
}


# what a configuration may refuse, or compute from others
LEFT_OUT = (
    (),
    ("max_position_embeddings",),
    ("num_key_value_heads", "head_dim"),
    ("num_key_value_heads", "head_dim", "layer_types", "kv_channels"),
    tuple(SIZES.keys() - {"vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size"}),
    tuple(SIZES.keys() - {"vocab_size", "num_hidden_layers"}),
)


class Family(NamedTuple):
    """What was found of a family by an auto class."""

    auto_class: str
    model_type: str
    model_class: str
    status: str  # equal, refused, wrong, not built
    layers: int
    note: str


def small_config(kind: type[PreTrainedConfig], left_out: Sequence[str] = ()) -> PreTrainedConfig:
    """A configuration of a small model, made of the default one's own names."""
    usual = kind()
    sizes: dict[str, Any] = {}
    for name, size in SIZES.items():
        if name in left_out:
            continue
        if name in getattr(usual, "attribute_map", {}) or hasattr(usual, name):
            sizes[name] = size
    for name in getattr(kind, "sub_configs", {}):
        sub = getattr(usual, name, None)
        if isinstance(sub, PreTrainedConfig):
            sizes[name] = small_config(type(sub), left_out).to_dict()
    return kind(**sizes)


def build(model_class: Any, config: PreTrainedConfig) -> nn.Module:
    """A random model, once it is known to be small."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: its configuration has other names for its sizes.")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).eval()
    return model


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """Four sequences, of which two are padded."""
    ids = torch.randint(5, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[3, 5:] = 0
    given = {"input_ids": ids.where(mask > 0, 0), "attention_mask": mask}
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]
        given |= {"decoder_input_ids": ids[:, :7], "decoder_attention_mask": mask[:, :7]}
    return given


def own_states(output: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names of layers and the rows that count of the model's own hidden states."""
    sides = {"": ("hidden_states", "attention_mask")}
    if "decoder_input_ids" in batch:
        sides = {
            "encoder.": ("encoder_hidden_states", "attention_mask"),
            "decoder.": ("decoder_hidden_states", "decoder_attention_mask"),
        }
    for prefix, (states, mask) in sides.items():
        found = getattr(output, states, None) or ()
        for i, state in enumerate(found):
            kept = batch[mask].bool()
            is_turned = state.shape[:2] == kept.shape[::-1] != kept.shape
            rows = state.transpose(0, 1) if is_turned else state
            yield f"{prefix}hidden.{i:02d}", rows[:, : kept.shape[1]][kept]


def moments(rows: Tensor) -> dict[str, float]:
    """n, Q and M of rows, in float64."""
    x = rows.double()
    return {
        "n": float(len(x)),
        "Q": float(x.square().sum(1).mean()),
        "M": float(x.mean(0).square().sum()),
    }


def compare(model: nn.Module, batch: dict[str, Tensor]) -> tuple[str, int, str]:
    """Status, number of equal layers, and what is to be said, of a model and a batch."""
    try:
        with torch.no_grad():
            output = model(**batch, output_hidden_states=True)
        own = dict(own_states(output, batch))
    except Exception as error:
        return "not built", 0, f"it cannot run: {reason(error)}"
    if not own:
        return "not built", 0, "it returns no hidden states"
    try:
        with (
            torch.no_grad(),
            embedgeo.observe(
                model, layers="hidden_states", metrics=lambda dim: [EmbeddingMoments(dim)]
            ) as geometry,
        ):
            model(**batch)
        found = geometry.compute()
    except (TypeError, ValueError) as error:
        return "refused", 0, reason(error)
    wrong = []
    num_equal = 0
    for name, values in found.items():
        if name not in own:
            wrong.append(f"{name} is none of the model's")
            continue
        true = moments(own[name])
        scale = {"n": 1.0, "Q": true["Q"], "M": true["Q"]}
        if all(abs(values[key] - true[key]) <= TOLERANCE * scale[key] for key in true):
            num_equal += 1
        else:
            wrong.append(f"{name}: { ({key: values[key] for key in true}) } for {true}")
    if wrong:
        return "wrong", num_equal, "; ".join(wrong)[:300]
    missing = sorted(own.keys() - found.keys())
    outcome = "equal" if num_equal else "absent"
    return outcome, num_equal, f"absent: {', '.join(missing)}" if missing else ""


def families(wanted: Sequence[str] = ()) -> Iterator[Family]:
    """All families that the auto classes know, or those of some types."""
    for auto_class, mapping in AUTO_CLASSES.items():
        classes = mapping._model_mapping
        for config_class in sorted(classes.keys(), key=lambda each: each.model_type):
            if wanted and config_class.model_type not in wanted:
                continue
            model_class = classes[config_class]
            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
            named = auto_class, config_class.model_type, model_class.__name__
            found = ("not built", 0, "")
            for left_out in LEFT_OUT:
                try:
                    model = build(model_class, small_config(config_class, left_out))
                except Exception as error:
                    found = "not built", 0, reason(error)
                else:
                    found = compare(model, batch_of(model))
                if found[0] != "not built":
                    break
            yield Family(*named, *found[:2], found[2].split("\n")[0][:200])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="types of models; default: all")
    parser.add_argument("--out", type=Path, help="the table to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = []
    for family in families(arguments.types):
        found.append(family)
        print(*family, sep="  ", flush=True)
    table = pd.DataFrame(found)
    counts = table["status"].value_counts()
    print(f"transformers {transformers.__version__}:", counts.to_dict())
    if arguments.out is not None:
        table.to_csv(arguments.out, index=False)
    return int("wrong" in counts)


if __name__ == "__main__":
    sys.exit(main())
