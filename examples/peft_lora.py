"""LoRA with PEFT and the Hugging Face Trainer: the layers keep the names that they have without
adapters.

python peft_lora.py                 # results go to runs/lora
tensorboard --logdir runs/lora
embedgeo report runs/lora
"""

import sys
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from embedgeo import GeometryCallback
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer


def make_trainer(folder: str, callbacks: Sequence[TrainerCallback]) -> Trainer:
    set_seed(0)
    text = "\n\n".join(builtin_corpus()[:20])
    tokenizer = train_tokenizer(text, vocab_size=1024)
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"]
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=10,
        learning_rate=1e-2,
        logging_steps=5,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=not torch.accelerator.is_available(),
    )
    return Trainer(
        get_peft_model(LlamaForCausalLM(config), lora),
        arguments,
        train_dataset=[
            {"input_ids": ids} for ids in cut_sequences([tokenizer(text)["input_ids"]], seq_len=128)
        ],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=list(callbacks),
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lora"
    make_trainer(folder, [GeometryCallback(every_n_steps=5)]).train()
    print(f"tensorboard --logdir {folder}\nembedgeo report {folder}")
