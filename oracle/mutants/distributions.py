"""The input distributions of the study behind the error bound (docs/numerics.md, section 3): one causal sequence each.

Drawn by torch's generator, so the numbers are those of one version of torch; the suite's own input classes are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.references.rounding import DTYPES

PAGE = 16
HEADS, KV_HEADS, ROWS, KEYS, DIM = 4, 2, 128, 1024, 128  # of an input that says nothing else


@dataclass(slots=True)
class Draw:
    """Random numbers of one input."""

    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """N(0, 1), float32."""
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), float32."""
        return torch.rand(*shape, generator=self.generator)

    def qkv(self, rows: int = ROWS, keys: int = KEYS, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
        """Normal q (HEADS, rows, dim), k and v (KV_HEADS, keys, dim)."""
        return self.normal(HEADS, rows, dim), self.normal(KV_HEADS, keys, dim), self.normal(KV_HEADS, keys, dim)

    def spiked(self, x: Tensor) -> Tensor:
        """`x` with N(0, 100) added to one number in a thousand."""
        return x + 10 * self.normal(*x.shape) * (self.uniform(*x.shape) < 0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """q (q_heads, rows, d), k and v (kv_heads, keys, d) before rounding, and the options of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float = DIM**-0.5
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)

    def call(self, dtype: str) -> Call:
        """One sequence, causal, in pages of 16."""
        to = DTYPES[dtype]
        rows, keys = self.q.shape[1], self.k.shape[1]

        def paged(x: Tensor) -> Tensor:
            return x.transpose(0, 1).reshape(keys // PAGE, PAGE, *x.shape[::2]).to(to)

        return Call(
            q=self.q.transpose(0, 1).contiguous().to(to),
            k_cache=paged(self.k),
            v_cache=paged(self.v),
            cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
            seqused_k=torch.tensor([keys], dtype=torch.int32),
            page_table=torch.arange(keys // PAGE, dtype=torch.int32)[None],
            softmax_scale=self.scale,
            softcap=self.softcap,
            window_size=self.window,
        )


def _sized(draw: Draw, q_size: float, k_size: float, v_size: float = 1.0) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=q_size * q, k=k_size * k, v=v_size * v)


def _one_hot(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    target = torch.randint(0, KEYS - ROWS, (HEADS, ROWS), generator=draw.generator)
    for head in range(HEADS):
        q[head, ::2] = 3.0 * k[head * KV_HEADS // HEADS, target[head, ::2]]
    return Inputs(q=q, k=k, v=v)


def _cancel(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    sign = 1.0 - 2.0 * (torch.arange(KEYS) % 2)
    return Inputs(q=0.3 * q, k=k, v=sign[:, None] * (16 + 0.25 * v))


def _sink_token(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    u = draw.normal(KV_HEADS, DIM)
    u = u / u.norm(dim=-1, keepdim=True)
    k[:, 0] = 60 * u
    v[:, 0] *= 0.02
    return Inputs(q=q + 2.4 * u.repeat_interleave(HEADS // KV_HEADS, 0)[:, None], k=k, v=v)


def _subnormal(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=q, k=k, v=v * torch.exp2(torch.floor(-134 + 10 * draw.uniform(*v.shape))))


def _qk_norm(draw: Draw) -> Inputs:
    dim = 512
    gain = 1 + 0.3 * draw.normal(dim)
    q, k, v = draw.qkv(96, KEYS, dim)
    k = k + 0.5 * draw.normal(dim)
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() * gain for x in (q, k))
    return Inputs(q=q, k=k, v=v, scale=1 / 16)


def _ties(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=q, k=k[:, torch.arange(KEYS) % 8], v=2 + v)


def _probe(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=0.5 * q, k=k, v=torch.eye(DIM).repeat_interleave(KEYS // DIM, 0).expand_as(v))


def _adversary(draw: Draw) -> Inputs:
    """One row of one head: half of the keys have weights that bf16 rounds up and v = 1, half the opposite."""
    q, k, v = torch.zeros(1, 1, DIM), torch.zeros(1, KEYS, DIM), torch.ones(1, KEYS, DIM)
    q[..., 0] = DIM**0.5
    logits = (-3.0 * draw.uniform(200_000)).bfloat16().float()
    weights = torch.exp(logits.double() * float(q.bfloat16()[0, 0, 0]) * DIM**-0.5)
    moved = (weights.bfloat16().double() / weights - 1) * 2**8
    for keys, candidates in ((slice(1, KEYS // 2), logits[moved > 0.6]), (slice(KEYS // 2, KEYS), logits[moved < -0.6])):
        picked = torch.randint(0, len(candidates), (len(range(*keys.indices(KEYS))),), generator=draw.generator)
        k[0, keys, 0] = candidates[picked]
    v[:, KEYS // 2 :] = -1.0
    return Inputs(q=q, k=k, v=v)


def _channels(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    k[..., :: DIM // 4] += 12.0
    return Inputs(q=q, k=k, v=v)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return Inputs(q=q, k=k, v=v)


def _with_v(draw: Draw, values: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=q, k=k, v=values(v))


def _absolute(inputs: Inputs) -> Inputs:
    return replace(inputs, v=inputs.v.abs())


def _long(draw: Draw) -> Inputs:
    return Inputs(q=draw.normal(2, 32, DIM), k=draw.normal(1, 32768, DIM), v=draw.normal(1, 32768, DIM))


DISTRIBUTIONS: dict[str, tuple[str, Callable[[Draw], Inputs]]] = {
    "randn": ("N(0, 1)", lambda d: _sized(d, 1, 1)),
    "short-causal": ("256 rows and keys: rows of 1 to 256 keys", lambda d: _plain(*d.qkv(256, 256))),
    "large-x10": ("q, k, v ten times as large: logits of deviation 100", lambda d: _sized(d, 10, 10, 10)),
    "fa3-outlier": ("N(0, 1) + N(0, 100) for one number in a thousand", lambda d: _plain(*map(d.spiked, d.qkv()))),
    "one-hot": ("half the rows aligned with one key", _one_hot),
    "const-V": ("V = 0.7109375", lambda d: _with_v(d, lambda v: torch.full_like(v, 0.7109375))),
    "offset-V": ("V = 8 + 0.5 N", lambda d: _with_v(d, lambda v: 8 + 0.5 * v)),
    "cancel-V": ("V = (-1)^j (16 + 0.25 N), flat softmax", _cancel),
    "long-32k": ("32,768 keys, 32 rows of 2 heads on 1", lambda d: _long(d)),
    "sink": ("key 0 of norm 60, about 13 above the other logits, v_0 nearly 0", _sink_token),
    "denormal": ("V from 2^-134 to 2^-124: subnormal in bf16", _subnormal),
    "logits-3e3": ("logits of deviation 3000", lambda d: _sized(d, 30, 100)),
    "logits-1e36": ("logits of 1e36, near the largest float32", lambda d: _sized(d, 1e18, 1e18)),
    "gemma-qknorm": ("head dim 512, q and k RMS-normed with gains, scale 1/16", _qk_norm),
    "window": ("window of 256 keys", lambda d: replace(_sized(d, 1, 1), window=(255, 0))),
    "softcap": ("softcap 30, logits of deviation 18", lambda d: replace(_sized(d, 6, 3), softcap=30.0)),
    "ties": ("eight different keys, V = 2 + N", _ties),
    "probe-V": ("column c of V marks the c-th block of 8 keys", _probe),
}
EXTRA: dict[str, tuple[str, Callable[[Draw], Inputs]]] = {
    "k-channels": ("four channels of K are 12 larger than the others", _channels),  # what smoothing K is for
    "positive-V": ("V = |N|", lambda d: _with_v(d, torch.abs)),
    "positive-32k": ("V = |N|, 32,768 keys", lambda d: _absolute(_long(d))),
    "adversary": ("weights that all round in the direction of their v", _adversary),
}
HUGE = "logits-1e36"  # only a kernel that subtracts first gets through this one


def draw_call(name: str, seed: int, dtype: str = "bf16") -> Call:
    """The input called `name`; an input's numbers depend on its name and the seed alone."""
    word = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word[:6], "little"))
    return (DISTRIBUTIONS | EXTRA)[name][1](Draw(generator)).call(dtype)
