"""The study that calibrates the error bound: `make study` writes docs/study.md.

Correct kernels and planted faults, all in emulated arithmetic, on eighteen input distributions: what the bound, the LSE's bound
and the slopes say of each.  Five minutes on two cores.  Same seed, same tables.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Precision, Record
from oracle.doors import NEGLIGIBLE, slope_findings
from oracle.families import Family
from oracle.kernels.emulated import VARIANTS
from oracle.measure import Measured, Truth, measure, tell
from oracle.mutants.planted import FAULTS
from oracle.references.arithmetic import Arithmetic, precision_of
from oracle.references.bound import roundoff
from oracle.references.emulator import emulate
from oracle.references.rounding import DTYPES
from oracle.trial import Seen

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "study.md"
SOURCES = ("references/*.py", "oracle/mutants/planted.py", "kernels/emulated.py", "oracle/measure.py", "ci/study.py")
PAGE = 16
HEADS, KV_HEADS, ROWS, KEYS, DIM = 4, 2, 128, 1024, 128
SEEDS = (1, 2, 3, 4, 5)  # of the terms that are validated by themselves
LOOSE = 0.05  # RMS e under which the bound of a correct kernel is called loose
PLAIN = Precision()
E4M3_P = Precision(p_format="e4m3", p_scale=256.0)


def source_sha256() -> str:
    """SHA-256 over the names and bytes of everything that the tables depend on: docs/study.md states it, a test compares it."""
    total = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            total.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return total.hexdigest()


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


def _channels(draw: Draw) -> Inputs:
    q, k, v = draw.qkv()
    k[..., :: DIM // 4] += 12.0
    return Inputs(q=q, k=k, v=v)


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
EXTRA = {"k-channels": ("four channels of K are 12 larger than the others", _channels)}  # what smoothing K is for
HUGE = "logits-1e36"  # only a kernel that subtracts first gets through this one


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return Inputs(q=q, k=k, v=v)


def _with_v(draw: Draw, values: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v = draw.qkv()
    return Inputs(q=q, k=k, v=values(v))


def _long(draw: Draw) -> Inputs:
    return Inputs(q=draw.normal(2, 32, DIM), k=draw.normal(1, 32768, DIM), v=draw.normal(1, 32768, DIM))


def draw_call(name: str, seed: int, dtype: str = "bf16") -> Call:
    """The input called `name`; an input's numbers depend on its name and the seed alone."""
    word = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word[:6], "little"))
    return (DISTRIBUTIONS | EXTRA)[name][1](Draw(generator)).call(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the rules say of one kernel on one input."""

    e: float
    e_det: float
    e_lse: float
    e_lse_averaged: float  # with 3 eps_exp P2g in B_lse, as if exp's errors were independent
    rms: float
    z: float  # largest |z| of the three slopes
    slopes: tuple[str, ...]  # those that fire
    gain: float

    @property
    def caught(self) -> bool:
        """Whether any rule rejects."""
        return not (self.e <= 1 and self.e_lse <= 1) or bool(self.slopes)

    @property
    def caught_averaged(self) -> bool:
        """The same with `e_lse_averaged` in the place of `e_lse`."""
        return not (self.e <= 1 and self.e_lse_averaged <= 1) or bool(self.slopes)


@dataclass(slots=True)
class Bench:
    """One input, and its exact answer under each contract that is asked for."""

    name: str
    call: Call
    rows: Tensor
    truths: dict[Precision, Truth] = field(default_factory=dict)

    def truth(self, precision: Precision) -> Truth:
        """The exact answer, bounded by `precision`."""
        if precision not in self.truths:
            dtype = next(name for name, d in DTYPES.items() if d == self.call.q.dtype)
            constants = roundoff(precision, dtype=dtype, out_dtype=dtype, scaled=False)
            self.truths[precision] = tell(self.call, self.rows, constants, qk_block=precision.qk_block)
        return self.truths[precision]

    def judge(self, result: tuple[Tensor, Tensor], precision: Precision) -> Judged:
        """What the rules of `oracle accept` say of a result (out, lse), this input being all that there is."""
        truth = self.truth(precision)
        m = measure(truth, self.call, *result)
        findings, slopes = slope_findings([_seen(self.name, self.call, m)], Record(precision=precision))
        b, x, r = truth.bound, truth.exact, truth.roundoff
        averaged = b.b_lse + 1.05 * r.eps_exp * (3 * x.p2g - 1)
        error = torch.where(torch.isfinite(result[1]), (result[1].double() - x.lse).abs(), math.inf)
        return Judged(
            e=math.inf if m.not_finite else m.worst.units,
            e_det=m.worst_det,
            e_lse=m.worst_lse.units if m.worst_lse else math.inf,
            e_lse_averaged=float((error / averaged)[~x.empty].max()),
            rms=m.rms,
            z=max(abs(s["z"]) for s in slopes.values()),
            slopes=tuple(str(f.reason) for f in findings),
            gain=slopes["gain"]["beta"],
        )


def _seen(name: str, call: Call, measured: Measured) -> Seen:
    """The measure as one case of a trial, for the rules of the slopes."""
    family = Family(
        name=name, q_heads=call.q.shape[1], kv_heads=call.k_cache.shape[2], head_dim=call.q.shape[2],
        head_dim_v=call.v_cache.shape[3], scale=call.softmax_scale, softcap=call.softcap,
    )  # fmt: skip
    case = Case(name=name, family=family, q_lens=(call.q.shape[0],), kv_lens=(int(call.seqused_k[0]),), inputs=name)
    return Seen(
        case=case, candidate=measured, incumbent=None, same_bits=None, findings=(), fills=(), calls=1, seconds=0.0, far_from_fp32=0.0
    )  # fmt: skip


def bench(name: str, seed: int, dtype: str = "bf16", every: int = 1) -> Bench:
    """The input called `name`, judged at every `every`-th row."""
    call = draw_call(name, seed, dtype)
    return Bench(name, call, torch.arange(every - 1, call.q.shape[0], every))


def correct_kernels() -> dict[str, Arithmetic]:
    """The variants that keep the default contract, but for where the row sum is taken."""
    plain = [replace(precision_of(a), row_sum="before", subtract_first=False) for a in VARIANTS.values()]
    return {
        name: a for (name, a), p in zip(VARIANTS.items(), plain, strict=True)
        if p.qk_format is None and p.v_format is None and p.p_format != "e4m3"
    }  # fmt: skip
