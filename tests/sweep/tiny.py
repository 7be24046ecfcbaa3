"""Tiny models and tokenizers, as the files of a checkpoint."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from embedgeo.checkpoints.loading import load_tokenizer
from embedgeo.text.tokenizing import tokenize_joined

REPOSITORY = "lab/tiny"
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all.",
    "A checkpoint is what is left of a training run: its weights, and the step at which they were "
    "written.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness.",
]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@cache
def tokenizer_files(kind="gpt"):
    special = ["<|endoftext|>"] if kind == "gpt" else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    names = {"eos_token": "<|endoftext|>"}
    if kind == "bert":
        names = dict(
            zip(
                ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
                special,
                strict=True,
            )
        )
        ids = {name: tokenizer.token_to_id(name) for name in special}
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
        )
    return saved_files(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained)


def tokenizer_of(files):
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_files(Path(folder), files))


@cache
def model(step=0, kind="gpt_neox", dtype=torch.float32):
    """A model that stands for a step of a training run: the weights differ, smoothly."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = _make(kind)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.01 * step * torch.randn_like(parameter))
            if "bert" in kind:  # training leaves padding where it is
                made.get_input_embeddings().weight[0] = 0
    return made.to(dtype).eval()


def _make(kind):
    if kind == "gpt_neox":
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(vocab_size=300, max_position_embeddings=64, **SIZES)
        )
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=2, n_head=2)
        )
    if kind == "mobilebert":  # which joins neighbouring embeddings
        return MobileBertForMaskedLM(
            MobileBertConfig(vocab_size=300, embedding_size=8, intra_bottleneck_size=16, **SIZES)
        )
    return BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=64, **SIZES))


@cache
def _checkpoint_files(step, kind, shards):
    size = "10KB" if shards else "1GB"
    return saved_files(
        lambda folder: model(step, kind).save_pretrained(folder, max_shard_size=size)
    )


def checkpoint_files(step=0, kind="gpt_neox", *, with_tokenizer=True, as_bin=False, shards=False):
    """Files of a checkpoint: name -> bytes."""
    files = dict(_checkpoint_files(step, kind, shards))
    if as_bin:
        files = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
        files["pytorch_model.bin"] = bin_file(model(step, kind).state_dict())
    if with_tokenizer:
        files.update(tokenizer_files("bert" if "bert" in kind else "gpt"))
    return files


def changed(files, name="config.json", **changes):
    """The files, of which one of JSON has other values."""
    return {**files, name: json.dumps({**json.loads(files[name]), **changes}).encode()}


def bin_file(value):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(value, Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


def write_files(folder, files):
    """Write the files, but for those of which there are no bytes but None."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def local_run(folder, steps=(0, 1, 2, 8), name="step{}", kind="gpt_neox"):
    """A folder of checkpoints."""
    for step in steps:
        write_files(folder / name.format(step), checkpoint_files(step, kind))
    return folder


def saved_files(save):
    """Files that ``save`` writes into the folder it is given: name -> bytes."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tokenize_sequences(documents, tokenizer, *, seq_len, num_tokens):
    """Token ids, shape (sequences, seq_len)."""
    text = tokenize_joined(documents, tokenizer, seq_len=seq_len, num_tokens=num_tokens)
    return text.token_ids.view(-1, seq_len)
