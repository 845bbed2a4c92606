"""8-bit attention in torch: `oracle.kernels.eight_bit:int8_token` and its kin, on the CPU fast enough to run inside whole models.

Each row of ATTENTIONS has the scales and the codes of q, k and v that a GPU kernel would have, bit for bit
(`oracle.kernels.quantised`), and rounds P tile by tile against the running maximum, as an online softmax does.  The rest is
float32, to nearest: sums of int8 products are exact (head_dim <= 576 keeps them below 2^24), sums of E4M3 products and P.V
are rounded in whatever order the matrix library adds.  No accumulator narrower than float32 is emulated here
(`oracle.references.arithmetic` has one), nor a tile order other than from the first key to the last.

Statistics are taken over what the call's plan declares live: all rows of q, and all keys, also those that no window shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, DeclaredKernel, Precision, Record, contract_kernel
from oracle.kernels.quantised import (
    EightBit,
    Quantised,
    block_peaks,
    mean_token,
    quantise,
    rotate,
    round_e4m3,
    token_peaks,
)

Q_BLOCK, K_BLOCK = 128, 64  # rows of q and keys that share a scale in block schemes: SageAttention's BLKQ and BLKK
_TILE = 64  # keys between two looks at the running maximum
_SCORES = 1 << 17  # scores in hand at once: 512 KiB, what stays in the cache
_ROWS, _MOST = 16, 1 << 21  # fewer rows than this make slow matrix products: as many all the same, up to 8 MiB of scores
_NO_LIMIT = 2**30  # a window bound that no sequence reaches and that int32 sums survive
_LOG2E = math.log2(math.e)
_WHOLE = 1024  # tokens of q and k said to share a scale where all of a sequence do: what the bound takes at a moderate price


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a kernel quantises, and which numbers share a scale.

    "token": one token and head; "block": a block of tokens of a head; "channel": one channel of a kv head over a sequence;
    "head": a kv head of a sequence, its query heads together; "tensor": the whole call.
    """

    about: str
    qk_format: EightBit
    qk_scale: Literal["token", "block", "head", "tensor"]
    smooth_k: bool = False  # a sequence's mean key is taken off k before it is quantised
    rotated: bool = False  # q and k are turned by a Hadamard transform with random signs before they are quantised
    v_scale: Literal["block", "channel", "head", "tensor"] | None = None  # v in E4M3; None = v as it is
    p_scale: float | None = None  # P in E4M3, multiplied by this before; None = P in the format of q


# P in E4M3: FlashAttention-3 takes exp2 of 8 more (Dao-AILab/flash-attention, hopper/softmax.h, Max_offset), SageAttention2
# of 8.807 more (thu-ml/SageAttention, csrc/qattn/attn_utils.cuh, S_FP8_OFFSET): 256 and 447.9 times P.
ATTENTIONS: dict[str, Scheme] = {
    "int8-token": Scheme(
        about="q and smoothed k in int8, a scale for each token and head", qk_format="int8", qk_scale="token", smooth_k=True
    ),
    "int8-block": Scheme(
        about="q and smoothed k in int8, a scale for 128 rows and for 64 keys: SageAttention",
        qk_format="int8",
        qk_scale="block",
        smooth_k=True,
    ),
    "int8-block-v8": Scheme(
        about="the same, with v in E4M3 by channels and P in E4M3: SageAttention2",
        qk_format="int8",
        qk_scale="block",
        smooth_k=True,
        v_scale="channel",
        p_scale=2.0**8.807,
    ),
    "fp8-tensor": Scheme(
        about="q, k, v and P in E4M3, one scale for the whole of each tensor",
        qk_format="e4m3",
        qk_scale="tensor",
        v_scale="tensor",
        p_scale=256.0,
    ),
    "fp8-head": Scheme(
        about="q, k, v and P in E4M3, a scale for each sequence and kv head: FlashAttention-3",
        qk_format="e4m3",
        qk_scale="head",
        v_scale="head",
        p_scale=256.0,
    ),
    "fp8-block": Scheme(
        about="q, k, v and P in E4M3, a scale for 128 rows and for 64 keys",
        qk_format="e4m3",
        qk_scale="block",
        v_scale="block",
        p_scale=256.0,
    ),
    "fp8-block-hadamard": Scheme(
        about="as fp8-block, q and k turned by a Hadamard transform first",
        qk_format="e4m3",
        qk_scale="block",
        rotated=True,
        v_scale="block",
        p_scale=256.0,
    ),
    "fp8-hadamard": Scheme(
        about="as fp8-head, q and k turned by a Hadamard transform first",
        qk_format="e4m3",
        qk_scale="head",
        rotated=True,
        v_scale="head",
        p_scale=256.0,
    ),
}


