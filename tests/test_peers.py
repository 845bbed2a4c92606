"""Other projects' rules: what their tests say of right and of wrong outputs, as their sources state it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.peers import RULES, Outputs
from oracle.references.arithmetic import Arithmetic
from oracle.references.attention import attend
from oracle.references.dense import dense, dense_fp32
from oracle.references.emulator import emulate
from oracle.references.plan import live_rows


def outputs(dtype: torch.dtype, keys: int = 1024) -> Outputs:
    """A correct kernel's outputs on N(0, 1) inputs: 16 rows, 4 heads on 2, head dim 128."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    call = Call(
        q=normal(16, 4, 128),
        k_cache=normal(keys // 16, 16, 2, 128),
        v_cache=normal(keys // 16, 16, 2, 128),
        cu_seqlens_q=torch.tensor([0, 16], dtype=torch.int32),
        seqused_k=torch.tensor([keys], dtype=torch.int32),
        page_table=torch.arange(keys // 16, dtype=torch.int32)[None],
        softmax_scale=128**-0.5,
    )
    got = emulate(call, Arithmetic())[0].double()
    tiled = emulate(call, Arithmetic(tile=128))[0].double()
    exact = attend(call, live_rows(call), 2.0**-8).out
    fp32, twin = dense_fp32(call)[0].double(), dense(call, dtype)[0].double()
    return Outputs(got=got, exact=exact, fp32=fp32, twin=twin, correct=tiled, dtype=dtype)


BF16, FP16 = outputs(torch.bfloat16), outputs(torch.float16)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_correct_kernel_passes_on_the_projects_own_kind_of_inputs(name: str, dtype: str) -> None:
    """But for two lines that bf16 cannot keep: its own rounding is 2^-9 of the output, more than 1e-3."""
    right = BF16 if dtype == "bf16" else FP16

    assert RULES[name].passes(right) or (dtype == "bf16" and name in ("FlashInfer 1e-3", "0.002 fp32"))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1.0])
def test_one_number_everywhere_passes_no_rule(name: str, value: float) -> None:
    assert not RULES[name].passes(replace(FP16, got=torch.full_like(FP16.got, value)))


@pytest.mark.parametrize("name", RULES)
def test_one_nan_passes_no_rule(name: str) -> None:
    got = FP16.got.clone()
    got[3, 1, 7] = float("nan")

    assert not RULES[name].passes(replace(FP16, got=got))


ALWAYS = {"FlashInfer 1e-2", "vLLM 1.5e-2", "TE", "cosine 0.999", "KernelBench 1e-2", "0.05 pair"}


@pytest.mark.parametrize(
    ("relative", "passing"),
    [
        (0.02, ALWAYS | {"FA3 2x", "llama.cpp NMSE"}),
        (0.03, ALWAYS),
    ],
)
def test_how_much_too_large_an_output_may_be(relative: float, passing: set[str]) -> None:
    """Two and three per cent of every output, which no rounding explains: bf16 itself loses 0.4 at most."""
    wrong = replace(BF16, got=(BF16.got * (1 + relative)).to(torch.bfloat16).double())

    assert {name for name, rule in RULES.items() if rule.passes(wrong)} == passing


def test_the_spacing_of_the_third_flash_attention_is_that_of_the_dtype() -> None:
    """(ref + 0.3 - 0.3) - ref moves by about a unit in the last place at 0.3: 2^-9 of bf16, 2^-12 of fp16."""
    for right, unit in ((BF16, 2.0**-9), (FP16, 2.0**-12)):
        off = right.rounded + 2 * unit
        silent = replace(right, got=off, twin=right.rounded)
        assert RULES["FA3 2x"].passes(silent) and not RULES["FA2 2x"].passes(silent)


def test_without_rows_every_rule_but_the_cosine_passes_and_so_proves_nothing() -> None:
    empty = torch.zeros(0, 4, 128, dtype=torch.float64)
    nothing = Outputs(got=empty, exact=empty, fp32=empty, twin=empty, correct=empty, dtype=torch.bfloat16)

    assert {name for name, rule in RULES.items() if not rule.passes(nothing)} == {"cosine 0.999"}
