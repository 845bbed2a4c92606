"""Families: the attention layer types that kernels are judged on.  A row in a table, never a branch in code."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oracle.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One attention layer type."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float  # multiplies q.k
    causal: bool = True
    window: tuple[int, int] = (-1, -1)  # (left, right), both included, -1 = no limit
    softcap: float = 0.0
    sinks: bool = False
    source: str = ""  # the model it is taken from

    def __post_init__(self) -> None:
        for name in ("kv_heads", "q_heads", "head_dim", "head_dim_v"):
            if (number := getattr(self, name)) < 1:
                raise InputError(f"family {self.name}: {name} is {number}; it must be 1 or more")
        if self.q_heads % self.kv_heads:
            raise InputError(f"family {self.name}: q_heads is {self.q_heads}; it must be a multiple of kv_heads, {self.kv_heads}")
        if not 0 < abs(self.scale) < math.inf:
            raise InputError(f"family {self.name}: scale is {self.scale}; it must be finite and not 0")
        if not 0 <= self.softcap < math.inf:
            raise InputError(f"family {self.name}: softcap is {self.softcap}; it must be 0 (off) or a positive number")
        if min(self.window) < -1:
            raise InputError(f"family {self.name}: window is {self.window}; each side must be -1 (no limit) or more")

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def reach(self) -> int:
        """Keys of the longest sequence of a case: past the window, so that its edge lies inside."""
        return max(200, self.window[0] + 70)


def _family(
    name: str,
    heads: tuple[int, int],
    dims: int | tuple[int, int],
    source: str,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: bool = False,
    causal: bool = True,
) -> Family:
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    return Family(
        name=name,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=d,
        head_dim_v=dv,
        causal=causal,
        window=window,
        scale=d**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        source=source,
    )


_ROWS = (
    _family("gemma4-global", (32, 4), 512, "Gemma 4 31B, global layers: q and k RMS-normed, unscaled", scale=1.0),
    _family("gemma4-sliding", (32, 16), 256, "Gemma 4 31B, sliding layers", scale=1.0, window=(1023, 0)),
    _family("gemma3", (8, 4), 256, "Gemma 3 4B, sliding layers", scale=256**-0.5, window=(1023, 0)),
    _family(
        "gemma2", (16, 8), 256, "Gemma 2 9B, sliding layers: logits capped at 50", scale=256**-0.5, window=(4095, 0), softcap=50.0
    ),
    _family("llama3", (32, 8), 128, "Llama 3 8B"),
    _family("qwen2-0.5b", (14, 2), 64, "Qwen2 0.5B: seven query heads a kv head"),
    _family("smollm2", (9, 3), 64, "SmolLM2 135M"),
    _family("gpt-oss-sliding", (64, 8), 64, "gpt-oss 20B, sliding layers: sinks, window 128", window=(127, 0), sinks=True),
    _family("gpt-oss-full", (64, 8), 64, "gpt-oss 20B, full layers: sinks", sinks=True),
    _family("mqa", (16, 1), 128, "multi-query attention: one kv head for all query heads"),
    _family("group-12", (12, 1), 128, "an odd group of 12, 12:1"),
    _family("group-5", (5, 1), 80, "an odd group of 5 at head dim 80"),
    _family("encoder", (12, 12), 64, "a bidirectional encoder", causal=False),
    _family("mla-prefill", (16, 16), (192, 128), "DeepSeek V3 prefill: head_dim_v differs from head_dim"),
)

FAMILIES: dict[str, Family] = {f.name: f for f in _ROWS}