class _Peaks(NamedTuple):
    """The largest magnitudes of the whole call's live q, k and v, float32 scalars."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """One sequence, quantised: G query heads to each of H kv heads; keys from `start`, padded with zeros to whole tiles."""

    q: Tensor  # (H, G, rows, head_dim) float32: codes
    factor: Tensor  # (H, G, rows, 1): what the scores are multiplied by, softmax_scale and the scale of q included
    raw: Tensor  # (H, G, rows, head_dim): q as it is
    mean: Tensor | None  # (H, head_dim, 1) float64: the mean key, where it was taken off k
    k: Tensor  # (H, keys, head_dim) float32: codes
    k_scale: Tensor | None  # (H, 1, keys): where keys have scales of their own; else it is in `factor`
    v: Tensor  # (H, keys, head_dim_v) float32: codes, or v itself
    tile_scale: Tensor | None  # (H, 1, tiles): scales of v that differ between tiles
    v_scale: Tensor | None  # (H, 1, head_dim_v or 1): those that do not
    start: int  # the first key, at the start of a tile


def _live(cache: Tensor, call: Call, seq: int) -> Tensor:
    """All live keys of a sequence, gathered: (kv_heads, keys, dim), dtype of the cache."""
    kv_len = int(call.seqused_k[seq])
    pages = call.page_table[seq, : -(-kv_len // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:kv_len].transpose(0, 1)


def _call_peaks(call: Call) -> _Peaks:
    """The largest magnitudes over all live rows and keys; 0 where there are none."""
    zero = torch.zeros((), device=call.q.device)
    k = v = zero
    for seq, kv_len in enumerate(call.seqused_k[: call.live_seqs].tolist()):
        if kv_len > 0:
            k = torch.maximum(k, _live(call.k_cache, call, seq).abs().amax().float())
            v = torch.maximum(v, _live(call.v_cache, call, seq).abs().amax().float())
    q = call.q[: int(call.cu_seqlens_q[call.live_seqs])]
    return _Peaks(q.abs().amax().float() if q.numel() else zero, k, v)


def _operands(call: Call, scheme: Scheme, seq: int, rows: slice, keys: range, peaks: _Peaks | None) -> _Operands:
    """Everything of one sequence that the matrix products need; `keys`, whole tiles, holds every key that some row sees."""
    seen = slice(keys.start, keys.stop)
    q = call.q[rows].transpose(0, 1).reshape(call.k_cache.shape[2], -1, rows.stop - rows.start, call.q.shape[2])
    k, mean = _quantised_k(scheme, _live(call.k_cache, call, seq), seen, peaks)
    v = _live(call.v_cache, call, seq)
    v_codes = None if scheme.v_scale is None else _quantised_v(scheme, v, seen, peaks)
    q_codes = _quantised_q(scheme, q.float(), peaks)
    factor = q_codes.scale * call.softmax_scale
    own = scheme.qk_scale in ("token", "block")
    by_tile = scheme.v_scale == "block"
    return _Operands(
        q=q_codes.values,
        factor=(factor if own else factor * k.scale[:, None]).expand(*q.shape[:3], 1),
        raw=q,
        mean=None if mean is None else mean.transpose(1, 2).double(),
        k=_padded(k.values),
        k_scale=_padded(k.scale).transpose(1, 2) if own else None,
        v=_padded(v[:, seen].float() if v_codes is None else v_codes.values),
        tile_scale=v_codes.scale[:, ::_TILE].transpose(1, 2) if v_codes and by_tile else None,
        v_scale=v_codes.scale if v_codes and not by_tile else None,
        start=keys.start,
    )


def _quantised_q(scheme: Scheme, q: Tensor, peaks: _Peaks | None) -> Quantised:
    """All rows of a sequence, (H, G, rows, head_dim) float32, in 8 bits."""
    if scheme.rotated:
        q = rotate(q)
    if peaks is not None:
        peak = peaks.q.view(1, 1, 1, 1)
    elif scheme.qk_scale == "head":
        peak = q.abs().amax((1, 2, 3), keepdim=True)
    else:
        peak = token_peaks(q)
    return quantise(q, block_peaks(peak, Q_BLOCK) if scheme.qk_scale == "block" else peak, scheme.qk_format)


def _quantised_k(scheme: Scheme, k: Tensor, seen: slice, peaks: _Peaks | None) -> tuple[Quantised, Tensor | None]:
    """The keys `seen`, whole blocks, of all live ones (H, keys, head_dim) in 8 bits, and their mean (H, 1, head_dim) float32
    where it was taken off."""
    mean = mean_token(k).float() if scheme.smooth_k else None
    if scheme.qk_scale != "head":  # the scale of a head is that of all its keys
        k, seen = k[:, seen], slice(None)
    k = k.float() if mean is None else k.float().sub_(mean)
    if scheme.rotated:
        k = rotate(k)
    if peaks is not None:
        peak = peaks.k.view(1, 1, 1)
    elif scheme.qk_scale == "head":
        peak = k.abs().amax((1, 2), keepdim=True)
    else:
        peak = token_peaks(k)
    return quantise(k[:, seen], block_peaks(peak, K_BLOCK) if scheme.qk_scale == "block" else peak, scheme.qk_format), mean


def _quantised_v(scheme: Scheme, v: Tensor, seen: slice, peaks: _Peaks | None) -> Quantised:
    """The keys `seen`, whole blocks, of all live v (H, keys, head_dim_v) in E4M3."""
    wide = v[:, seen].float()
    if peaks is not None:
        peak = peaks.v.view(1, 1, 1)
    elif scheme.v_scale == "block":
        peak = block_peaks(token_peaks(wide), K_BLOCK)
    else:
        peak = v.abs().amax(1 if scheme.v_scale == "channel" else (1, 2), keepdim=True).float()
    return quantise(wide, peak, "e4m3")


def _padded(x: Tensor) -> Tensor:
    """`x` (H, keys, n) with zeros up to whole tiles."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % _TILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """Which keys the rows of one sequence see."""

    position: int  # of the first row; negative where there are more rows than keys
    kv_len: int
    left: int
    right: int

    def keys(self, rows: range) -> range:
        """From the first to the last key that some of `rows` see, in whole tiles; may end past the last key."""
        first = max(0, self.position + rows.start - self.left) // _TILE
        last = min(self.kv_len, self.position + rows.stop + self.right)
        return range(first * _TILE, -(-last // _TILE) * _TILE)

    def mask(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """0 where a row sees a key and -inf where not, (rows, keys) float32; None where all rows see all keys."""
        first, last = self.position + rows.start, self.position + rows.stop - 1
        if last - self.left <= keys.start and first + self.right >= keys.stop - 1 and keys.stop <= self.kv_len:
            return None
        key = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=device)
        ahead = key - torch.arange(first, last + 1, dtype=torch.int32, device=device)[:, None]
        hidden = (ahead < -self.left) | (ahead > self.right) | (key >= self.kv_len)
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)

    def steps(self, rows: range, heads: int) -> Iterator[range]:
        """`rows` in runs that make some _SCORES scores, or enough rows for a matrix product; one row at least."""
        start = rows.start
        while start < rows.stop:
            scores = heads * len(self.keys(range(start, start + 1)))  # of one row
            stop = min(rows.stop, start + max(1, _SCORES // scores, min(_ROWS, _MOST // scores)))
            yield range(start, stop)
            start = stop


def _attend(call: Call, scheme: Scheme, out: Tensor, lse: Tensor) -> None:
    """Fills the live rows of `out` (total_q, q_heads, head_dim_v) and of `lse` (total_q, q_heads) float32."""
    offsets = call.cu_seqlens_q[: call.live_seqs + 1].tolist()
    left, right = (_NO_LIMIT if limit < 0 else min(limit, _NO_LIMIT) for limit in call.window_size)
    right = 0 if call.causal else right
    peaks = _call_peaks(call) if scheme.qk_scale == "tensor" else None
    for seq, kv_len in enumerate(call.seqused_k[: call.live_seqs].tolist()):
        begin, end = offsets[seq], offsets[seq + 1]
        view = _Sequence(position=kv_len - (end - begin), kv_len=kv_len, left=left, right=right)
        # the rows before the first key see nothing; the last row sees its own
        blind = end - begin if kv_len == 0 else min(end - begin, max(0, -view.position - right))
        out[begin : begin + blind] = 0
        lse[begin : begin + blind] = -math.inf if call.sinks is None else call.sinks
        rows = range(blind, end - begin)
        if not rows:
            continue
        operands = _operands(call, scheme, seq, slice(begin, end), view.keys(rows), peaks)
        for step in view.steps(rows, call.q.shape[1]):
            mask = view.mask(step, view.keys(step), call.q.device)
            at = slice(begin + step.start, begin + step.stop)
            out[at], lse[at] = _rows(call, scheme, operands, step, view.keys(step), mask)


def _rows(call: Call, scheme: Scheme, x: _Operands, rows: range, keys: range, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (rows, q_heads, head_dim_v) and LSE (rows, q_heads), float32, of rows that see no key but `keys`.

    `mask` (rows, keys) is added to the scores.
    """
    of_rows = slice(rows.start, rows.stop)
    of_keys = slice(keys.start - x.start, keys.stop - x.start)
    of_tiles = slice(of_keys.start // _TILE, of_keys.stop // _TILE)
    kv_heads, group = x.q.shape[:2]
    s = torch.bmm(x.q[:, :, of_rows].flatten(1, 2), x.k[:, of_keys].transpose(1, 2))
    if x.k_scale is not None:
        s.mul_(x.k_scale[..., of_keys])
    factor = x.factor[:, :, of_rows].flatten(1, 2)
    # in float64, since nothing bounds it by the logits of smoothed keys; a GPU kernel that takes no LSE and no softcap leaves
    # it out
    offset = None
    if x.mean is not None:
        offset = torch.bmm(x.raw[:, :, of_rows].flatten(1, 2).double(), x.mean).mul_(call.softmax_scale).float()
    if call.softcap > 0:
        s.mul_(factor)
        if offset is not None:
            s.add_(offset)
            offset = None
        s.div_(call.softcap).tanh_().mul_(call.softcap)
        factor = torch.ones_like(factor)
    if mask is not None:
        s.view(kv_heads, group, len(rows), len(keys)).add_(mask)

    s = s.view(*s.shape[:2], -1, _TILE)
    exponent = (factor * _LOG2E).clamp_(min=torch.finfo(torch.float32).tiny)  # where it underflows, -inf times it is still -inf
    maximum = s.amax(-1).cummax(-1).values  # (kv_heads, group * rows, tiles)
    unseen = torch.isinf(maximum)  # no key yet: P is 0
    base = maximum.masked_fill(unseen, 0.0)
    p = s.sub_(base[..., None]).mul_(exponent[..., None]).exp2_()
    # an online softmax multiplies its sums by this, step by step, after it has rounded P
    rescaled = ((maximum - base[..., -1:]) * exponent).exp2_()
    total = (p.sum(-1) * rescaled).sum(-1, keepdim=True)
    p = _rounded(p, scheme, call.q.dtype)
    p.mul_((rescaled if x.tile_scale is None else rescaled * x.tile_scale[..., of_tiles])[..., None])
    out = torch.bmm(p.flatten(2), x.v[:, of_keys])
    out.div_(total.masked_fill(total == 0, 1.0) * (scheme.p_scale or 1.0))
    if x.v_scale is not None:
        out.mul_(x.v_scale)
    lse = base[..., -1:] * factor + total.log()
    if offset is not None:
        lse.add_(offset)
    out, lse = (t.view(kv_heads * group, len(rows), -1).transpose(0, 1) for t in (out, lse))
    lse = lse.squeeze(-1)
    if call.sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, call.sinks)
    return out * (lse - with_sink).exp()[..., None], with_sink


