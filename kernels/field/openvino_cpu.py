"""OpenVINO's ScaledDotProductAttention (opset 13) on CPUs: a model of one operator, compiled once for each format.

The operator has as many heads of keys as of queries, so only groups of 1 are declared.  Its `causal` counts both sequences from
their first token; where that is not the contract's rule it is given a boolean mask.  OpenVINO computes in the format that
`INFERENCE_PRECISION_HINT` names, whatever the inputs are: it is told the format of q.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Dense, by_sequence


@cache
def _compiled(dtype: torch.dtype, mask: str) -> Any:
    """The operator compiled for inputs of `dtype`; `mask` is "none", "causal" or "given"."""
    import openvino
    from openvino import opset13

    real = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16}[dtype]
    anything = openvino.PartialShape([-1, -1, -1, -1])
    q, k, v = (opset13.parameter(anything, real) for _ in range(3))
    seen = opset13.parameter(openvino.PartialShape([-1, -1]), openvino.Type.boolean)
    scale = opset13.parameter(openvino.PartialShape([]), real)
    zero = opset13.constant(0.0, real)
    node = opset13.scaled_dot_product_attention(q, k, v, seen if mask == "given" else zero, scale, causal=mask == "causal")
    inputs = [q, k, v, *([seen] if mask == "given" else []), scale]
    threads = torch.get_num_threads()
    settings = {"INFERENCE_PRECISION_HINT": real, "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    return openvino.Core().compile_model(openvino.Model([node], inputs), "CPU", settings)


def _given(x: Tensor) -> Any:
    """The tensor as one of OpenVINO, bit by bit: numpy has no bfloat16."""
    import openvino

    if x.dtype is torch.bfloat16:
        return openvino.Tensor(x.view(torch.uint16).numpy(), openvino.Shape(list(x.shape)), openvino.Type.bf16)
    return openvino.Tensor(x.numpy())


def _attend(dense: Dense) -> tuple[Tensor, None]:
    """OpenVINO over one sequence."""
    tensors = list(dense.heads_first())
    mask = "none" if dense.full else "causal" if dense.causal and dense.pos == 0 else "given"
    if mask == "given":
        tensors.append(dense.mask())
    tensors.append(torch.tensor(dense.call.softmax_scale, dtype=dense.q.dtype))
    request = _compiled(dense.q.dtype, mask).create_infer_request()
    request.infer([_given(x) for x in tensors])
    out = request.get_output_tensor(0)
    shape = (dense.q.shape[1], dense.q.shape[0], dense.v.shape[2])
    answer = torch.frombuffer(bytearray(out.data.tobytes()), dtype=dense.q.dtype).reshape(shape)
    return answer.transpose(0, 1), None


_RECORD = Record(
    head_dims=(40, 64, 80, 96, 128, 256, 512),
    page_sizes=(1, 8, 16, 32, 64, 128, 256),
    groups=(1,),
    devices=("cpu",),
    precision=Precision(eps_exp=2.0**-21, subtract_first=True),
)
_LACKS = ("softcap", "sinks", *SCALES, "return_lse")


def _sdpa(call: Call, _: bool) -> Answer:
    """Attention by OpenVINO."""
    return by_sequence(call, _attend)


sdpa_fp32 = contract_kernel(replace(_RECORD, dtypes=("fp32",)), lacks=_LACKS, name="sdpa_fp32")(_sdpa)
sdpa_bf16 = contract_kernel(replace(_RECORD, dtypes=("bf16",)), lacks=_LACKS, name="sdpa_bf16")(_sdpa)
