"""The e4m3 TileLang kernel: its record, what it refuses, what it is launched with, and that a cut is a row of a table.

It runs on a Hopper GPU only, where ci/gpu/fp8_tilelang.py and `oracle accept` judge it.  What is around it runs here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oracle.contract import OPTIONAL, REQUIRED, Call
from oracle.kernels import ahead_of_time, tilelang_fp8
from oracle.kernels.eight_bit import record_of
from oracle.kernels.tilelang_families import FAMILIES, FP8_FAMILIES, KEYS
from oracle.kernels.triton_quantise import Codes

HD512 = FP8_FAMILIES["fp8_hd512"]
needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")


class Recorder:
    """Stands in for a compiled kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def launch(self, values: dict[str, Any], stream: int) -> None:
        """Keeps the arguments."""
        self.values = values


def launched(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """The arguments that a call with `changes` launches the kernel with: 5 query tokens, 2 of 3 sequences live."""
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    heads, dim, blocks = 2 * HD512.group, HD512.head_dim, 3
    q = torch.zeros(5, heads, dim, dtype=torch.bfloat16)
    cache = torch.zeros(6, 64, 2, dim, dtype=torch.bfloat16)
    plan: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 2, 5, -(10**7)], dtype=torch.int32),
        "seqused_k": torch.tensor([2, 9, 10**7], dtype=torch.int32),
        "page_table": torch.zeros(3, blocks, dtype=torch.int32),
        "softmax_scale": 0.5,
        "num_seqs": 2,
    }
    codes = Codes(
        blocks=blocks,
        q=torch.zeros(5, heads, dim, dtype=torch.uint8),
        q_scale=torch.ones(5, heads),
        k=torch.zeros(2, 2, blocks * KEYS, dim, dtype=torch.uint8),
        k_scale=torch.ones(2, 2, blocks),
        v=torch.zeros(2, 2, dim, blocks * KEYS, dtype=torch.uint8),
        v_scale=torch.ones(2, 2, blocks),
    )
    call = Call(q=q, k_cache=cache, v_cache=cache, **(plan | changes))
    tilelang_fp8.attend(HD512, call, codes, torch.empty_like(q), torch.empty(5, heads), recorder)
    return recorder.values


def test_the_record_is_the_scheme_at_one_head_dim_on_cuda() -> None:
    kernel = tilelang_fp8.fp8_hd512

    assert kernel.record == replace(
        record_of(tilelang_fp8.FP8), dtypes=("bf16",), head_dims=(512,), uneven_head_dims=(), groups=(8,), devices=("cuda",)
    )
    assert getattr(kernel, "__name__", "") == HD512.name
    named = set(inspect.signature(kernel).parameters) - {"q", "k_cache", "v_cache"}
    assert named == set(REQUIRED) | (set(OPTIONAL) - {"softcap", "sinks", "q_scale", "k_scale", "v_scale"})


def test_a_call_without_a_gpu_says_what_is_needed() -> None:
    q, cache = torch.zeros(1, 8, 512, dtype=torch.bfloat16), torch.zeros(1, 16, 1, 512, dtype=torch.bfloat16)
    plan = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="fp8_hd512: q is on cpu; expected a Hopper GPU"):
        tilelang_fp8.fp8_hd512(q, cache, cache, cu_seqlens_q=plan, seqused_k=plan[:1], page_table=plan[None], softmax_scale=1.0)


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "message"),
    [
        (torch.float16, 512, 8, "q is torch.float16, head dim 512; expected bfloat16, 512"),
        (torch.bfloat16, 256, 8, "q is torch.bfloat16, head dim 256; expected bfloat16, 512"),
        (torch.bfloat16, 512, 4, "q has 4 heads and the caches 1; expected 8 query heads a kv head"),
    ],
)
def test_what_it_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, heads: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    q, cache = (
        SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=shape) for shape in ((1, heads, dim), (1, 16, 1, dim))
    )
    call: Any = SimpleNamespace(q=q, k_cache=cache, v_cache=cache)
    with pytest.raises(ValueError, match=message):
        tilelang_fp8._check(HD512, call)


def test_only_the_live_plan_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    values = launched(monkeypatch)

    assert values["cu"].tolist() == [0, 2, 5] and values["used"].tolist() == [2, 9]
    assert (values["seqs"], values["plan"], values["steps"], values["blocks"]) == (2, 2, 1, 2)
    assert (values["owners"], values["kv_heads"], values["k_rows"], values["v_rows"]) == (4, 2, 4 * 3 * 64, 4 * 512)
    assert values["scale2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ({}, (2**30, 0)),
        ({"window_size": (7, 3)}, (7, 0)),  # causal: nothing to the right
        ({"causal": False}, (2**30, 2**30)),
        ({"causal": False, "window_size": (7, 3)}, (7, 3)),
        ({"window_size": (2**31, -1)}, (2**30, 0)),
    ],
)
def test_the_window_is_that_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], bounds: tuple[int, int]
) -> None:
    values = launched(monkeypatch, **asked)

    assert (values["left"], values["right"]) == bounds


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group": 12}, "a row group holds whole groups"),
        ({"chunk": 96}, "half of the columns is whole chunks"),
        ({"head_dim": 192, "chunk": 32}, "rows of q and k are whole panels of 128 codes"),
        ({"registers": (24, 136, 184)}, "a multiprocessor has its registers"),
        ({"k_stages": 4}, "its tiles fit"),
    ],
)
def test_a_row_that_cannot_be_generated_is_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(HD512, **change)


def test_libraries_of_both_kinds_have_fingerprints_of_their_own_generators() -> None:
    """Those of the bf16 kernels hang on their row, their page size and their generator alone, as before there was another."""
    assert {f.generator for f in FAMILIES.values()} == {"tilelang_body"}
    assert HD512.generator == "tilelang_fp8_body"
    generator = Path(ahead_of_time.__file__).with_name("tilelang_fp8_body.py").read_bytes()
    digest = hashlib.sha256(repr((HD512, KEYS, ahead_of_time.ARCH)).encode() + generator).hexdigest()
    assert ahead_of_time.fingerprint(HD512, KEYS) == digest[:16]


@needs_tilelang
def test_the_generated_kernel_multiplies_codes_and_rounds_to_them_saturated() -> None:
    code, arguments = ahead_of_time.source(HD512, KEYS)

    assert "wgmma_ss<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32, 64, 64, 32" in code
    assert "tma_load" in code and "warpgroup_reg_dealloc<24>" in code and "__NV_SATFINITE, __NV_E4M3" in code
    assert {"q_scale", "k_scale", "v_scale"} <= {name for name, _ in arguments}
