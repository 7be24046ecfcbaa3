"""Contrastive fine-tuning with sentence-transformers: the geometry of tokens, and that of sentence
embeddings.

python sentence_transformers_finetune.py        # results go to runs/sentences
tensorboard --logdir runs/sentences
embedgeo report runs/sentences
"""

import sys
from collections.abc import Sequence

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, TrainerCallback, set_seed

from embedgeo import GeometryCallback
from embedgeo.text import builtin_corpus, train_tokenizer


def make_model(folder: str, text: str) -> SentenceTransformer:
    """A small BERT with random weights, and mean pooling; you would name one of the Hub."""
    tokenizer = train_tokenizer(text, vocab_size=1024)
    tokenizer.pad_token = tokenizer.eos_token
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    encoder = Transformer(folder, max_seq_length=64)
    return SentenceTransformer(modules=[encoder, Pooling(config.hidden_size)])


def make_trainer(folder: str, callbacks: Sequence[TrainerCallback]) -> SentenceTransformerTrainer:
    set_seed(0)
    paragraphs = [
        text for topic in builtin_corpus() for text in topic.split("\n\n") if text.count(". ") == 1
    ]
    # two sentences that follow one another
    pairs = [text.split(". ") for text in paragraphs if len(text) < 400]
    model = make_model(f"{folder}/start", "\n".join(paragraphs))
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=10,
        learning_rate=1e-3,
        logging_steps=5,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=not torch.accelerator.is_available(),
    )
    return SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict(
            dict(zip(("anchor", "positive"), zip(*pairs, strict=True), strict=True))
        ),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=list(callbacks),
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/sentences"

    def embed_texts(model, batch):
        """Run the model as its loss does: a batch holds the anchors and the positives."""
        for features in trainer.collect_features(batch)[0]:
            model(features)

    of_tokens = GeometryCallback(every_n_steps=5, probe_forward=embed_texts)
    # a row is the mean of its tokens
    of_sentences = GeometryCallback(
        every_n_steps=5, rows="mean", prefix="sentences", probe_forward=embed_texts
    )
    trainer = make_trainer(folder, [of_tokens, of_sentences])
    trainer.train()
    print(f"tensorboard --logdir {folder}\nembedgeo report {folder}")
