"""FLOPs of a prefill, counted by hand from a model's configuration: its matrix products and its attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from oracle.checkpoints.scopes import Kind
from oracle.references.plan import visible
from oracle.roofline_trace import Account

PRODUCTS = (Kind.PROJECTIONS, Kind.MLP, Kind.OUTPUT)  # the kinds of work that are matrix products with weights


def counted(config: Any, kinds: Sequence[str], tokens: int) -> dict[Account, float]:
    """Account -> FLOPs of a prefill of one sequence of `tokens` tokens; one token's logits.

    `config` is a text configuration of transformers with a gated MLP of three products in every layer and no other; `kinds` are
    its layers' ("global" or "sliding").  Attention counts two products over the query-key pairs that window and mask leave.
    """
    found: dict[Account, float] = defaultdict(float)
    hidden = config.hidden_size
    for layer, kind in enumerate(kinds):
        own = config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config
        heads, kv_heads = config.num_attention_heads, own.num_key_value_heads
        dim = getattr(own, "head_dim", None) or hidden // heads
        key_is_value = bool(getattr(config, "attention_k_eq_v", False)) and kind == "global"
        columns = heads * dim * 2 + kv_heads * dim * (1 if key_is_value else 2)
        found[Kind.PROJECTIONS, kind] += 2.0 * tokens * hidden * columns
        found[Kind.MLP, kind] += 2.0 * tokens * 3 * hidden * config.intermediate_size
        window = config.sliding_window if kind == "sliding" else None
        found[Kind.ATTENTION, kind] += 4.0 * heads * dim * pairs(tokens, window)
    found[Kind.OUTPUT, ""] += 2.0 * hidden * config.vocab_size
    return {(str(work), kind): flops for (work, kind), flops in found.items()}


def pairs(tokens: int, window: int | None) -> int:
    """Query-key pairs of a causal sequence from its start, each query seeing its own key and `window - 1` before it."""
    pos, length = torch.arange(tokens), torch.full((tokens,), tokens)
    lo, hi = visible(pos, length, causal=True, window=(-1, -1) if window is None else (window - 1, 0))
    return int((hi - lo).sum())
