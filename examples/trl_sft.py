"""Supervised fine-tuning with TRL, several texts packed into a row; the monitor is one of the
Trainer's callbacks.

python trl_sft.py                   # results go to runs/trl-sft
tensorboard --logdir runs/trl-sft
embedgeo report runs/trl-sft
"""

import sys
from collections.abc import Sequence

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from embedgeo import GeometryCallback
from embedgeo.text import builtin_corpus, train_tokenizer


def make_trainer(folder: str, callbacks: Sequence[TrainerCallback]) -> SFTTrainer:
    set_seed(0)
    paragraphs = [
        text for topic in builtin_corpus() for text in topic.split("\n\n") if 80 < len(text) < 800
    ][:600]
    tokenizer = train_tokenizer("\n\n".join(paragraphs), vocab_size=1024)
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=256,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    arguments = SFTConfig(
        output_dir=folder,
        packing=True,  # each batch is one row: its position ids tell the texts apart
        max_length=256,
        per_device_train_batch_size=2,
        max_steps=10,
        learning_rate=1e-3,
        logging_steps=5,
        report_to="tensorboard",
        save_strategy="no",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    )
    return SFTTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_dict({"text": paragraphs}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/trl-sft"
    make_trainer(folder, [GeometryCallback(every_n_steps=5)]).train()
    print(f"tensorboard --logdir {folder}\nembedgeo report {folder}")
