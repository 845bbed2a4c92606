"""PyTorch's FlexAttention, `torch.nn.attention.flex_attention`: window and causal rule as a block mask, softcap as a score mod.

Numbers that differ from call to call are captured as tensors, so that `torch.compile` need not compile again for each.

Read in torch 2.13's source: uncompiled it is `math_attention`, scores and softmax in fp32 and the normalised P rounded to the
format of q.  Compiled for CPUs it is inductor's C++ template, which gives no LSE; for GPUs its Triton one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

_Flex = Callable[..., Any]
COMPILED = 256  # head dims, counts of heads, masks, softcaps and formats together, each compiled anew; past 8 torch would refuse


@cache
def _compiled() -> _Flex:
    """One compiled function for all shapes; torch compiles anything of this process COMPILED times from then on."""
    torch._dynamo.config.recompile_limit = COMPILED
    compiled: _Flex = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def _attend(flex: _Flex, return_lse: bool) -> Attend:
    """FlexAttention over one sequence."""

    def attend(dense: Dense) -> tuple[Tensor, Tensor | None]:
        pos, left, right, cap = (
            torch.tensor(x, device=dense.q.device) for x in (dense.pos, dense.left, dense.right, dense.call.softcap)
        )

        def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            ahead = key - (row + pos)
            return (ahead >= -left) & (ahead <= right)

        def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        q, k, v = dense.heads_first()
        mask = None if dense.full else create_block_mask(seen, None, None, q.shape[2], k.shape[2], device=q.device)
        answer = flex(
            q,
            k,
            v,
            score_mod=capped if dense.call.softcap else None,
            block_mask=mask,
            scale=dense.call.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True) if return_lse else None,
        )
        out, lse = (answer[0], answer[1].lse[0].T) if return_lse else (answer, None)
        return out[0].transpose(0, 1), lse

    return attend


_DIMS = (64, 80, 96, 128, 256)
_UNEVEN = ((192, 128), (128, 64), (64, 128))
_PAGES = (1, 8, 16, 32, 64, 128, 256)
_EAGER = Record(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=_DIMS,
    uneven_head_dims=_UNEVEN,
    page_sizes=_PAGES,
    devices=("cpu",),
    precision=Precision(eps_exp=2.0**-21, eps_tanh=2.0**-21, subtract_first=True),
)
# exp as in torch's own CPU flash attention, whose vectorised one is used: measured there at 2^-13.2 in 16 bits (torch_sdpa.py).
_COMPILED_CPU = Record(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=_DIMS,
    page_sizes=_PAGES,
    devices=("cpu",),
    precision=Precision(subtract_first=True),
)
_COMPILED_CUDA = Record(head_dims=_DIMS, uneven_head_dims=_UNEVEN, page_sizes=_PAGES, devices=("cuda",))
_LACKS = ("sinks", *SCALES)


@contract_kernel(_EAGER, lacks=_LACKS)
def eager(call: Call, return_lse: bool) -> Answer:
    """FlexAttention without `torch.compile`: dense and unfused."""
    return by_sequence(call, _attend(flex_attention, return_lse), return_lse=return_lse)


@contract_kernel(_COMPILED_CPU, lacks=(*_LACKS, "return_lse"))
def compiled_cpu(call: Call, _: bool) -> Answer:
    """FlexAttention compiled by inductor for the CPU."""
    return by_sequence(call, _attend(_compiled(), False))


@contract_kernel(_COMPILED_CUDA, lacks=_LACKS)
def compiled_cuda(call: Call, return_lse: bool) -> Answer:
    """FlexAttention compiled by inductor for a GPU."""
    return by_sequence(call, _attend(_compiled(), return_lse), return_lse=return_lse)
