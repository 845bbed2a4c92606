"""All kernels that come with the oracle, and the verdict expected of each.

The gate is green only if every verdict equals the expected one; an unexpected accept is as red as an unexpected reject.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel: where it is, what it is for, and what must be said of it."""

    target: str  # "module:function"
    about: str
    expect: str  # "accept" or "reject"
    reason: str = ""  # the first reason of an expected reject
    needs: str = ""  # a module that must be importable, "" = none
    against: str = ""  # the incumbent that the gate names, "" = the emulator
    door: str = ""  # the door expected of an accept on the CPU; compiled for a GPU, sums may come in another order
    profile: str = ""  # the profile that the gate judges it on, on the CPU: "quick" for interpreted kernels
    devices: tuple[str, ...] = ("cpu", "cuda")


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
}


def unavailable(row: KernelRow, device: str) -> str:
    """Why this machine cannot run the kernel on `device`, in a few words, or "" where it can."""
    if device not in row.devices:
        return f"does not run on {device}"
    if row.needs and importlib.util.find_spec(row.needs) is None:
        return f"{row.needs} is not installed: pip install 'attention-oracle[{row.needs}]'"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device here"
    return ""
