"""A small GPT, written and trained in plain PyTorch, whose geometry is measured while it trains.

python plain_loop.py                            # a minute or less on a CPU
python plain_loop.py --max-steps 400 --resume   # goes on from the checkpoint
python plain_loop.py --bf16 --out runs/bf16
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from embedgeo import StepMonitor
from embedgeo.text import builtin_corpus, train_tokenizer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--out", type=Path, default=Path("runs/plain_loop"))
parser.add_argument("--max-steps", type=int, default=200)
parser.add_argument("--every-n-steps", type=int, default=20)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()

VOCABULARY, WIDTH, BLOCKS, HEADS = 1024, 64, 4, 4
BATCH_SIZE, ACCUMULATE, SEQ_LEN, LEARNING_RATE = 8, 2, 64, 1e-3
device = "cuda" if torch.cuda.is_available() else "cpu"

# --------------------------------------------------------------------------------------------------
# data

text = "\n\n".join(builtin_corpus())
tokens = torch.tensor(train_tokenizer(text, VOCABULARY)(text)["input_ids"])


def get_batch(step, part):
    """Sequences from anywhere in the text, the same ones for the same step also in a resumed
    run.
    """
    generator = torch.Generator().manual_seed(step * ACCUMULATE + part)
    starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH_SIZE, 1), generator=generator)
    windows = tokens[starts + torch.arange(SEQ_LEN + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


# --------------------------------------------------------------------------------------------------
# model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, input_ids, targets):
        x = self.wte(input_ids) + self.wpe(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def forward(model, batch):
    with torch.autocast(device, torch.bfloat16, enabled=options.bf16):
        return model(*batch)


torch.manual_seed(0)
model = GPT().to(device)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
)

# --------------------------------------------------------------------------------------------------
# monitor

# The monitor runs the model itself only for the last weights, and then as the loop does:
# probe_forward.
writer = SummaryWriter(options.out)
monitor = StepMonitor(
    model, options.every_n_steps, extra_steps=(1, 2, 4, 8), log=writer, probe_forward=forward
)

# --------------------------------------------------------------------------------------------------
# resume

first_step, checkpoint_file = 0, options.out / "checkpoint.pt"
if options.resume:
    checkpoint = torch.load(checkpoint_file, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    monitor.load_state_dict(checkpoint["monitor"])
    first_step = checkpoint["step"]

# --------------------------------------------------------------------------------------------------
# training

# All batches of one optimizer step are given its number, and make one measurement.
for step in range(first_step, options.max_steps):
    for part in range(ACCUMULATE):
        batch = get_batch(step, part)
        with monitor.step(step, batch):
            loss = forward(model, batch)
            (loss / ACCUMULATE).backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss.item(), step)
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

monitor.close()  # measures the last weights too
writer.close()
states = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "monitor": monitor.state_dict(),
}
torch.save({**states, "step": options.max_steps}, checkpoint_file)
print(f"curves and pictures: tensorboard --logdir {options.out}")
print(f"a report:            embedgeo report {options.out}")
