"""compute-sanitizer's words become a reason; replays of CUDA graphs are judged like calls.  Most of it needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle.accept import Asked, accept
from oracle.errors import InputError
from oracle.isolation.sanitizer import faults, sanitizer
from oracle.verdict import Outcome, Reason, Verdict

KERNELS = Path(__file__).with_name("on_gpu_by_path.py")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
with_sanitizer = pytest.mark.skipif(not torch.cuda.is_available() or sanitizer() is None, reason="needs compute-sanitizer")

PRINTED = """\
something that the kernel printed
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _sum_to+0x290 in gpu_kernels.py:24
=========     by thread (5,0,0) in block (0,0,0)
=========     Access at 0x7ff60be00214 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7ff60be00200 of size 20 bytes
=========
========= Invalid __global__ read of size 4 bytes
=========     at _sum_to+0x290 in gpu_kernels.py:24
=========     by thread (6,0,0) in block (0,0,0)
=========     Access at 0x7ff60be00218 is out of bounds
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def judge(name: str, **options: bool) -> Verdict:
    return accept(Asked(candidate=f"{KERNELS}:{name}", device="cuda", profile="quick", seed=1, **options))  # type: ignore[arg-type]


def test_a_fault_is_one_line_without_the_thread() -> None:
    first, second = faults(PRINTED)

    assert first == (
        "Invalid __global__ read of size 4 bytes, at _sum_to+0x290 in gpu_kernels.py:24, Access at 0x7ff60be00214 is out of "
        "bounds, and is 1 bytes after the nearest allocation at 0x7ff60be00200 of size 20 bytes"
    )
    assert second.endswith("Access at 0x7ff60be00218 is out of bounds")


@pytest.mark.parametrize(
    "text", ["", "a kernel's own print\n", "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"]
)
def test_no_fault_is_none(text: str) -> None:
    assert faults(text) == ()


def test_trouble_of_the_tool_is_no_fault_of_the_kernel() -> None:
    assert faults("========= COMPUTE-SANITIZER\n========= Error: Device not supported\n") == ()


@pytest.mark.parametrize("option", ["sanitize", "graph"])
def test_on_the_cpu_they_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"--{option}: got device cpu; it is for --device cuda"):
        accept(Asked(candidate="emulator", **{option: True}))  # type: ignore[arg-type]


@with_sanitizer
def test_one_element_past_a_plan_array_is_seen() -> None:
    quiet = judge("reads_past_the_plan_array")
    seen = judge("reads_past_the_plan_array", sanitize=True)

    assert quiet.outcome is Outcome.ACCEPT
    assert seen.reasons == (Reason.INVALID_ACCESS,)
    assert "Invalid __global__ read of size 4 bytes" in seen.findings[0].text and "_sum_to" in seen.findings[0].text


@with_sanitizer
def test_a_clean_kernel_is_accepted_under_the_sanitizer() -> None:
    verdict = accept(Asked(candidate="triton-prefill-16", device="cuda", profile="quick", seed=1, sanitize=True))

    assert verdict.outcome is Outcome.ACCEPT, verdict.findings


@on_gpu
def test_a_clean_kernel_is_accepted_in_graphs() -> None:
    verdict = accept(Asked(candidate="triton-prefill-16", device="cuda", profile="quick", seed=1, graph=True))

    assert verdict.outcome is Outcome.ACCEPT, verdict.findings


@on_gpu
def test_a_length_baked_into_a_graph_is_seen() -> None:
    quiet = judge("keeps_the_longest")
    seen = judge("keeps_the_longest", graph=True)

    assert quiet.outcome is Outcome.ACCEPT
    assert seen.reasons == (Reason.RELATION,), seen.findings
    assert "with twice as many keys in the same shapes" in seen.findings[0].text


@on_gpu
def test_a_kernel_that_cannot_be_captured_says_so() -> None:
    quiet = judge("reads_lengths_on_the_host")
    seen = judge("reads_lengths_on_the_host", graph=True)

    assert quiet.outcome is Outcome.ACCEPT
    assert seen.reasons == (Reason.EXCEPTION,) and "cannot be captured in a CUDA graph" in seen.findings[0].text