def _rounded(p: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """`p` as it enters P.V, float32, p_scale included; `p` may be overwritten."""
    if scheme.p_scale is None:
        return p.copy_(p.to(dtype))
    return round_e4m3(p.mul_(scheme.p_scale))


@dataclass(frozen=True, slots=True)
class SchemeAttention:
    """Attention by a scheme."""

    scheme: Scheme

    def __call__(self, call: Call, return_lse: bool) -> Answer:
        """The contract's result; rows past the plan are left as they are in `out`, and are undefined where there is no `out`."""
        rows = call.q.shape[:2]
        out = call.q.new_empty(*rows, call.v_cache.shape[-1]) if call.out is None else call.out
        lse = call.q.new_empty(rows, dtype=torch.float32)
        _attend(call, self.scheme, out, lse)
        return (out, lse) if return_lse else out


def record_of(scheme: Scheme) -> Record:
    """Everything that the kernels can do, at the precision of the scheme.

    `qk_block` is the nearest that the contract can say: rows of q and keys have one number there, and neither a scale that
    heads share, nor a whole sequence, nor a rotation can be told.
    """
    return Record(
        head_dims=(40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576),
        uneven_head_dims=((96, 64), (128, 256), (192, 128), (576, 512)),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        devices=("cpu", "cuda"),
        batch_invariant=scheme.qk_scale != "tensor",
        precision=Precision(
            p_format="input" if scheme.p_scale is None else "e4m3",
            p_scale=scheme.p_scale or 1.0,
            eps_exp=2.0**-21,
            qk_format=scheme.qk_format,
            qk_block={"token": 1, "block": Q_BLOCK, "head": _WHOLE, "tensor": _WHOLE}[scheme.qk_scale],
            smooth_k=scheme.smooth_k,
            v_format=None if scheme.v_scale is None else "e4m3",
        ),
    )


def kernel(name: str) -> DeclaredKernel:
    """The kernel of a row of ATTENTIONS, under its own name or that with underscores.  Raises KeyError for another name."""
    row = name.replace("_", "-")
    return contract_kernel(record_of(ATTENTIONS[row]), lacks=SCALES, name=row)(SchemeAttention(ATTENTIONS[row]))


def __getattr__(name: str) -> DeclaredKernel:
    if name.replace("_", "-") not in ATTENTIONS:
        raise AttributeError(f"module {__name__!r} has no kernel {name!r}; it has {', '.join(ATTENTIONS)}")
    return kernel(name)
