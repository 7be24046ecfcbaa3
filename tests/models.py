"""Small random models of the real transformers classes."""

import torch
import transformers as hf

VOCABULARY = 96
PAD = 1
_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "pad_token_id": PAD}
_LAYERS = {**_SIZE, "num_hidden_layers": 3, "intermediate_size": 32, "max_position_embeddings": 64}


def gpt_neox(**changes):
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{**_LAYERS, **changes}))


def bloom(**changes):
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=3, n_head=2, **changes))


def gpt2(**changes):
    size = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**size, "bos_token_id": 0, "eos_token_id": 0, **changes}))


def llama(**changes):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**_LAYERS, "num_key_value_heads": 2, **changes}))


def opt(**changes):
    return hf.OPTForCausalLM(hf.OPTConfig(**{**_LAYERS, "ffn_dim": 32, "word_embed_proj_dim": 16, **changes}))


def bert(**changes):
    return hf.BertForMaskedLM(hf.BertConfig(**{**_LAYERS, **changes}))


def roberta(**changes):
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**{**_LAYERS, "max_position_embeddings": 66, **changes}))


FAMILIES = {
    "gpt_neox": gpt_neox,
    "bloom": bloom,
    "gpt2": gpt2,
    "llama": llama,
    "opt": opt,
    "bert": bert,
    "roberta": roberta,
}
WITHOUT_FINAL_NORM = {"bert", "roberta"}


def token_batch(rows=4, length=12, *, seed=0, padding=None):
    """Input ids and attention mask, shape (rows, length); ``padding`` is "left", "right" or None."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding is not None:
        for row, short in enumerate(range(0, 2 * rows, 2)):
            missing = slice(0, short) if padding == "left" else slice(length - short, length)
            ids[row, missing], mask[row, missing] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}
