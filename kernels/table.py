"""All kernels that the oracle knows by name, and the verdict expected of each that comes with it.

The gate is green only if every verdict equals the expected one; an unexpected accept is as red as an unexpected reject.  Of other
projects' kernels (`field/table.py`) nothing is expected, and the gate leaves them alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from oracle.kernels.field.table import FIELD, FieldRow
from oracle.kernels.field.table import unavailable as field_unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel: where it is, what it is for, and what must be said of it."""

    target: str  # "module:function"
    about: str
    expect: str  # "accept" or "reject"; "" of another project's
    reason: str = ""  # the first reason of an expected reject
    needs: str = ""  # a module that must be importable, "" = none
    against: str = ""  # the incumbent that the gate names, "" = the emulator
    door: str = ""  # the door expected of an accept on the CPU; compiled for a GPU, sums may come in another order
    profile: str = ""  # the profile that the gate judges it on, on the CPU: "quick" for interpreted kernels
    devices: tuple[str, ...] = ("cpu", "cuda")
    elsewhere: FieldRow | None = None  # another project's


_EMULATED = "oracle.kernels.emulated"

KERNELS: dict[str, KernelRow] = {
    "emulator": KernelRow(
        target=f"{_EMULATED}:textbook",
        about="a textbook flash kernel's arithmetic, emulated: the default incumbent",
        expect="accept",
    ),
    "sdpa-flash": KernelRow(
        target="oracle.kernels.torch_sdpa:sdpa_flash",
        about="torch's own CPU flash attention, behind an adapter",
        expect="accept",
        devices=("cpu",),
    ),
    "sdpa-flash-fp32": KernelRow(
        target="oracle.kernels.torch_sdpa:sdpa_flash_fp32",
        about="the same in fp32, whose exp is a thousand times better",
        expect="accept",
        devices=("cpu",),
    ),
    "sdpa-math-reduced": KernelRow(
        target="oracle.kernels.torch_sdpa:sdpa_math_reduced",
        about="the unfused one with scores and weights kept in 16 bits: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        devices=("cpu",),
    ),
    "rebuilt-k": KernelRow(
        target="oracle.kernels.rebuilt_k:rebuilt_k",
        about="K rebuilt from V in bf16, where they share a projection: must be rejected",
        expect="reject",
        reason="lse-exceeds-bound",
        devices=("cpu",),
    ),
    "sdpa-math": KernelRow(
        target="oracle.kernels.torch_sdpa:sdpa_math",
        about="torch's own unfused attention, behind an adapter",
        expect="accept",
        devices=("cpu",),
    ),
    "triton-prefill-16": KernelRow(
        target="oracle.kernels.triton_prefill:prefill_16",
        about="paged prefill and decode, 16-row query tiles: the incumbent",
        expect="accept",
        needs="triton",
        profile="quick",
    ),
    "triton-prefill-32": KernelRow(
        target="oracle.kernels.triton_prefill:prefill_32",
        about="the same with 32-row query tiles: the candidate",
        expect="accept",
        door="bits",
        against="triton-prefill-16",
        needs="triton",
        profile="quick",
    ),
    "triton-prefill-truncating": KernelRow(
        target="oracle.kernels.triton_prefill:prefill_truncating",
        about="the same with P truncated to bf16: must be rejected",
        expect="reject",
        reason="gain",
        needs="triton",
        profile="quick",
    ),
    "triton-split-64": KernelRow(
        target="oracle.kernels.triton_split:split_64",
        about="paged prefill for Hopper, the output's columns split over programs: the incumbent",
        expect="accept",
        needs="triton",
        profile="quick",
    ),
    "triton-split-tuned": KernelRow(
        target="oracle.kernels.triton_split:split_tuned",
        about="the same with tiles tuned by head dim for an H200: the candidate",
        expect="accept",
        door="bits",
        against="triton-split-64",
        needs="triton",
        profile="quick",
    ),
    "triton-decode": KernelRow(
        target="oracle.kernels.triton_decode:decode",
        about="paged decode, the keys of a sequence split over programs",
        expect="accept",
        needs="triton",
        profile="quick",
    ),
    "triton-fp8": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_fp8",
        about="q, k, v and P in e4m3 by blocks, sums of two levels",
        expect="accept",
        against="oracle.kernels.eight_bit:fp8_block",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-fp8-hadamard": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_fp8_hadamard",
        about="the same, q and k turned by a Hadamard transform first",
        expect="accept",
        against="oracle.kernels.eight_bit:fp8_block_hadamard",
        needs="triton",
        devices=("cuda",),
    ),
    "tilelang-fp8-hd512": KernelRow(
        target="oracle.kernels.tilelang_fp8:fp8_hd512",
        about="q, k, v and P in e4m3 by blocks, generated by TileLang: Gemma 4's global layers",
        expect="accept",
        against="oracle.kernels.eight_bit:fp8_block",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-int8": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_int8",
        about="q and smoothed k in int8 by blocks: SageAttention's way",
        expect="accept",
        against="oracle.kernels.eight_bit:int8_block",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-int8-v8": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_int8_v8",
        about="the same, v by channels and P in e4m3: SageAttention2's way",
        expect="accept",
        against="oracle.kernels.eight_bit:int8_block_v8",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-fp8-lazy": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_fp8_lazy",
        about="P that saturates behind a stale maximum (FlashAttention issue 2577): must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-fp8-narrow": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_fp8_narrow",
        about="P.V added up in FP22, which loses long contexts: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
    "triton-fp8-unscaled": KernelRow(
        target="oracle.kernels.triton_eight_bit:prefill_fp8_unscaled",
        about="P without a scale, which underflows behind a sink: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
    "tilelang-hd512": KernelRow(
        target="oracle.kernels.tilelang_prefill:hd512",
        about="paged prefill for Hopper, generated by TileLang: Gemma 4's global layers",
        expect="accept",
        devices=("cuda",),
    ),
    "tilelang-hd256": KernelRow(
        target="oracle.kernels.tilelang_prefill:hd256",
        about="the same for Gemma 4's sliding layers",
        expect="accept",
        devices=("cuda",),
    ),
    "tilelang-hd128": KernelRow(
        target="oracle.kernels.tilelang_prefill:hd128",
        about="the same for Llama 3's layers",
        expect="accept",
        devices=("cuda",),
    ),
    "shared-kv-bf16": KernelRow(
        target="oracle.kernels.shared_kv:rebuilt_bf16",
        about="K rebuilt from V in bf16 on the GPU, where they share a projection: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
    "shared-kv-fp32": KernelRow(
        target="oracle.kernels.shared_kv:rebuilt_fp32",
        about="the same without rounding: nearer to the model, and not the K that the pool holds: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
    "shared-kv-folded": KernelRow(
        target="oracle.kernels.shared_kv:folded",
        about="K's norm weight folded into q, 640 instead of 1024 elements a row: must be rejected",
        expect="reject",
        reason="error-exceeds-bound",
        needs="triton",
        devices=("cuda",),
    ),
} | {
    name: KernelRow(target=row.target, about=f"{row.project}: {row.about}", expect="", devices=row.devices, elsewhere=row)
    for name, row in FIELD.items()
}


def unavailable(row: KernelRow, device: str) -> str:
    """Why this machine cannot run the kernel on `device`, in a few words, or "" where it can."""
    if row.elsewhere is not None:
        return field_unavailable(row.elsewhere, device)
    if device not in row.devices:
        return f"does not run on {device}"
    if row.needs and importlib.util.find_spec(row.needs) is None:
        return f"{row.needs} is not installed: pip install 'attention-oracle[{row.needs}]'"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device here"
    return ""
