"""A tiny training run by the Trainer of Hugging Face."""

import transformers as hf

from tests.models import gpt_neox, token_batch


def rows(number=24, padding=None, seed=0):
    batch = token_batch(number, seed=seed)
    if padding is not None:
        batch["attention_mask"][:, :3] = 0
    return [
        {**{key: v[i] for key, v in batch.items()}, "labels": batch["input_ids"][i]}
        for i in range(number)
    ]


def hf_trainer(
    folder,
    *callbacks,
    kind=hf.Trainer,
    eval_dataset=None,
    model=None,
    optimizers=(None, None),
    **options,
):
    hf.set_seed(0)
    defaults = {
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = hf.TrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **options})
    trainer = kind(
        model or gpt_neox(hidden_dropout=0.1),
        arguments,
        train_dataset=rows(),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )
    trainer.remove_callback(hf.trainer_callback.PrinterCallback)
    return trainer
