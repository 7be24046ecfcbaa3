"""The geometry of a model's embeddings in plain PyTorch: run the cells in a notebook, or the whole
as a script.

python observe.py                          # a small GPT-NeoX with random weights
python observe.py runs/demo/checkpoints/step300
"""

# %% A model and its tokenizer: a folder or a Hugging Face name, or else something small that needs
# no download
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

import embedgeo
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer

text = "\n\n".join(builtin_corpus()[:8])
# a notebook has options there
names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
if names:
    tokenizer = AutoTokenizer.from_pretrained(names[0])
    model = AutoModelForCausalLM.from_pretrained(names[0], dtype=torch.float32)
else:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(text, vocab_size=1024)
    config = GPTNeoXConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=256,
    )
    model = AutoModelForCausalLM.from_config(config)
model.eval()

# %% Everything that runs inside the with statement is measured
input_ids = cut_sequences([tokenizer(text)["input_ids"]], seq_len=128, num_tokens=8192)
with torch.no_grad(), embedgeo.observe(model) as geometry:
    for batch in input_ids.split(16):
        model(input_ids=batch)

# %% A row for each layer, a column for each metric; docs/numbers.md says what each number means
frame = geometry.to_frame()
table = frame.pivot(index=["layer_index", "layer"], columns="metric", values="value")
print(
    table[
        ["V_W_over_V_unbiased", "M_over_Q", "anisotropy", "anisotropy_null", "intrinsic_dimension"]
    ]
    .round(3)
    .to_string()
)

if not names:
    print(
        """
Random weights should show:
  V_W_over_V_unbiased  0 at embed, where a token has one embedding whatever its context, then
                       some 0.1 at most: context hardly moves an embedding yet. Training first
                       lowers it, then raises it.
  M_over_Q             near 0: the embeddings share no offset. Early in training it comes near 1.
  anisotropy           a few times anisotropy_null, what a Gaussian shows: frequent tokens weigh
                       more than others.
  intrinsic_dimension  some tens at embed (of 64), where equal rows count once; about 2 in the
                       blocks, where the occurrences of a token lie close together.
"""
    )

# %% Other layers and other metrics
with (
    torch.no_grad(),
    embedgeo.observe(
        model, layers=["*.mlp", "mean(last4)"], metrics=lambda d: [embedgeo.EmbeddingMoments(d)]
    ) as geometry,
):
    model(input_ids=input_ids[:16])
table = geometry.to_frame().pivot(index=["layer_index", "layer"], columns="metric", values="value")
print(table[["Q", "M", "V", "mean_cosine", "top_dim_share"]].round(3).to_string())
