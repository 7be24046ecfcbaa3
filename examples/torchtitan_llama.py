"""torchtitan's own Llama 3, a tiny one, whose geometry is measured while a plain loop trains it.

pip install torchtitan triton    # torchtitan does not start without triton
python torchtitan_llama.py       # half a minute on a CPU
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

# needs triton, which torch for GPUs brings
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from embedgeo import StepMonitor
from embedgeo.text import builtin_corpus, train_tokenizer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--out", type=Path, default=Path("runs/torchtitan_llama"))
parser.add_argument("--max-steps", type=int, default=100)
parser.add_argument("--every-n-steps", type=int, default=10)
options = parser.parse_args()

VOCABULARY, SEQ_LEN, BATCH_SIZE = 1024, 64, 8
device = "cuda" if torch.cuda.is_available() else "cpu"

# --------------------------------------------------------------------------------------------------
# data

text = "\n\n".join(builtin_corpus())
tokens = torch.tensor(train_tokenizer(text, VOCABULARY)(text)["input_ids"])


def get_batch(step):
    """Sequences from anywhere in the text, and the tokens that follow."""
    starts = torch.randint(
        len(tokens) - SEQ_LEN, (BATCH_SIZE, 1), generator=torch.Generator().manual_seed(step)
    )
    windows = tokens[starts + torch.arange(SEQ_LEN + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


# --------------------------------------------------------------------------------------------------
# model

torch.manual_seed(0)
size = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
model = Transformer(TransformerModelArgs(**size, vocab_size=VOCABULARY, max_seq_len=SEQ_LEN)).to(
    device
)
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

# --------------------------------------------------------------------------------------------------
# monitor

# Blocks, final norm and token ids are found by themselves. The monitor runs the model itself only
# for the last weights, on the inputs of a batch: probe_forward. On several GPUs it is also given
# device_mesh=: see docs/how-to/recipes.md.
writer = SummaryWriter(options.out)
monitor = StepMonitor(
    model, options.every_n_steps, log=writer, probe_forward=lambda model, batch: model(batch[0])
)

# --------------------------------------------------------------------------------------------------
# training

for step in range(options.max_steps):
    inputs, labels = batch = get_batch(step)
    with monitor.step(step, batch):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss.item(), step)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

monitor.close()
writer.close()
print(f"curves and pictures: tensorboard --logdir {options.out}")
print(f"a report:            embedgeo report {options.out}")
