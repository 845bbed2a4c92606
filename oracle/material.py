"""What a case is made of, before it is laid out in pages: packed q, k, v in their formats, sinks and scales."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oracle.captured import load_capture, shipped
from oracle.cases import Case
from oracle.errors import InputError
from oracle.inputs import EXTRA_CLASSES, EXTRAS, INPUT_CLASSES, PROMISED_CLASSES, SHIFTS, Draw, Visible
from oracle.references.plan import visible
from oracle.streams import Stream

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
SCALE_CHOICES = (0.0234375, 0.171875, 0.4140625, 1.8125, 3.25, 5.5)  # far from 1 and from each other; exact in bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Packed inputs of one case.  Equal cases have equal bytes."""

    q: Tensor  # (total_q, q_heads, head_dim), live rows only
    k: Tensor  # (total_k, kv_heads, head_dim), dtype of the cache
    v: Tensor  # (total_k, kv_heads, head_dim_v)
    cu_q: Tensor  # (batch + 1,) int64 offsets of the sequences in q
    cu_k: Tensor  # (batch + 1,) int64 offsets of the sequences in k and v
    sinks: Tensor | None  # (q_heads,) float32
    q_scale: Tensor | float | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    extras: dict[str, Tensor]  # case extras by name

    def digest(self) -> str:
        """SHA-256 of all bytes: the same on every machine."""
        total = hashlib.sha256()
        for tensor in (self.q, self.k, self.v, self.sinks, self.q_scale, self.k_scale, self.v_scale, *self.extras.values()):
            if isinstance(tensor, Tensor):
                total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            else:
                total.update(repr(tensor).encode())
        return total.hexdigest()


def offsets(lengths: tuple[int, ...]) -> Tensor:
    """Prefix sums with a leading 0, (len + 1,) int64."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def visible_keys(case: Case) -> Visible:
    """The packed keys that each live query row sees, by the contract's rule."""
    q_lens, kv_lens = torch.tensor(case.q_lens, dtype=torch.int64), torch.tensor(case.kv_lens, dtype=torch.int64)
    seq = torch.repeat_interleave(q_lens)
    pos = kv_lens[seq] - q_lens[seq] + torch.arange(case.total_q) - offsets(case.q_lens)[seq]
    lo, hi = visible(pos, kv_lens[seq], causal=case.family.causal, window=case.family.window)
    start = offsets(case.kv_lens)[seq]
    return Visible(lo=lo + start, hi=hi + start)


def material(case: Case) -> Material:
    """The packed inputs of `case`.  Raises InputError for an unknown input class or an unreadable capture."""
    stream = Stream(case.seed, "scales")
    q, k, v, sinks = _captured(case) if case.inputs == "captured" else _drawn(case)
    seqs, heads = len(case.q_lens), case.family.kv_heads
    q_scale, k_scale, v_scale = (_scale(case, stream, seqs, heads) for _ in range(3))
    if case.scales.startswith("kv-"):
        q_scale = None
    if case.shared_prefix:
        k, v = _with_prefix(case, k), _with_prefix(case, v)
        k_scale, v_scale = (_scale_of_prefix(case, scale) for scale in (k_scale, v_scale))
    lengths = torch.tensor(case.kv_lens, dtype=torch.int64)
    rows = torch.tensor(case.q_lens, dtype=torch.int64)
    cache = TORCH_DTYPES[case.cache_dtype or case.dtype]
    k_scale, v_scale = (_fitting(scale, x, lengths, cache) for scale, x in ((k_scale, k), (v_scale, v)))
    return Material(
        q=_rounded(_unscaled(q, q_scale, rows, case.family.group), TORCH_DTYPES[case.dtype]),
        k=_rounded(_unscaled(k, k_scale, lengths, 1), cache),
        v=_rounded(_unscaled(v, v_scale, lengths, 1), cache),
        cu_q=offsets(case.q_lens),
        cu_k=offsets(case.kv_lens),
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        extras=EXTRAS[case.inputs](case) if case.inputs in EXTRAS else {},
    )


