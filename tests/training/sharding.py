"""Models that FSDP shards."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models import llama


class Headed(nn.Module):
    """A model of Hugging Face inside of another module, which is sharded, too."""

    def __init__(self):
        super().__init__()
        self.lm = llama()

    def forward(self, batch):
        return self.lm(**batch).logits


def sharded_by_wrappers(model, strategy=ShardingStrategy.FULL_SHARD, group=None):
    inside = model.lm.model if isinstance(model, Headed) else model.transformer.h[0]
    policy = ModuleWrapPolicy({type(inside)})
    on = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(model, group, strategy, auto_wrap_policy=policy, **on)


def sharded_in_place(model):
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)
