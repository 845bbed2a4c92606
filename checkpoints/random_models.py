"""Models of real shapes with random weights: what a layer costs does not depend on what it has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oracle.checkpoints.loading import CheckpointError, transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATTERN = 6  # five sliding layers, then a global one
GEMMA4_31B: dict[str, Any] = {  # 60 layers of it are 30.7e9 parameters
    "vocab_size": 262_144,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "final_logit_softcapping": 30.0,
}
RANDOM_MODELS = {"gemma4-31b-like": GEMMA4_31B}  # name -> arguments of Gemma4TextConfig


def random_model(sizes: dict[str, Any], layers: int | None, device: str, *, seed: int = 0) -> PreTrainedModel:
    """A Gemma 4 of the given sizes in bf16 with random weights, in evaluation mode on "cpu" or "cuda".

    It has the last `layers` of its layers, so that the last one is global; None = all.  Raises CheckpointError where the device
    lacks the memory, with the number of layers that fit.
    """
    hf = transformers()
    count = sizes["num_hidden_layers"] if layers is None else layers
    if not 1 <= count <= sizes["num_hidden_layers"]:
        raise CheckpointError(f"{count} layers: expected 1 to {sizes['num_hidden_layers']}")
    kinds = ["full_attention" if (i + 1) % PATTERN == 0 else "sliding_attention" for i in range(sizes["num_hidden_layers"])]
    own = sizes | {"num_hidden_layers": count, "layer_types": kinds[-count:], "vocab_size_per_layer_input": sizes["vocab_size"]}
    if device == "cuda":
        _check_memory(sizes, count)
    torch.manual_seed(seed)
    with torch.device(device):
        config = hf.Gemma4TextConfig(**own)
        model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    found: PreTrainedModel = model.eval()
    return found


def _check_memory(sizes: dict[str, Any], count: int) -> None:
    """Raises CheckpointError where `count` layers' weights do not fit three quarters of the free memory: the rest is for use."""
    if not torch.cuda.is_available():
        raise CheckpointError("device cuda: there is no CUDA device here; use --device cpu")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    a_layer = 2 * hidden * (3 * sizes["intermediate_size"] + 2 * heads * sizes["global_head_dim"])  # bytes, hardly ever more
    free = 0.75 * torch.cuda.mem_get_info()[0] - 2 * hidden * sizes["vocab_size"]
    if count * a_layer > free:
        raise CheckpointError(f"{count} layers do not fit: about {max(0, int(free // a_layer))} do; ask for fewer with --depth")