def _drawn(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    classes = INPUT_CLASSES | PROMISED_CLASSES | EXTRA_CLASSES
    if case.inputs not in classes:
        raise InputError(f"case {case.name}: no input class {case.inputs!r}; there are {', '.join(classes)}")
    draw = Draw(case, visible_keys(case), Stream(case.seed, f"inputs/{case.inputs}"))
    q, k, v = classes[case.inputs].fill(draw)
    return q, k, v, _sinks(case)


def _captured(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # a bare name is a capture that comes with the package
    capture = load_capture(shipped().get(case.captured.removesuffix(".safetensors"), Path(case.captured)))
    f, has = case.family, (capture.q.shape[1], capture.k.shape[1], capture.q.shape[2], capture.v.shape[2])
    if len(case.q_lens) != 1 or not case.total_q <= case.total_k <= capture.tokens:
        got = f"q_lens {case.q_lens} and kv_lens {case.kv_lens}"
        raise InputError(f"case {case.name}: {case.captured} holds one sequence of {capture.tokens} tokens, got {got}")
    if (f.q_heads, f.kv_heads, f.head_dim, f.head_dim_v) != has:
        raise InputError(
            f"case {case.name}: {case.captured} holds q heads, kv heads and head dims {has}; family {f.name} has others"
        )
    end = case.kv_lens[0]
    return capture.q[end - case.q_lens[0] : end], capture.k[:end], capture.v[:end], capture.sinks


def _with_prefix(case: Case, x: Tensor) -> Tensor:
    """`x` (total_k, heads, dim) where the keys that a sequence shares are those of sequence 0."""
    whole = x.clone()
    for start, count in zip(offsets(case.kv_lens).tolist(), case.shared, strict=False):
        whole[start : start + count] = x[:count]
    return whole


def _scale_of_prefix(case: Case, scale: Tensor | float | None) -> Tensor | float | None:
    """`scale` where a sequence that shares keys has the scales of sequence 0: a page has one meaning for all who read it."""
    if not isinstance(scale, Tensor) or scale.dim() < 2:
        return scale
    return torch.where(torch.tensor(case.shared)[:, None] > 0, scale[:1], scale)


def _sinks(case: Case) -> Tensor | None:
    """Sink logits: about one key's worth, more than all keys together, or below every logit."""
    if case.sinks == "none":
        return None
    centre = {"small": 0.0, "dominant": 12.0, "below": -60.0}[case.sinks]
    centre += SHIFTS.get(case.inputs, 0.0)
    return centre + Stream(case.seed, "sinks").normal(case.family.q_heads)


def _scale(case: Case, stream: Stream, seqs: int, heads: int) -> Tensor | float | None:
    kind = case.scales.removeprefix("kv-")
    if kind == "none":
        return None
    if kind == "scalar":
        return float(stream.choice(SCALE_CHOICES, 1))
    if kind == "per-head":
        return stream.choice(SCALE_CHOICES, heads)
    return stream.choice(SCALE_CHOICES, seqs * heads).reshape(seqs, heads)


def _unscaled(x: Tensor, scale: Tensor | float | None, lengths: Tensor, group: int) -> Tensor:
    """x divided by its dequantisation scale, so that the kernel's product has the size that the input class aims at."""
    if scale is None:
        return x
    if isinstance(scale, float):
        return x / scale
    per_token = scale.repeat_interleave(lengths, 0) if scale.dim() == 2 else scale.expand(x.shape[0], -1)
    return x / per_token.repeat_interleave(group, 1).unsqueeze(-1)


def _fitting(scale: Tensor | float | None, x: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor | float | None:
    """The scale times the least power of two under which x divided by it fits the format: clamped values would all be equal."""
    if scale is None or not x.numel():
        return scale
    over = float(_unscaled(x, scale, lengths, 1).abs().max()) / torch.finfo(dtype).max
    return scale * 2.0 ** math.frexp(over)[1] if over > 1 else scale


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)  # a conversion to e4m3 or fp16 would overflow
