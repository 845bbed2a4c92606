"""ggml's flash attention on CPUs (`ggml_flash_attn_ext`), the one of llama.cpp, through the library that ggml-python carries.

ggml takes q in float32 whatever the cache is, and answers in float32: the adapter widens q, which is exact, and rounds the answer
to the format of q.  The mask is additive, in float16; sinks and softcap are its own.

Read in ggml's source (`ggml-cpu/ops.cpp`): there are three paths.  64 rows or more: tiles of 64 x 64, all in fp32.  One row and
512 keys or more: the keys split over threads, and merged.  Else, and inside the second: row by row.  With a float16 cache the
row-by-row path keeps the sum of P.V in float16, rounded after every key; with float32 and bfloat16 in fp32.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Dense, by_sequence

_OVERHEAD = 1 << 20  # bytes of a context besides its tensors: their headers and the graph
_ROWS, _SPLIT = 64, 512  # rows of a tile; keys from which one row is split over threads


def _type(dtype: torch.dtype) -> int:
    import ggml

    types = {torch.float32: ggml.GGML_TYPE_F32, torch.float16: ggml.GGML_TYPE_F16, torch.bfloat16: ggml.GGML_TYPE_BF16}
    return int(types[dtype])


def _tensor(context: Any, x: Tensor) -> Any:
    """A tensor of ggml with the numbers of `x`, whose shape it has in reverse order."""
    import ggml

    made = ggml.ggml_new_tensor(context, _type(x.dtype), x.ndim, (ctypes.c_int64 * x.ndim)(*reversed(x.shape)))
    ctypes.memmove(ggml.ggml_get_data(made), x.data_ptr(), x.numel() * x.element_size())
    return made


def _attend(dense: Dense) -> tuple[Tensor, None]:
    """ggml over one sequence."""
    import ggml

    q, k, v = (x[0] for x in dense.heads_first())
    given = [q.float(), k, v]
    if not dense.full:
        given.append(torch.zeros(dense.mask().shape, dtype=torch.float16).masked_fill_(~dense.mask(), -inf))
    answer = torch.empty(q.shape[1], q.shape[0], v.shape[2])
    scratch = 64 * 4 * (2 * q.shape[2] + 2 * v.shape[2] + 256) * 16 + q.shape[0] * 64 * (v.shape[2] + 2) * 4
    nbytes = sum(x.numel() * x.element_size() for x in given) + 4 * answer.numel() + scratch + _OVERHEAD
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=nbytes, mem_buffer=None, no_alloc=False))
    try:
        tensors = [_tensor(context, x) for x in given]
        mask = tensors[3] if len(tensors) > 3 else None
        scale, softcap = dense.call.softmax_scale, dense.call.softcap
        node = ggml.ggml_flash_attn_ext(context, *tensors[:3], mask, scale, 0.0, softcap)
        ggml.ggml_flash_attn_ext_set_prec(node, ggml.GGML_PREC_F32)
        if dense.call.sinks is not None:
            ggml.ggml_flash_attn_ext_add_sinks(node, _tensor(context, dense.call.sinks))
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, node)
        if status := ggml.ggml_graph_compute_with_ctx(context, graph, torch.get_num_threads()):
            raise RuntimeError(f"ggml_graph_compute_with_ctx: status {status}")
        ctypes.memmove(answer.data_ptr(), ggml.ggml_get_data(node), answer.numel() * 4)
    finally:
        ggml.ggml_free(context)
    return answer.to(dense.q.dtype), None


_RECORD = Record(
    dtypes=("fp32", "bf16"),
    head_dims=(40, 64, 80, 96, 128, 256, 512),
    uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)),
    page_sizes=(1, 8, 16, 32, 64, 128, 256),
    devices=("cpu",),
    thresholds=(_ROWS, _SPLIT),
    precision=Precision(p_format="fp32", eps_exp=2.0**-21, eps_tanh=2.0**-21, subtract_first=True),
)
_LACKS = (*SCALES, "return_lse")


def _flash(call: Call, _: bool) -> Answer:
    """Attention by ggml's CPU kernel."""
    return by_sequence(call, _attend)


flash = contract_kernel(_RECORD, lacks=_LACKS, name="flash")(_flash)
# GGML_PREC_F32 asks for float32, so that is what is promised; the row-by-row path does not keep it.
flash_fp16 = contract_kernel(replace(_RECORD, dtypes=("fp16",)), lacks=_LACKS, name="flash_fp16")(_flash)
