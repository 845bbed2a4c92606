"""Input classes: what q, k and v look like.

A class aims at a standard deviation of the logits, whatever the family's scale, so that a class called flat is flat in every
family.  Each function fills packed q (total_q, q_heads, d), k and v (total_k, kv_heads, d or d_v), float32, before rounding
to the case's format and before dequantisation scales are taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oracle.cases import Case
from oracle.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """For each live query row, its keys as a range of the packed keys.  All (total_q,) int64."""

    lo: Tensor
    hi: Tensor


@dataclass(slots=True)
class Draw:
    """What a class works with: the case's shapes, its random stream and the keys each row sees."""

    case: Case
    visible: Visible
    stream: Stream

    def q(self) -> Tensor:
        f = self.case.family
        return self.stream.normal(self.case.total_q, f.q_heads, f.head_dim)

    def k(self) -> Tensor:
        f = self.case.family
        return self.stream.normal(self.case.total_k, f.kv_heads, f.head_dim)

    def v(self) -> Tensor:
        f = self.case.family
        return self.stream.normal(self.case.total_k, f.kv_heads, f.head_dim_v)

    def size(self, deviation: float) -> float:
        """What to multiply unit-variance q and k by, each, for logits of this standard deviation."""
        f = self.case.family
        return math.sqrt(deviation / (abs(f.scale) * math.sqrt(f.head_dim)))

    def index_in_sequence(self) -> Tensor:
        """Position of each packed key in its sequence, (total_k,) int64."""
        return torch.cat([torch.arange(n) for n in self.case.kv_lens]) if self.case.kv_lens else torch.zeros(0, dtype=torch.int64)

    def per_query_head(self, k: Tensor) -> Tensor:
        """k with its heads repeated for the query heads of their group."""
        return k.repeat_interleave(self.case.family.group, 1)


QKV = tuple[Tensor, Tensor, Tensor]


def _sum_squares(x: Tensor) -> Tensor:
    """Sum of x^2 over the last axis, kept, float64, by halves: the order in which torch adds differs between processors."""
    total = x.double().square()
    while (n := total.shape[-1]) > 1:
        half = n // 2
        total = torch.cat([total[..., :half] + total[..., half : 2 * half], total[..., 2 * half :]], -1)
    return total


