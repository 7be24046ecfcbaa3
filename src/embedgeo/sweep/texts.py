"""The text of a sweep, tokenized for each of its models."""

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from embedgeo.checkpoints import loading
from embedgeo.checkpoints.configuration import load_config
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText, choose_masked, require_fit
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.shown import counting, shown_types
from embedgeo.sweep.tokenizers import Identity, find_tokenizers, small_files
from embedgeo.text import Documents, TokenizedText, cut_texts, hashing, tokenize_joined, tokenize_texts


def prepare_texts(
    documents: Documents, plan: Sequence[Planned], settings: SweepSettings
) -> tuple[dict[str, ProbeText], list[str]]:
    """Tokenize the text for each model of a plan, and check that the model can be measured on it.

    Models with the same tokenizer share what it gives.

    Returns:
        The text of each model; and sentences about models that have no tokenizer of their own.

    Raises:
        ValueError: no tokenizer, or a text or layers that do not fit a model.
    """
    models: dict[str, list[Planned]] = {}
    for planned in plan:
        models.setdefault(planned.checkpoint.model, []).append(planned)
    _require_class(plan, settings)
    limits: dict[str, Any] = {"min_words": settings.min_words, "max_words": settings.max_words}
    (cut,) = tee(cut_texts(documents, settings.unit, share=settings.sample, **limits), 1)  # read once, copied for each
    texts: dict[str, ProbeText] = {}
    made: dict[tuple[bool, Identity], ProbeText] = {}
    fitting: dict[tuple[str, Identity], ProbeText] = {}  # by the configuration of a model
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
        folder = Path(name)
        tokenizers, lines = find_tokenizers(models, settings, folder)
        for each, its_plan in models.items():
            tokenizer, identity = tokenizers[each]
            config = next((planned.contents.config_digest for planned in its_plan if planned.contents), "")
            if config and (config, identity) in fitting:
                texts[each] = fitting[config, identity]
                continue
            model, for_encoder = _first_model(its_plan, settings, folder)
            if (for_encoder, identity) not in made:
                prepared = _prepare(copy(cut), tokenizer, settings, for_encoder=for_encoder)
                if not documents.is_streamed:
                    prepared = replace(prepared, text_sha256=documents.sha256)
                made[for_encoder, identity] = prepared
            text = texts[each] = made[for_encoder, identity]
            if model is not None:
                require_fit(model, text, settings)
                fitting[config, identity] = text
    return texts, lines


def _prepare(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, settings: SweepSettings, *, for_encoder: bool
) -> ProbeText:
    digest = hashlib.sha256()
    tokenized = _tokenized(hashing(texts, digest), tokenizer, settings, for_encoder=for_encoder)
    token_ids, words = tokenized.token_ids, tokenized.words
    if words is not None:
        spelled = dict(enumerate(words.spelled))
    else:
        types = token_ids.unique().tolist() if settings.token_tables else []
        spelled = {i: str(tokenizer.decode([i])) for i in types}
    is_masked = for_encoder and tokenizer.mask_token_id is not None
    padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    known = int(token_ids.max())  # a token that was added for padding may have no embedding
    return ProbeText(
        token_ids,
        tokenized.lengths,
        choose_masked(token_ids, tokenizer.all_special_ids) if is_masked else None,
        tokenizer.mask_token_id if is_masked else None,
        next(token_id for token_id in padding if token_id is not None and token_id <= known),
        words,
        spelled,
        _type_sizes(tokenized, settings),
        shown_types(tokenized, spelled, tokenizer.all_special_ids, settings) if settings.token_tables else (),
        tokenized.num_cut,
        digest.hexdigest(),
    )


def _tokenized(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, settings: SweepSettings, *, for_encoder: bool
) -> TokenizedText:
    options: dict[str, Any] = {
        "num_tokens": settings.num_tokens,
        "special_tokens": settings.special_tokens,
        "with_words": settings.rows == "words",
    }
    if settings.unit != "sequence":
        return tokenize_texts(texts, tokenizer, max_length=settings.seq_len, **options)
    return tokenize_joined(texts, tokenizer, seq_len=settings.seq_len, for_encoder=for_encoder, **options)


def _type_sizes(text: TokenizedText, settings: SweepSettings) -> Mapping[int, float]:
    """Mean number of tokens, of those that count, of the words of each type."""
    if text.words is None:
        return {}
    word_ids, types = text.words.word_ids, text.words.word_types
    kept = (word_ids >= 0) & counting(text, settings)
    occurrences = torch.stack((types, word_ids))[:, kept].unique(dim=1)[0].bincount()
    sizes = types[kept].bincount() / occurrences
    return dict(enumerate(sizes.tolist()))  # NaN for types of which nothing counts


def _require_class(plan: Sequence[Planned], settings: SweepSettings) -> None:
    files = list(filter(None, map(_lightning_file, plan)))
    if files and settings.model_class is None:
        raise ValueError(f"model_class must name the LightningModule of {files[0]}; got none.")
    if settings.model_class is not None:
        loading.import_class(settings.model_class)


def _lightning_file(planned: Planned) -> Path | None:
    path = planned.checkpoint.path
    return path if path and path.is_file() and not planned.error else None


def _first_model(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> tuple[nn.Module | None, bool]:
    """The first model of the plan that loads, without weights if possible, and whether it is an encoder.

    The model is None if none loads: each will be tried again, and its failure recorded.
    """
    trusted = settings.trust_remote_code
    for planned in plan:
        try:
            if settings.model_class is not None and (path := _lightning_file(planned)):
                dtype = getattr(torch, settings.dtype)
                loaded = loading.load_lightning(path, settings.model_class, dtype=dtype)
                return loaded.model, loaded.is_encoder
            config = load_config(small_files(planned, ["config.json"], folder), trust_remote_code=trusted)
            return loading.empty_model(config, trust_remote_code=trusted), loading.is_encoder(config)
        except Exception:  # recorded when it fails again
            continue
    return None, False
