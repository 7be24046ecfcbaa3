"""The configuration of a model, which may come from anyone."""

import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from embedgeo.checkpoints.reading import reading

_LAYERS = re.compile(r"layers?$|blocks?$|depth|stages?$|layers_|blocks_")
_MOST_LAYERS = 1000
"""A configuration of more would be expanded into lists as long, before there is a model to compare with the files."""


def load_config(folder: Path, *, trust_remote_code: bool = False, may_be_both: bool = False) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        folder: with ``config.json``.
        trust_remote_code: run code that comes with it.
        may_be_both: whether it may be of an encoder-decoder.

    Raises:
        ValueError: it has more layers than any real model, names code on the Hub, or is of an encoder-decoder.
    """

    def require_harmless(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if key.endswith("_implementation") and "/" in str(value) and not trust_remote_code:
                raise ValueError(
                    f"config.json: {key} must not name code on the Hub; got {value!r}. trust_remote_code allows it."
                )
            if isinstance(value, int) and value > _MOST_LAYERS and _LAYERS.search(key):
                raise ValueError(f"config.json: {key} must be at most {_MOST_LAYERS}; got {value}.")
        return dict(pairs)

    with reading("config.json"):
        text = (folder / "config.json").read_text()
        if not isinstance(json.loads(text), dict):
            raise TypeError("it must be an object")
    json.loads(text, object_pairs_hook=require_harmless)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder and not may_be_both:
        raise ValueError(
            f"a model must be a decoder or an encoder of text; {config.model_type} is both. Measure it by hand: "
            "embedgeo.observe."
        )
    return config
