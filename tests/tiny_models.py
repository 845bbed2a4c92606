"""Tiny random models, built here: one for each kind of attention that checkpoints have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # the usual 0.02 makes every attention flat, and then a wrong mask or scale would hardly show
}
LAYERS = ["sliding_attention", "full_attention"]


def llama(hf: Any) -> Any:
    return hf.LlamaConfig(**TINY)


def gemma2(hf: Any) -> Any:
    return hf.Gemma2Config(**TINY, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=9)


def gemma4(hf: Any) -> Any:
    return hf.Gemma4TextConfig(**gemma4_like(TINY))


def gemma4_like(sizes: dict[str, Any], global_head_dim: int = 32) -> dict[str, Any]:
    """What makes a Gemma 4 of these sizes: a sliding layer, and a global one whose single kv head is K and V."""
    return {
        **sizes,
        "sliding_window": 8,
        "layer_types": LAYERS,
        "vocab_size_per_layer_input": 96,
        "global_head_dim": global_head_dim,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }


def real_dims(hf: Any) -> Any:
    """A Gemma 4 whose sizes real kernels and 8-bit products take, with room for 256 tokens; bf16."""
    sizes = TINY | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 256}
    return build(hf, hf.Gemma4TextConfig(**gemma4_like(sizes, global_head_dim=128))).to(torch.bfloat16)


def gpt_oss(hf: Any) -> Any:
    return hf.GptOssConfig(**TINY, sliding_window=8, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1)


def deepseek3(hf: Any) -> Any:
    own = {name: TINY[name] for name in TINY if name not in ("head_dim", "num_key_value_heads")}
    return hf.DeepseekV3Config(
        **own,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        qk_rope_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    )


def build(hf: Any, config: Any, attention: str | None = None) -> Any:
    """A random fp32 model of `config`, the same every time."""
    torch.manual_seed(0)
    chosen = {} if attention is None else {"attn_implementation": attention}
    model = hf.AutoModelForCausalLM.from_config(config, **chosen).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def tokenizer(hf: Any, *, begins: bool = False) -> Any:
    """A tokenizer of characters and "th"; with `begins`, it puts <s> before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "Ġ", *map(chr, range(33, 124)), "th"]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[("t", "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save(hf: Any, model: Any, where: Path) -> Path:
    """The model and a tokenizer in the folder `where`, as save_pretrained leaves them."""
    model.save_pretrained(where)
    tokenizer(hf).save_pretrained(where)
    return where


def save_with_texts(hf: Any, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of `real_dims`, and a folder with three texts for it."""
    texts = folder / "texts"
    texts.mkdir()
    for name in ("one", "two", "three"):
        line = f"The {name} the other reads, the number of a page: "
        (texts / f"{name}.txt").write_text("".join(f"{line}{i * i % 97}. " for i in range(30)))
    return save(hf, real_dims(hf), folder / "tiny-gemma4"), texts
