"""Small random models: of the real transformers classes, and written by hand."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import transformers as hf
from torch import nn

VOCABULARY = 96
PAD = 1
_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "pad_token_id": PAD}
_LAYERS = {**_SIZE, "num_hidden_layers": 3, "intermediate_size": 32, "max_position_embeddings": 64}


_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt_neox(**changes):
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{**_LAYERS, **changes}))


def gpt2(**changes):
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**_GPT, "n_positions": 64, **changes}))


def llama(**changes):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**_LAYERS, "num_key_value_heads": 2, **changes}))


def albert(**changes):
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**{**_LAYERS, "embedding_size": 8, **changes}))


def t5(**changes):
    size = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 3,
        "num_heads": 2,
    }
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**{**size, "decoder_start_token_id": 0, **changes})
    )


def bert_to_gpt2():
    """Encoder and decoder with a table of their own each."""
    cross = {"add_cross_attention": True, "is_decoder": True}
    return hf.EncoderDecoderModel(
        encoder=hf.BertModel(hf.BertConfig(**_LAYERS)), decoder=gpt2(**cross)
    )


def checkpoint_activations(model, reentrant):
    """Turn activation checkpointing on, whose method transformers has renamed."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": reentrant})


def vit():
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return hf.ViTForImageClassification(hf.ViTConfig(**size, image_size=16, patch_size=4))


class Family(NamedTuple):
    """Builds a model, with three blocks in each submodel; the name of the final norm of each
    submodel, by prefix.
    """

    build: Callable[..., nn.Module]
    final_norm: dict[str, str | None]


def _family(architecture, final_norm, **changes):
    kind = getattr(hf, architecture)
    return Family(
        lambda **more: kind(kind.config_class(**{**_LAYERS, **changes, **more})), {"": final_norm}
    )


FAMILIES = {
    "gpt_neox": Family(gpt_neox, {"": "gpt_neox.final_layer_norm"}),
    "bloom": _family("BloomForCausalLM", "transformer.ln_f", n_layer=3, n_head=2),
    "gpt2": Family(gpt2, {"": "transformer.ln_f"}),
    "gptj": _family("GPTJForCausalLM", "transformer.ln_f", **_GPT, rotary_dim=4),
    "llama": Family(llama, {"": "model.norm"}),
    "mistral": _family("MistralForCausalLM", "model.norm", num_key_value_heads=1, sliding_window=4),
    "qwen2": _family("Qwen2ForCausalLM", "model.norm", num_key_value_heads=1),
    "gemma2": _family("Gemma2ForCausalLM", "model.norm", num_key_value_heads=1, head_dim=8),
    "olmo2": _family("Olmo2ForCausalLM", "model.norm"),
    "opt": _family(
        "OPTForCausalLM", "model.decoder.final_layer_norm", ffn_dim=32, word_embed_proj_dim=16
    ),
    "falcon": _family("FalconForCausalLM", "transformer.ln_f", bos_token_id=0, eos_token_id=0),
    "phi": _family("PhiForCausalLM", "model.final_layernorm"),
    "bert": _family("BertForMaskedLM", None),
    "roberta": _family("RobertaForMaskedLM", None, max_position_embeddings=66),
    "distilbert": _family(
        "DistilBertForMaskedLM", None, dim=16, n_layers=3, n_heads=2, hidden_dim=32
    ),
    "albert": Family(albert, {"": None}),
    "albert in groups": Family(lambda: albert(num_hidden_groups=2), {"": None}),
    "deberta_v2": _family(
        "DebertaV2ForMaskedLM",
        None,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
    ),
    "modernbert": _family("ModernBertForMaskedLM", "model.final_norm"),
    "jamba": _family(
        "JambaForCausalLM",
        "model.final_layernorm",
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "t5": Family(
        t5, {"encoder.": "encoder.final_layer_norm", "decoder.": "decoder.final_layer_norm"}
    ),
    "t5 encoder": _family(
        "T5EncoderModel", "encoder.final_layer_norm", d_model=16, d_kv=8, d_ff=32, num_layers=3
    ),
    "bert to gpt2": Family(
        bert_to_gpt2, {"encoder.": None, "decoder.": "decoder.transformer.ln_f"}
    ),
}


@cache
def eval_model(family):
    """The family's model in eval mode, built once: it must be left as it is."""
    torch.manual_seed(0)
    return FAMILIES[family].build().eval()


def linear_block(width):
    """A block without attention: a bare Linear would be taken for a head."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class NanoGPT(nn.Module):
    """As nanoGPT builds it; fewer token types than positions, as with its characters."""

    def __init__(self, stack=nn.ModuleList, width=16):
        super().__init__()
        blocks = (
            stack([Block(width) for _ in range(3)])
            if stack is nn.ModuleList
            else stack(*map(Block, [width] * 3))
        )
        tables = {
            "wpe": nn.Embedding(2 * VOCABULARY, width),
            "wte": nn.Embedding(VOCABULARY, width),
        }
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx):
        return self.lm_head(self.transformer.ln_f(self.states(idx)[-1]))

    def states(self, idx):
        positions = torch.arange(idx.shape[1], device=idx.device)
        states = [self.transformer.wpe(positions)[None] + self.transformer.wte(idx)]
        for block in self.transformer.h:
            states.append(block(states[-1]))
        return states


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, attn_mask=causal, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Titan(nn.Module):
    """As torchtitan builds it."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleDict({str(i): Block(16) for i in range(3)})
        self.norm, self.output = nn.RMSNorm(16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens, positions=None):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class TorchEncoder(nn.Module):
    """torch's own encoder; without ``batch_first``, token ids are (positions, batch), or embeddings
    are transposed.
    """

    def __init__(self, *, batch_first=True, transposes=False):
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.table = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(
            block, 3, nn.LayerNorm(16), enable_nested_tensor=batch_first
        )
        self.transposes = transposes

    def forward(self, ids, padding=None):
        x = self.table(ids)
        return self.encoder(
            x.transpose(0, 1) if self.transposes else x, src_key_padding_mask=padding
        )


def token_batch(rows=4, length=12, *, seed=0, padding=None):
    """Input ids and attention mask, shape (rows, length); ``padding`` is "left", "right" or
    None.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding is not None:
        for row, short in enumerate(range(0, 2 * rows, 2)):
            missing = slice(0, short) if padding == "left" else slice(length - short, length)
            ids[row, missing], mask[row, missing] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