def _rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis, kept, float64."""
    return (_sum_squares(x) / x.shape[-1]).sqrt()


def _plain(deviation: float, v_size: float = 1.0) -> Callable[[Draw], QKV]:
    def fill(draw: Draw) -> QKV:
        a = draw.size(deviation)
        return draw.q() * a, draw.k() * a, draw.v() * v_size

    return fill


def _large_logits(draw: Draw) -> QKV:
    """k of a size that e4m3 holds without a scale; q has the rest."""
    a = draw.size(3e4)
    of_k = min(a, 90.0)
    return draw.q() * (a * a / of_k), draw.k() * of_k, draw.v()


def _outliers(draw: Draw) -> QKV:
    """N(0, 1) + N(0, 100) with probability 1/1000: FlashAttention-3, Table 3."""

    def spiked(x: Tensor) -> Tensor:
        return x + 10.0 * draw.stream.normal(*x.shape) * (draw.stream.uniform(*x.shape) < 0.001)

    a = draw.size(1.0)
    return spiked(draw.q()) * a, spiked(draw.k()) * a, spiked(draw.v())


def _channel_outliers(draw: Draw) -> QKV:
    """A few channels of k carry a large constant, as in trained models; smoothing k takes it off."""
    a, k = draw.size(1.0), draw.k()
    k[..., :: max(1, k.shape[-1] // 4)] += 12.0
    return draw.q() * a, k * a, draw.v()


def _swept(draw: Draw, heads: int) -> Tensor:
    """One of its keys for each live row and head, packed (total_q, heads) int64.

    Multiples of the golden ratio leave no gap: n pairs of a sequence, counted from its end, meet every run of 2/n of the keys
    that all of its rows see, and the first of them meets the last key.
    """
    lengths, parts = list(draw.case.q_lens), [torch.zeros(0, heads, dtype=torch.int64)]
    for lo, hi in zip(torch.split(draw.visible.lo, lengths), torch.split(draw.visible.hi, lengths), strict=True):
        first, last = (int(lo.min()), int(hi.max())) if len(lo) else (0, 0)
        pair = torch.arange(len(lo)).flip(0)[:, None] * heads + torch.arange(heads)
        at = last - 1 - (pair.double() * 0.6180339887498949 % 1.0 * (last - first)).long()
        start, size = lo[:, None], (hi - lo).clamp(min=1)[:, None]
        beyond = (at >= hi[:, None]) & (at < hi[:, None] + size)  # past the diagonal: the row's own key stands in
        parts.append(start + torch.where(beyond, size - 1, (at - start) % size))
    return torch.cat(parts)


def _towards(draw: Draw, share: float, logit: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k of unit size, and packed indices of the key that each query is pulled to with the given logit (share of rows)."""
    q, k = draw.q(), draw.k()
    lo, hi = draw.visible.lo, draw.visible.hi
    rows, heads = q.shape[:2]
    if k.shape[0] == 0:
        return q, k, torch.zeros(rows, heads, dtype=torch.int64)
    at = _swept(draw, heads).clamp(max=k.shape[0] - 1)
    kv_head = torch.arange(heads) // draw.case.family.group
    target = k[at, kv_head]
    pulled = (draw.stream.uniform(rows, heads) < share) & (hi > lo)[:, None]
    scale = draw.case.family.scale
    norm2 = _sum_squares(target)
    q = torch.where(pulled[..., None], (target.double() * (logit / (scale * norm2))).float(), q * draw.size(1.0) ** 2)
    return q, k, at


def _one_hot(draw: Draw) -> QKV:
    """Half the rows point at one key of theirs with a logit of 40, the others are random."""
    q, k, _ = _towards(draw, 0.5, 40.0)
    return q, k, draw.v()


def _needle(draw: Draw) -> QKV:
    """Every row points at one key with a logit of 90: the output is that key's v, so the rows read the whole page table."""
    q, k, _ = _towards(draw, 1.0, 90.0)
    return q, k, draw.v()


def _constant_v(draw: Draw) -> QKV:
    a = draw.size(1.0)
    return draw.q() * a, draw.k() * a, torch.full_like(draw.v(), 0.7109375)


def _ones_v(draw: Draw) -> QKV:
    """V = 1: the output is 1, whatever the weights; numerator against denominator."""
    a = draw.size(2.0)
    return draw.q() * a, draw.k() * a, torch.ones_like(draw.v())


def _offset_v(draw: Draw) -> QKV:
    a = draw.size(1.0)
    return draw.q() * a, draw.k() * a, 8.0 + 0.5 * draw.v()


def _cancel_v(draw: Draw) -> QKV:
    """Large values of alternating sign that cancel under nearly flat weights."""
    a = draw.size(0.3)
    sign = 1.0 - 2.0 * (draw.index_in_sequence() % 2).float()
    return draw.q() * a, draw.k() * a, sign[:, None, None] * (16.0 + 0.25 * draw.v())


def _positive_v(draw: Draw) -> QKV:
    a = draw.size(1.0)
    return draw.q() * a, draw.k() * a, draw.v().abs()


def _first_token(draw: Draw) -> QKV:
    """The first key takes most of the weight and carries almost nothing: an attention sink among the tokens."""
    f = draw.case.family
    a = draw.size(1.0)
    q, k, v = draw.q() * a, draw.k() * a, draw.v()
    u = _direction(draw, f.kv_heads, f.head_dim)
    first = draw.index_in_sequence() == 0
    c = math.sqrt(12.0 / abs(f.scale))
    q = q + c * draw.per_query_head(u[None])
    k[first] = c * u * (1.0 if f.scale > 0 else -1.0)
    v[first] *= 0.02
    return q, k, v


