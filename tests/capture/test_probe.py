"""What the probe reads when the model is compiled or checkpoints its activations."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from embedgeo import EmbeddingMoments, Geometry, observe
from tests.compiled import CountingBackend
from tests.models import Block, NanoGPT, albert, checkpoint_activations, gpt_neox, token_batch
from tests.observed import kept_rows, rows_seen

# ── torch.compile
# ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def backend():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield CountingBackend("eager")
    torch._dynamo.reset()


@pytest.mark.slow
# torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_measured_steps_of_a_compiled_model_run_eagerly_and_the_others_stay_compiled(backend):
    model, batch = gpt_neox(use_cache=False), token_batch()
    steps = 3
    run = torch.compile(lambda **batch: model(**batch).loss, backend=backend)
    geometry = Geometry(model, metrics=lambda dim: [EmbeddingMoments(dim)])

    def step():
        before = backend.runs
        run(**batch, labels=batch["input_ids"]).backward()
        return backend.runs - before

    step()
    graphs, of_a_step = counters["stats"]["unique_graphs"], step()
    assert of_a_step > 0
    for _ in range(steps):
        with geometry.probe:
            assert step() == 0
        assert step() == of_a_step
    layers = ["embed", "block.00", "block.01", "block.02", "final_norm"]
    assert {layer: values["n"] for layer, values in geometry.compute().items()} == dict.fromkeys(
        layers, steps * 48
    )
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


# ── Activation checkpointing
# ─────────────────────────────────────────────────────────────────────────────────────


def of_transformers(reentrant, **changes):
    model = gpt_neox(use_cache=False, **changes).train()
    checkpoint_activations(model, reentrant)
    return model


class Checkpointed(NanoGPT):
    """Applies its stack of blocks, or each block as a module, under a checkpoint."""

    def __init__(self, apply):
        super().__init__(nn.Sequential)
        self.apply_blocks = apply

    def states(self, idx):
        return [self.apply_blocks(self.transformer.h, self.transformer.wte(idx))]


def each_block(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def inside_each_block():
    model = NanoGPT()
    for block in model.transformer.h:
        for part in (block.mlp, block.attn):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    return model


def by_wrappers():
    model = NanoGPT()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def of_shared_blocks():
    model = albert()
    group = model.albert.encoder.albert_layer_groups[0]
    group.forward = partial(checkpoint, group.forward, use_reentrant=False)
    return model


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
keep_products = partial(create_selective_checkpoint_contexts, PRODUCTS)


CHECKPOINTING = {
    "transformers, reentrant": partial(of_transformers, True),
    "around a block, reentrant": lambda: Checkpointed(partial(each_block, use_reentrant=True)),
    "selective": lambda: Checkpointed(
        partial(each_block, use_reentrant=False, context_fn=keep_products)
    ),
    "inside a block": inside_each_block,
    "wrappers": by_wrappers,
    "shared blocks": of_shared_blocks,
}


@pytest.mark.parametrize("form", CHECKPOINTING)
@pytest.mark.slow
def test_each_token_is_counted_once_under_activation_checkpointing(form):
    torch.manual_seed(0)
    model = CHECKPOINTING[form]()
    # what is inside of shared blocks is called several times, and refused
    layers = ["blocks", *([] if form == "shared blocks" else ["*.mlp*"])]
    batches = [token_batch(seed=seed)["input_ids"] for seed in range(2)]

    def measured(*, backward):
        geometry = Geometry(model, layers, kept_rows, no_grad_passes=False)
        with geometry.probe:
            for ids in batches:
                output = model(ids)
                logits = output if isinstance(output, torch.Tensor) else output.logits
                if backward:
                    logits.square().mean().backward()
        return geometry

    forward_only = measured(backward=False)
    calls = []
    inner_modules = (m for n, m in model.named_modules() if ".mlp." in n or n.endswith(".ffn"))
    repeated = next(m for m in inner_modules if isinstance(m, nn.Linear))
    with repeated.register_forward_pre_hook(lambda module, args: calls.append(module)):
        geometry = measured(backward=True)
    assert len(calls) > len(batches)  # something was repeated
    assert len(geometry.compute()) >= 4
    for layer in geometry.compute():
        for seen, expected in zip(
            rows_seen(geometry, layer), rows_seen(forward_only, layer), strict=True
        ):
            assert torch.equal(seen, expected), layer


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FORMS = {
    "reentrant": partial(of_transformers, True, **DROPOUT),
    "not reentrant": partial(of_transformers, False, **DROPOUT),
    "selective": CHECKPOINTING["selective"],
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_under_activation_checkpointing_are_those_without_the_probe(form):
    def gradients(*, measured):
        torch.manual_seed(0)
        model, ids = FORMS[form](), token_batch()["input_ids"]
        with observe(model, ["blocks", "*.mlp"]) if measured else nullcontext():
            output = model(ids)
            getattr(output, "logits", output).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(measured=True), gradients(measured=False)))
