"""ONNX Runtime's attention on CPUs: its own GroupQueryAttention, and ONNX's standard operator Attention (opset 24).

A model of one node is built in memory for each set of attributes.  GroupQueryAttention is given the last tokens of a sequence as
new keys and values and those before as past ones, as a decoder gives them; it counts `local_window_size` with the token itself.
Attention is given all keys, and the mask.  Neither returns an LSE; GroupQueryAttention takes sinks (`head_sink`) in the format of
q, so only with float32 can it be given the contract's.

Assumed of the precision, from ONNX Runtime's source: scores, softmax and P in fp32, whatever the inputs are;
Attention was then seen to round the scores of fp16 inputs (docs/findings.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, DeclaredKernel, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

_GQA_INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "", "", "", "", "head_sink")
_ATTENTION_INPUTS = ("query", "key", "value", "mask")


@cache
def _session(
    op: str, domain: str, dtype: torch.dtype, inputs: tuple[str, ...], outputs: tuple[str, ...], attributes: tuple[Any, ...]
) -> Any:
    """A session of the CPU provider, on as many threads as torch uses, for a model of one node."""
    import onnxruntime
    from onnx import TensorProto, helper

    real = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}[dtype]
    types = {"seqlens_k": TensorProto.INT32, "total": TensorProto.INT32, "mask": TensorProto.BOOL}
    node = helper.make_node(op, list(inputs), list(outputs), domain=domain, **dict(attributes))
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, types.get(name, real), None) for name in inputs if name],
        [helper.make_tensor_value_info(name, real, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(op: str, domain: str, dense: Dense, given: Mapping[str, Tensor], inputs: tuple[str, ...], **attributes: Any) -> Tensor:
    """The first output of a model of one node; an input that is not given is left out."""
    names = tuple(name if name in given else "" for name in inputs)
    outputs = ("output", "present_key", "present_value") if domain else ("output",)
    session = _session(op, domain, dense.q.dtype, names, outputs, tuple(sorted(attributes.items())))
    return torch.from_numpy(session.run(["output"], {name: x.contiguous().numpy() for name, x in given.items()})[0])


def _gqa(dense: Dense) -> tuple[Tensor, None]:
    """GroupQueryAttention over one sequence."""
    rows, heads, dim = dense.q.shape
    keys, kv_heads, _ = dense.k.shape
    past = keys - rows
    given = {
        "query": dense.q.reshape(1, rows, heads * dim),
        "key": dense.k[past:].reshape(1, rows, kv_heads * dim),
        "value": dense.v[past:].reshape(1, rows, kv_heads * dim),
        "past_key": dense.k[:past].transpose(0, 1)[None],
        "past_value": dense.v[:past].transpose(0, 1)[None],
        "seqlens_k": torch.tensor([keys - 1], dtype=torch.int32),
        "total": torch.tensor(keys, dtype=torch.int32),
    }
    if dense.call.sinks is not None:
        given["head_sink"] = dense.call.sinks
    out = _run(
        "GroupQueryAttention",
        "com.microsoft",
        dense,
        given,
        _GQA_INPUTS,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=dense.call.softmax_scale,
        softcap=dense.call.softcap,
        local_window_size=-1 if dense.call.window_size[0] < 0 else dense.call.window_size[0] + 1,
    )
    return out.reshape(rows, heads, -1), None


def _attention(dense: Dense) -> tuple[Tensor, None]:
    """ONNX's Attention over one sequence; where the causal rule is all there is, by its own `is_causal`."""
    q, k, v = dense.heads_first()
    square = dense.causal and dense.pos == 0  # without a cache, `is_causal` counts from the first key
    given = {"query": q, "key": k, "value": v}
    if not square and not dense.full:
        given["mask"] = dense.mask()
    out = _run(
        "Attention",
        "",
        dense,
        given,
        _ATTENTION_INPUTS,
        is_causal=int(square),
        scale=dense.call.softmax_scale,
        softcap=dense.call.softcap,
    )
    return out[0].transpose(0, 1), None


def _kernel(name: str, attend: Attend, record: Record, *lacks: str) -> DeclaredKernel:
    """The kernel `name`: one operator over one sequence after another."""

    def run(call: Call, _: bool) -> Answer:
        return by_sequence(call, attend, whole=attend is _gqa)

    run.__doc__ = f"Attention by ONNX Runtime's {'GroupQueryAttention' if attend is _gqa else 'Attention'}."
    return contract_kernel(record, lacks=(*SCALES, "return_lse", *lacks), name=name)(run)


_GQA = Record(
    dtypes=("fp32", "fp16"),
    head_dims=(40, 64, 80, 96, 128, 256, 512),
    page_sizes=(1, 8, 16, 32, 64, 128, 256),
    devices=("cpu",),
    precision=Precision(p_format="fp32", eps_exp=2.0**-21, eps_tanh=2.0**-21, subtract_first=True),
)
_FP32 = replace(_GQA, dtypes=("fp32",), uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)))
_FP16 = replace(_FP32, dtypes=("fp16",), precision=replace(_GQA.precision, p_format="input"))
gqa = _kernel("gqa", _gqa, _GQA, "causal", "sinks")
gqa_sinks = _kernel("gqa_sinks", _gqa, replace(_GQA, dtypes=("fp32",)), "causal")
attention_fp32 = _kernel("attention_fp32", _attention, _FP32, "sinks")
attention_fp16 = _kernel("attention_fp16", _attention, _FP16, "sinks")