def _direction(draw: Draw, heads: int, dim: int) -> Tensor:
    """A unit vector per head, float32 (heads, dim)."""
    u = draw.stream.normal(heads, dim).double()
    return (u / _sum_squares(u).sqrt()).float()


def _shifted(logit: float) -> Callable[[Draw], QKV]:
    """All logits of a row near `logit`, with a standard deviation of 1: the LSE leaves exp's range when it is not shifted."""

    def fill(draw: Draw) -> QKV:
        f = draw.case.family
        a = draw.size(1.0)
        u = _direction(draw, f.kv_heads, f.head_dim)
        c = 0.5 / (abs(f.scale) * a)  # of q along u: the noise of k along u then moves the logits by 0.5
        offset = logit / (f.scale * c)
        return draw.q() * a + c * draw.per_query_head(u[None]), draw.k() * a + offset * u, draw.v()

    return fill


def _qk_norm(draw: Draw) -> QKV:
    """q and k RMS-normed with gains, scale as the family has it: unscaled families get their native, nearly one-hot softmax."""
    gain = 1.0 + 0.3 * draw.stream.normal(draw.case.family.head_dim)

    def normed(x: Tensor) -> Tensor:
        x = x.double()
        return (x / _rms(x)).float() * gain

    return normed(draw.q()), normed(draw.k() + 0.5 * draw.stream.normal(draw.case.family.head_dim)), draw.v()


def _ties(draw: Draw) -> QKV:
    """Only eight different keys: the roundings of P are coherent."""
    f = draw.case.family
    a = draw.size(1.0)
    few = draw.stream.normal(8, f.kv_heads, f.head_dim)
    return draw.q() * a, few[draw.index_in_sequence() % 8] * a, 2.0 + draw.v()


def _probe_v(draw: Draw) -> QKV:
    """Column c of v marks the c-th block of keys: the output reads out the weight of every block."""
    a, v = draw.size(0.5), torch.zeros_like(draw.v())
    lengths = torch.repeat_interleave(torch.tensor(draw.case.kv_lens, dtype=torch.int64), torch.tensor(draw.case.kv_lens))
    column = draw.index_in_sequence() * v.shape[-1] // lengths.clamp(min=1)
    v[torch.arange(v.shape[0]), :, column] = 1.0
    return draw.q() * a, draw.k() * a, v


def _tiny_v(draw: Draw) -> QKV:
    """v so small that outputs are subnormal."""
    a, v = draw.size(1.0), draw.v()
    top = {"fp16": -16, "bf16": -124, "fp32": -124}[draw.case.dtype]
    exponent = (draw.stream.integers(-10, 1, v.numel()) + top).reshape(v.shape)
    return draw.q() * a, draw.k() * a, torch.from_numpy(np.ldexp(v.numpy(), exponent.numpy()))


def _huge_logits(draw: Draw) -> QKV:
    a = draw.size(1e36)
    return draw.q() * a, draw.k() * a, draw.v()


def _shared_kv(draw: Draw) -> QKV:
    """K and V of one projection, as in Gemma 4's global layers: both RMS-normed, K times a weight; a quarter of K rotated.

    The unrotated three quarters of K are v times `k_norm_weight`, but for the rounding of both.
    """
    f = draw.case.family
    q, _, _ = _qk_norm(draw)
    raw = draw.v().double()
    normed = raw / _rms(raw)
    k = normed * k_norm_weight(draw.case).double()
    quarter = f.head_dim // 4
    half = quarter // 2
    one, two = k[..., :half].clone(), k[..., half : 2 * half].clone()
    k[..., :half], k[..., half : 2 * half] = 0.8 * one - 0.6 * two, 0.6 * one + 0.8 * two
    return q, k.float(), normed.float()


def k_norm_weight(case: Case) -> Tensor:
    """K's norm weight of the input class "shared-kv", (head_dim,) float32."""
    return 1.0 + 0.3 * Stream(case.seed, "k_norm_weight").normal(case.family.head_dim)


