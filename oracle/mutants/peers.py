"""Other projects' accept criteria, as their tests state them: what they would have said of the same outputs.

Formulas and figures only, each with its source.  None of them sees an LSE, what lies past the plan or a second call; each is
given the outputs of one call at the judged rows, finite or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SEED_PAIR, SEED_FP32 = 0.05, 0.002  # the two lines of the project's founding documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """One call's outputs at the same rows, all (rows, q_heads, head_dim_v) float64."""

    got: Tensor  # of the kernel on trial, in the format that it returned
    exact: Tensor  # fp64
    fp32: Tensor  # textbook, dense, fp32
    twin: Tensor  # the same with scores, weights and output kept in the dtype of q
    correct: Tensor  # of a correct kernel
    dtype: torch.dtype  # of q

    @property
    def rounded(self) -> Tensor:
        """The fp32 answer rounded to the dtype of q: what most projects call the reference."""
        return self.fp32.to(self.dtype).double()


@dataclass(frozen=True, slots=True)
class Rule:
    """One project's criterion."""

    source: str
    says: str
    passes: Callable[[Outputs], bool]


def _close(want: Tensor, got: Tensor, atol: float, rtol: float) -> bool:
    """Every |got - want| is at most atol + rtol |want|; NaN is not close."""
    return bool(((got - want).abs() <= atol + rtol * want.abs()).all())


def _peak(x: Tensor) -> float:
    """max |x|, NaN where any element is; 0 of none."""
    return float(x.abs().max()) if x.numel() else 0.0


def _mean(x: Tensor) -> float:
    return float(x.abs().mean()) if x.numel() else 0.0


def _twice_twin(o: Outputs) -> bool:
    return _peak(o.got - o.rounded) <= 2 * _peak(o.twin - o.rounded) + 1e-5


def _twice_twin_and_spacing(o: Outputs) -> bool:
    reference = o.rounded.to(o.dtype)
    spacing = 2 * _peak((reference + 0.3 - 0.3).double() - reference.double())
    return _peak(o.got - o.rounded) <= 2 * _peak(o.twin - o.rounded) + spacing


def _nmse(o: Outputs) -> bool:
    return float((o.got - o.fp32).square().sum()) <= 5e-4 * float(o.fp32.square().sum())


def _cosine(o: Outputs) -> bool:
    return bool((o.got * o.fp32).sum() / (o.got.square().sum() * o.fp32.square().sum()).sqrt() >= 0.999)


def _transformer_engine(o: Outputs) -> bool:
    line = {torch.bfloat16: 1.5e-2, torch.float16: 1e-3}.get(o.dtype, 1e-3)
    return _close(o.correct, o.got, line, line)


RULES: dict[str, Rule] = {
    "FA2 2x": Rule(
        "Dao-AILab/flash-attention tests/test_flash_attn.py", "max |out - ref| <= 2 max |twin - ref| + 1e-5", _twice_twin
    ),
    "FA3 2x": Rule(
        "Dao-AILab/flash-attention hopper/test_flash_attn.py",
        "max |out - ref| <= 2 max |twin - ref| + 2 max |(ref + 0.3 - 0.3) - ref|",
        _twice_twin_and_spacing,
    ),
    "FlashInfer 1e-3": Rule(
        "flashinfer-ai/flashinfer tests/attention/test_batch_prefill_kernels.py",
        "atol = rtol = 1e-3 against another kernel",
        lambda o: _close(o.correct, o.got, 1e-3, 1e-3),
    ),
    "FlashInfer 1e-2": Rule(
        "flashinfer-ai/flashinfer tests/attention/test_trtllm_gen_attention_decode.py",
        "atol = rtol = 1e-2",
        lambda o: _close(o.rounded, o.got, 1e-2, 1e-2),
    ),
    "vLLM 1.5e-2": Rule(
        "vllm-project/vllm tests/kernels/attention/test_triton_unified_attention.py",
        "atol 1.5e-2, rtol 1e-2",
        lambda o: _close(o.twin, o.got, 1.5e-2, 1e-2),
    ),
    "TE": Rule(
        "NVIDIA/TransformerEngine tests/pytorch/attention/test_attention.py",
        "atol = rtol = 1.5e-2 in bf16, 1e-3 in fp16, one back end against another",
        _transformer_engine,
    ),
    "PyTorch 4x": Rule(
        "pytorch/pytorch test/test_transformers.py",
        "max |gold - out| <= max(1e-5, 4 max |gold - twin|)",
        lambda o: _peak(o.fp32 - o.got) <= max(1e-5, 4 * _peak(o.fp32 - o.twin)),
    ),
    "Flex 1.1": Rule(
        "pytorch/pytorch test/inductor/test_flex_attention.py",
        "mean |gold - out| <= 1.1 mean |gold - twin|, gold in fp64",
        lambda o: _mean(o.exact - o.got) <= 1.1 * _mean(o.exact - o.twin),
    ),
    "llama.cpp NMSE": Rule("ggml-org/llama.cpp tests/test-backend-ops.cpp", "sum (a - b)^2 <= 5e-4 sum a^2", _nmse),
    "cosine 0.999": Rule("common practice", "cosine of all outputs at least 0.999", _cosine),
    "KernelBench 1e-2": Rule(
        "ScalingIntelligence/KernelBench src/kernelbench/eval.py",
        "atol = rtol = 1e-2 against the same precision",
        lambda o: _close(o.twin, o.got, 1e-2, 1e-2),
    ),
    "0.05 pair": Rule(
        "this project's founding documents", "|out - other kernel| <= 0.05", lambda o: _close(o.correct, o.got, SEED_PAIR, 0.0)
    ),
    "0.002 fp32": Rule(
        "this project's founding documents", "|out - fp32| <= 0.002", lambda o: _close(o.fp32, o.got, SEED_FP32, 0.0)
    ),
}
