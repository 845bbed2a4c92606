"""The host side of the Triton kernels that keep the whole contract: what they refuse, and what all of them are launched with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Answer, Call, DeclaredKernel, Precision, Record, contract_kernel
from oracle.kernels.triton_language import INTERPRETED

NO_LIMIT = 2**30  # a window bound that no sequence reaches and that int32 sums survive
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call that has something to compute, as a kernel is launched for it."""

    call: Call
    keys: int  # of a key tile
    dim_pad: int  # head_dim, as wide as a tile of K
    dim_v_pad: int  # head_dim_v, as wide as a tile of V
    arguments: dict[str, Any]  # what every kernel takes, by parameter

    def tiles(self, rows: int) -> int:
        """Tiles of so many query rows, at least as many as the sequences fill."""
        q = self.call.q
        return q.shape[0] * q.shape[1] // self.call.k_cache.shape[2] // rows + self.call.live_seqs


def padded(size: int) -> int:
    """The columns of a tile that holds `size`: a power of two, and at least 16, the least that `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length())


def key_tile(dim_pad: int, itemsize: int) -> int:
    """Keys of a tile: 64, or as many as 64 KiB of shared memory hold, and at least 16, the least that `tl.dot` takes.

    The order of sums hangs on it, so it follows from the call alone and never from the tiling.
    """
    return min(64, max(16, 2**16 // (dim_pad * itemsize)))


def as_bytes(cache: Tensor) -> Tensor:
    """An e4m3 cache as uint8, which masked loads can fill with 0 on every target; any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _bound(limit: int) -> int:
    """One side of the window as a kernel takes it, where -1 and huge limits are `NO_LIMIT`."""
    return NO_LIMIT if limit < 0 else min(limit, NO_LIMIT)


def _head_scale(scale: Tensor | float | None, seqs: int, kv_heads: int) -> tuple[float, Tensor | None]:
    """A dequantisation scale as a factor for all heads and, where it is a tensor, (at least seqs, kv_heads) float32."""
    if scale is None:
        return 1.0, None
    if not isinstance(scale, Tensor):
        return float(scale), None
    return 1.0, scale.float() if scale.dim() == 2 else scale.float().expand(seqs, kv_heads)


def _check(who: str, call: Call, dtypes: tuple[str, ...]) -> None:
    """Raises: ValueError or RuntimeError where the kernel cannot do what it is asked."""
    q = call.q
    if q.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{who}: got tensors on the CPU, but Triton was set up to compile for a GPU; "
            "set TRITON_INTERPRET=1 before Triton is first imported"
        )
    if q.dtype not in (DTYPES[name] for name in dtypes):
        raise ValueError(f"{who}: q has dtype {q.dtype}, expected {' or '.join(dtypes)}")
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            raise ValueError(f"{who}: {name} has dtype {cache.dtype}, expected {q.dtype} or float8_e4m3fn")


def launch_for(call: Call, out: Tensor, lse: Tensor | None) -> Launch:
    """The launch that writes the call's answer to `out` and `lse`."""
    _, q_heads, dim = call.q.shape
    _, page_size, kv_heads, dim_v = call.v_cache.shape
    seqs = call.live_seqs
    (q_factor, q_scale), (k_factor, k_scale), (v_factor, v_scale) = (
        _head_scale(scale, seqs, kv_heads) for scale in (call.q_scale, call.k_scale, call.v_scale)
    )
    left, right = call.window_size
    table_stride, table_step = call.page_table.stride()
    arguments = {
        "q_ptr": call.q,
        "out_ptr": out,
        "lse_ptr": lse,
        "cu_ptr": call.cu_seqlens_q.contiguous(),
        "used_ptr": call.seqused_k.contiguous(),
        "table_ptr": call.page_table,
        "sinks_ptr": None if call.sinks is None else call.sinks.contiguous(),
        "q_scale_ptr": q_scale,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "q_strides": call.q.stride(),
        "k_strides": call.k_cache.stride(),
        "v_strides": call.v_cache.stride(),
        "out_strides": out.stride(),
        "q_scale_strides": (0, 0) if q_scale is None else q_scale.stride(),
        "k_scale_strides": (0, 0) if k_scale is None else k_scale.stride(),
        "v_scale_strides": (0, 0) if v_scale is None else v_scale.stride(),
        "table_stride": table_stride,
        "table_step": table_step,
        "seqs": seqs,
        "scale": call.softmax_scale * q_factor * k_factor,
        "out_scale": v_factor,
        "softcap": call.softcap,
        "left": _bound(left),
        "right": 0 if call.causal else _bound(right),
        "HEADS": q_heads,
        "GROUP": q_heads // kv_heads,
        "DIM": dim,
        "DIM_V": dim_v,
        "PAGE": page_size,
        "SEQS": max(256, 1 << (seqs - 1).bit_length()),  # one program for batches of all usual sizes
        "LEFT": left >= 0,
        "SOFTCAP": call.softcap != 0.0,
    }
    dim_pad, dim_v_pad = padded(dim), padded(dim_v)
    keys = key_tile(max(dim_pad, dim_v_pad), call.q.element_size())
    return Launch(call=call, keys=keys, dim_pad=dim_pad, dim_v_pad=dim_v_pad, arguments=arguments)


def triton_kernel(
    name: str,
    what: str,
    start: Callable[[Launch], None],
    *,
    who: str,
    dtypes: tuple[str, ...],
    precision: Precision,
    lacks: Collection[str] = (),
    declares: Mapping[str, Any] | None = None,
) -> DeclaredKernel:
    """A kernel of the contract that takes every argument but those it `lacks` and runs by `start`; `who` names it in errors.

    Its record is that of all such kernels, but for the fields that it `declares` itself.  It reads no plan on the host, so a
    CUDA graph may replay it.
    """

    def run(call: Call, return_lse: bool) -> Answer:
        _check(who, call, dtypes)
        total_q, q_heads, _ = call.q.shape
        result = call.q.new_empty(total_q, q_heads, call.v_cache.shape[3]) if call.out is None else call.out
        lse = call.q.new_empty(total_q, q_heads, dtype=torch.float32) if return_lse else None
        if call.live_seqs and total_q:
            start(launch_for(call, result, lse))
        return result if lse is None else (result, lse)

    run.__doc__ = what
    record = Record(
        dtypes=dtypes,
        cache_dtypes=("e4m3",),
        head_dims=(40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576),
        uneven_head_dims=((96, 64), (128, 256), (192, 128), (576, 512)),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        devices=("cpu",) if INTERPRETED else ("cuda",),
        precision=precision,
        interpreted=bool(INTERPRETED),
    )
    return contract_kernel(replace(record, **(declares or {})), lacks=lacks, name=name)(run)