@dataclass(frozen=True, slots=True)
class InputClass:
    """An input distribution."""

    fill: Callable[[Draw], QKV]
    about: str  # one line: what it is and what it shows


SHIFTS = {"shifted-down": -150.0, "shifted-up": 150.0}  # what the logits of a class lie round; sinks lie with them

INPUT_CLASSES: dict[str, InputClass] = {
    "randn": InputClass(_plain(1.0), "N(0, 1): logits of standard deviation 1"),
    "flat": InputClass(_plain(0.05), "logits of standard deviation 0.05: nearly equal weights"),
    "peaked": InputClass(_plain(8.0), "logits of standard deviation 8: a few keys take most"),
    "x10": InputClass(_plain(100.0, 10.0), "q, k and v ten times larger: logits of standard deviation 100"),
    "logits-3e4": InputClass(_large_logits, "logits of standard deviation 30,000: the largest near what the contract allows"),
    "logits-3e3": InputClass(_plain(3000.0), "logits of standard deviation 3000: one-hot, with large numbers to subtract"),
    "outliers": InputClass(_outliers, "N(0, 1) + N(0, 100) with probability 1/1000: FlashAttention-3, Table 3"),
    "k-channels": InputClass(
        _channel_outliers, "a few channels of k carry a large constant, as in trained models; smoothing k takes it off"
    ),
    "one-hot": InputClass(_one_hot, "half the rows point at one key of theirs with a logit of 40, the others are random"),
    "needle": InputClass(
        _needle,
        "every row points at one key with a logit of 90: the output is that key's v, so the rows read the whole page table",
    ),
    "constant-v": InputClass(_constant_v, "v = 0.7109375 everywhere"),
    "ones-v": InputClass(_ones_v, "v = 1: the output is 1 whatever the weights; numerator against denominator"),
    "offset-v": InputClass(_offset_v, "v = 8 + 0.5 N(0, 1)"),
    "positive-v": InputClass(_positive_v, "v = |N(0, 1)|: lost weight shows as a gain"),
    "cancel-v": InputClass(_cancel_v, "large values of alternating sign that cancel under nearly flat weights"),
    "probe-v": InputClass(_probe_v, "column c of v marks the c-th block of keys: the output reads out the weight of every block"),
    "first-token": InputClass(
        _first_token, "the first key takes most of the weight and carries almost nothing: an attention sink among the tokens"
    ),
    "shifted-down": InputClass(
        _shifted(SHIFTS["shifted-down"]), "all logits of a row near -150: exp underflows where it is not shifted"
    ),
    "shifted-up": InputClass(
        _shifted(SHIFTS["shifted-up"]), "all logits of a row near 150: exp overflows where it is not shifted"
    ),
    "qk-norm": InputClass(_qk_norm, "q and k RMS-normed with gains: unscaled families get their native, nearly one-hot softmax"),
    "ties": InputClass(_ties, "only eight different keys: the roundings of P are coherent"),
}

# Judged only where the record promises what they need.
PROMISED_CLASSES: dict[str, InputClass] = {
    "tiny-v": InputClass(_tiny_v, "v so small that outputs are subnormal; only for kernels that promise not to flush them"),
    "logits-1e36": InputClass(_huge_logits, "|logit| far beyond 2^20; only for kernels that promise to subtract first"),
}

LOGIT_LIMIT = 2.0**20  # live |logit| at most, by the contract, but for "logits-1e36"

# Judged only for kernels that ask for what travels with them as case extras.
EXTRA_CLASSES: dict[str, InputClass] = {
    "shared-kv": InputClass(
        _shared_kv, "K is V times a norm weight but for its rotated quarter; only for kernels that ask for the weight"
    )
}
EXTRAS: dict[str, Callable[[Case], dict[str, Tensor]]] = {
    "shared-kv": lambda case: {"k_norm_weight": k_norm_weight(case)},
}
EXTRA_NAMES = {"shared-kv": ("k_norm_weight",)}
