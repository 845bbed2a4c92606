"""cuDNN's SDPA over a paged pool, by NVIDIA's cudnn-frontend: a graph for each shape, compiled by cuDNN and kept.

Queries are ragged (offsets in elements), keys and values are pages with a table each; the causal rule is cuDNN's bottom-right
band.  cuDNN takes the longest lengths as part of the graph; they are rounded up to powers of two, so that graphs are few.

Slots of the last page that hold no token are masked, but still take part in P.V, so they must be finite: a NaN there reaches the
output.  NVIDIA's documentation says so of ragged tensors, and of pages nothing; the record declares it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel


@cache
def _handle() -> Any:
    import cudnn

    return cudnn.create_handle()


@cache
def _graph(
    dtype: torch.dtype,
    batch: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    most: tuple[int, int],
    pool: tuple[int, int, int],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    scale: float,
    causal: bool,
    left: int,
) -> tuple[Any, dict[str, Any], int]:
    """(graph, its tensors by name, bytes of its workspace); `most` are the longest lengths, `pool` pages, size, table width."""
    import cudnn

    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(),
    )
    pages, size, width = pool
    dim, dim_v = dims
    rows_stride = (most[0] * heads[0] * dim, dim, heads[0] * dim, 1)
    integers = cudnn.data_type.INT32
    tensors = {
        "q": graph.tensor(name="q", dim=(batch, heads[0], most[0], dim), stride=rows_stride, data_type=kind),
        "k": graph.tensor(name="k", dim=(pages, heads[1], size, dim), stride=strides[0], data_type=kind),
        "v": graph.tensor(name="v", dim=(pages, heads[1], size, dim_v), stride=strides[1], data_type=kind),
        "q_lens": graph.tensor(name="q_lens", dim=(batch, 1, 1, 1), stride=(1, 1, 1, 1), data_type=integers),
        "kv_lens": graph.tensor(name="kv_lens", dim=(batch, 1, 1, 1), stride=(1, 1, 1, 1), data_type=integers),
        "ragged": graph.tensor(name="ragged", dim=(batch + 1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=integers),
        "table_k": graph.tensor(name="table_k", dim=(batch, 1, width, 1), stride=(width, width, 1, 1), data_type=integers),
        "table_v": graph.tensor(name="table_v", dim=(batch, 1, width, 1), stride=(width, width, 1, 1), data_type=integers),
    }
    tensors["q"].set_ragged_offset(tensors["ragged"])
    band = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}
    if causal:
        band["diagonal_band_right_bound"] = 0
    if left >= 0:
        band["diagonal_band_left_bound"] = left + 1  # cuDNN counts the token itself
    out, _ = graph.sdpa(
        name="sdpa",
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        is_inference=True,
        attn_scale=scale,
        use_padding_mask=True,
        seq_len_q=tensors["q_lens"],
        seq_len_kv=tensors["kv_lens"],
        paged_attention_k_table=tensors["table_k"],
        paged_attention_v_table=tensors["table_v"],
        paged_attention_max_seq_len_kv=most[1],
        **band,
    )
    out.set_output(True).set_dim((batch, heads[0], most[0], dim_v)).set_stride(
        (most[0] * heads[0] * dim_v, dim_v, heads[0] * dim_v, 1)
    )
    tensors["ragged_out"] = graph.tensor(name="ragged_out", dim=(batch + 1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=integers)
    out.set_ragged_offset(tensors["ragged_out"])
    tensors["out"] = out
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, tensors, int(graph.get_workspace_size())


def _power(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


@contract_kernel(
    Record(
        head_dims=(64, 128, 256, 512),
        page_sizes=(16, 32, 64, 128),
        groups=(1, 2, 4, 8),
        devices=("cuda",),
        finite_tails=True,
        precision=Precision(),
    ),
    lacks=("causal", "softcap", "sinks", *SCALES, "return_lse"),
)
def paged(call: Call, _: bool) -> Answer:
    """Attention by cuDNN over pages."""
    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    starts = call.cu_seqlens_q[: call.live_seqs + 1]
    lens = call.seqused_k[: call.live_seqs].contiguous()
    live = int(starts[-1])
    if not live:
        return out
    rows = starts[1:] - starts[:-1]
    size = call.k_cache.shape[1]
    width = max(1, -(-int(lens.max()) // size))
    table = call.page_table[: call.live_seqs, :width].contiguous()
    most = (_power(int(rows.max())), width * size)
    heads, dims = (call.q.shape[1], call.k_cache.shape[2]), (call.q.shape[2], call.v_cache.shape[3])

    def order(x: Tensor) -> tuple[int, ...]:
        return tuple(x.permute(0, 2, 1, 3).stride())

    graph, tensors, nbytes = _graph(
        call.q.dtype,
        call.live_seqs,
        heads,
        dims,
        most,
        (call.k_cache.shape[0], size, width),
        (order(call.k_cache), order(call.v_cache)),
        call.softmax_scale,
        call.causal,
        call.window_size[0],
    )
    answer = torch.zeros(live + most[0], heads[0], dims[1], dtype=call.q.dtype, device=call.q.device)
    q = torch.zeros(live + most[0], heads[0], dims[0], dtype=call.q.dtype, device=call.q.device)
    q[:live] = call.q[:live]
    given = {
        "q": q,
        "k": call.k_cache,
        "v": call.v_cache,
        "q_lens": rows.int().contiguous(),
        "kv_lens": lens,
        "ragged": (starts * heads[0] * dims[0]).int(),
        "ragged_out": (starts * heads[0] * dims[1]).int(),
        "table_k": table,
        "table_v": table,
        "out": answer,
    }
    workspace = torch.empty(max(1, nbytes), dtype=torch.uint8, device=call.q.device)
    graph.execute({tensors[name]: x for name, x in given.items()}, workspace, handle=_handle())
    out[:live] = answer[:live]
    return out
