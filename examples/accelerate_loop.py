"""A GPT-NeoX trained in a loop with accelerate, whose geometry is measured while it trains.

python accelerate_loop.py               # half a minute on a CPU
accelerate launch accelerate_loop.py    # on the processes that `accelerate config` has set up
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from embedgeo import StepMonitor
from embedgeo.text import builtin_corpus, cut_sequences, train_tokenizer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--out", type=Path, default=Path("runs/accelerate_loop"))
parser.add_argument("--max-steps", type=int, default=100)
parser.add_argument("--every-n-steps", type=int, default=10)
options = parser.parse_args()

# --------------------------------------------------------------------------------------------------
# accelerator

accelerator = Accelerator(
    gradient_accumulation_steps=2, log_with="tensorboard", project_dir=options.out.parent
)
accelerator.init_trackers(options.out.name)
set_seed(0)

# --------------------------------------------------------------------------------------------------
# data and model

text = "\n\n".join(builtin_corpus())
tokenizer = train_tokenizer(text, vocab_size=1024)
input_ids = cut_sequences([tokenizer(text)["input_ids"]], seq_len=64)
loader = DataLoader(
    [{"input_ids": ids, "labels": ids} for ids in input_ids], batch_size=8, shuffle=True
)

config = GPTNeoXConfig(
    vocab_size=1024,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=256,
)
model = GPTNeoXForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# --------------------------------------------------------------------------------------------------
# monitor

# The tracker's own SummaryWriter gets scalars and pictures; log=accelerator gives scalars to all
# trackers there are.
writer = (
    accelerator.get_tracker("tensorboard", unwrap=True) if accelerator.is_main_process else None
)
monitor = StepMonitor(model, options.every_n_steps, log=writer, folder=options.out)

# --------------------------------------------------------------------------------------------------
# training

# The step that the monitor is given counts optimizer steps: one in as many batches as are
# accumulated.
step = 0
while step < options.max_steps:
    for batch in loader:
        with accelerator.accumulate(model), monitor.step(step, batch):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": loss.item()}, step=step)
            if step % 10 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}")
            step += 1
        if step == options.max_steps:
            break

monitor.close()
accelerator.end_training()
accelerator.print(f"curves and pictures: tensorboard --logdir {options.out}")
accelerator.print(f"a report:            embedgeo report {options.out}")
