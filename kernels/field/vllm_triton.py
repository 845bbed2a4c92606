"""vLLM's Triton attention, `unified_attention`: prefill and decode over pages in one kernel.

Where every sequence has one query and there are few of them, vLLM gives it buffers and it splits the keys over 16 segments and
merges them; `unified` gives it none and takes the first path always, `split` gives them as vLLM does.  A window has no right
side; the kernel is causal here.  Rows before the first key, which vLLM never asks for, are answered with 0 by the adapter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.contract import SCALES, Call, DeclaredKernel, Precision, Record, contract_kernel

_SEGMENTS = 16  # vllm.v1.attention.backends.triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
_FEWEST_PROGRAMS = 128  # MIN_LAUNCH_GRID_SIZE_2D there


def _run(call: Call, split: bool) -> Tensor:
    """vLLM's kernel over the live sequences."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    starts = call.cu_seqlens_q[: call.live_seqs + 1]
    lens = call.seqused_k[: call.live_seqs]
    live = int(starts[-1])
    if not live:
        return out
    heads, kv_heads, dim = call.q.shape[1], call.k_cache.shape[2], call.q.shape[2]
    most_rows = int((starts[1:] - starts[:-1]).max())
    threshold = _FEWEST_PROGRAMS // kv_heads
    segments: list[Tensor | None] = [None, None, None]
    if split and most_rows == 1 and call.live_seqs <= threshold:
        width = 1 << (dim - 1).bit_length()
        shapes = ((live, heads, _SEGMENTS, width), (live, heads, _SEGMENTS), (live, heads, _SEGMENTS))
        segments = [torch.empty(shape, dtype=torch.float32, device=call.q.device) for shape in shapes]
    unified_attention(
        q=call.q[:live],
        k=call.k_cache,
        v=call.v_cache,
        out=out[:live],
        cu_seqlens_q=starts,
        max_seqlen_q=most_rows,
        seqused_k=lens,
        max_seqlen_k=int(lens.max()),
        softmax_scale=call.softmax_scale,
        causal=True,
        window_size=(call.window_size[0], 0) if call.window_size[0] >= 0 else (-1, -1),
        block_table=call.page_table,
        softcap=call.softcap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=_SEGMENTS,
        softmax_segm_output=segments[0],
        softmax_segm_max=segments[1],
        softmax_segm_expsum=segments[2],
        sinks=call.sinks,
    )
    rows = (starts[1:] - starts[:-1]).long()
    positions = torch.repeat_interleave(lens - rows - starts[:-1], rows) + torch.arange(live, device=starts.device)
    out[:live][positions < 0] = 0.0  # no key at or before it: vLLM never asks for such a row
    return out


def _kernel(name: str, split: bool) -> DeclaredKernel:
    def run(call: Call, _: bool) -> Tensor:
        return _run(call, split)

    run.__doc__ = f"Attention by vLLM's Triton kernel{', decode split over segments' if split else ''}."
    record = Record(
        head_dims=(64, 80, 96, 128, 256),
        page_sizes=(16, 32, 64, 128),
        devices=("cuda",),
        precision=Precision(eps_exp=2.0**-22, eps_tanh=2.0**-11, subtract_first=True),
    )
    return contract_kernel(record, lacks=(*SCALES, "causal", "return_lse"), name=name)(run)


unified = _kernel("unified", split=False)
split = _kernel("split", split=True)
