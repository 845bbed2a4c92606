"""transformers' attention functions: the eager ones of its model files, and `sdpa_attention_forward`.

They are given what its layers give them: the mask, additive for the eager ones and boolean for SDPA, the scale, the softcap and
the sinks of the layer.  None returns an LSE.

Read in transformers 5.24's source: the eager functions multiply and scale q.k in the format of q, take the softmax in fp32 and
round P to that format.  With 16-bit inputs that rounds the scores too, which no record of a kernel can promise: those kernels are
listed by themselves.  gpt-oss takes its softmax in the format of q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, DeclaredKernel, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

_Forward = Callable[..., tuple[Tensor, Any]]


def _layer(dense: Dense) -> SimpleNamespace:
    """What the functions ask of the layer that calls them; where the call has no sinks, as gpt-oss wants, minus infinity."""
    absent = torch.full((dense.q.shape[1],), float("-inf"), device=dense.q.device)
    return SimpleNamespace(
        num_key_value_groups=dense.q.shape[1] // dense.k.shape[1],
        head_dim=dense.q.shape[2],
        is_causal=True,
        sinks=absent if dense.call.sinks is None else dense.call.sinks,
        training=False,
    )


def _eager(forward: _Forward) -> Attend:
    """An eager function over one sequence."""

    def attend(dense: Dense) -> tuple[Tensor, None]:
        q, k, v = dense.heads_first()
        hidden = torch.finfo(q.dtype).min  # what transformers' masks hold where a key is hidden
        mask = None if dense.full else torch.zeros(dense.mask().shape, dtype=q.dtype).masked_fill_(~dense.mask(), hidden)
        softcap = {"softcap": dense.call.softcap} if dense.call.softcap else {}
        out, _ = forward(
            _layer(dense),
            q,
            k,
            v,
            None if mask is None else mask[None, None],
            scaling=dense.call.softmax_scale,
            **softcap,
        )
        return out[0], None

    return attend


def _sdpa(dense: Dense) -> tuple[Tensor, None]:
    """`sdpa_attention_forward` over one sequence."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = dense.heads_first()
    square = dense.causal and dense.pos == 0  # transformers leaves the mask out and relies on is_causal
    mask = None if square or dense.full else dense.mask()[None, None]
    forward: _Forward = sdpa_attention_forward  # it wants a module, and asks no more of it than what `_layer` has
    out, _ = forward(_layer(dense), q, k, v, mask, scaling=dense.call.softmax_scale, is_causal=square and q.shape[2] > 1)
    return out[0], None


def _model(name: str) -> _Forward:
    """The eager attention function of a model."""
    from importlib import import_module

    found: _Forward = import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward
    return found


_RECORD = Record(
    head_dims=(40, 64, 80, 96, 128, 256, 512),
    uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)),
    page_sizes=(1, 8, 16, 32, 64, 128, 256),
    precision=Precision(eps_exp=2.0**-21, eps_tanh=2.0**-21, subtract_first=True),
)
_FP32 = replace(_RECORD, dtypes=("fp32",), devices=("cpu",))
_LACKS = (*SCALES, "return_lse")


def _kernel(name: str, model: str, record: Record, lacks: tuple[str, ...]) -> DeclaredKernel:
    """The kernel `name`: the eager function of a model."""

    def run(call: Call, _: bool) -> Answer:
        return by_sequence(call, _eager(_model(model)))

    run.__doc__ = f"Attention by transformers' eager function of {model}."
    return contract_kernel(record, lacks=lacks, name=name)(run)


gemma_fp32 = _kernel("gemma_fp32", "gemma2", _FP32, (*_LACKS, "sinks"))
gemma_16 = _kernel("gemma_16", "gemma2", replace(_RECORD, devices=("cpu",)), (*_LACKS, "sinks"))
gpt_oss_fp32 = _kernel("gpt_oss_fp32", "gpt_oss", _FP32, (*_LACKS, "softcap"))


@contract_kernel(
    replace(
        _RECORD,
        dtypes=("bf16", "fp16", "fp32"),
        uneven_head_dims=((192, 128),),
        precision=Precision(subtract_first=True),
    ),
    lacks=(*_LACKS, "sinks", "softcap"),
)
def sdpa(call: Call, _: bool) -> Answer:
    """Attention by transformers' `sdpa_attention_forward`, and whatever back end torch chooses for it."""
    return by_sequence(call, _sdpa)
