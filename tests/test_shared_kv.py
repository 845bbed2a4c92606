"""Each way to rebuild K from V computes what it says, and no other: exact attention over the K and q that it stands for.

Limits are those of test_triton_prefill, with one more: q times the weight as a sum of two bf16 numbers is off by 2^-17, which
moves a logit of size s by at most 2^-17 of the sum of its products' sizes, here less than 2^-9 in all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_prefill import DEVICE, U, assert_same_bits, case, exact
from torch import Tensor

from oracle.contract import Call, Kernel
from oracle.kernels import shared_kv
from oracle.kernels.shared_kv import folded, folded_pool, rebuilt_bf16, rebuilt_fp32

FORMS = [rebuilt_bf16, rebuilt_fp32, folded]
each = pytest.mark.parametrize("kernel", FORMS, ids=["rebuilt_bf16", "rebuilt_fp32", "folded"])
LENS = ((40, 1, 9, 0), (150, 70, 9, 30))


def weight(dim: int) -> Tensor:
    return 1 + 0.3 * torch.randn(dim, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def shared(dim: int = 128, **options: Any) -> Call:
    """A call whose unrotated columns of K are garbage: no kernel may look at them."""
    call = case(options.pop("lens", LENS), dims=(dim, dim), **options)
    call.k_cache[..., dim // 4 :] = torch.nan
    return replace(call, extras={"k_norm_weight": weight(dim)})


def stands_for(call: Call, kernel: Kernel) -> Call:
    """The call with the q and K that the kernel stands for, in float64."""
    w, turned = call.extras["k_norm_weight"].double(), call.q.shape[-1] // 4
    w[:turned] = 1
    q, k = call.q.double(), torch.cat((call.k_cache[..., :turned], call.v_cache[..., turned:]), -1).double()
    if kernel is rebuilt_bf16:
        k = (k * w.bfloat16().double()).bfloat16().double()
    elif kernel is rebuilt_fp32:
        k = k * w
    else:
        q = (q * w).bfloat16().double()
    return replace(call, q=q, k_cache=k)


def run(call: Call, kernel: Kernel) -> tuple[Tensor, Tensor]:
    named = ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "causal", "num_seqs", "k_norm_weight")
    out, lse = kernel(call.q, call.k_cache, call.v_cache, **{n: call.keywords()[n] for n in named}, return_lse=True)
    live = int(call.cu_seqlens_q[call.live_seqs])
    return out[:live].cpu(), lse[:live].cpu()


def off(answer: tuple[Tensor, Tensor], meant: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest error of a kernel's answer over its limit, beside an `exact` one."""
    (got, got_lse), (out, size, lse) = answer, meant
    error = (got.double() - out).abs() / ((U[torch.bfloat16] + 2.0**-9) * (size + out.abs()) + 1e-300)
    lse_error = torch.where(got_lse == lse, 0.0, (got_lse - lse).abs()) / 2.0**-9
    return max(float(error.max()), float(lse_error.max()))


@each
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"dim": 512, "page_size": 64, "heads": (8, 1)}, {"dim": 64}])
def test_each_form_is_attention_over_the_k_that_it_stands_for(kernel: Kernel, options: dict[str, Any]) -> None:
    call = shared(**options)
    assert off(run(call, kernel), exact(stands_for(call, kernel))) <= 1


def test_the_forms_are_told_apart() -> None:
    call = replace(shared(lens=((8,), (150,)), heads=(2, 1)), softmax_scale=1.0)
    answers, meant = [run(call, kernel) for kernel in FORMS], [exact(stands_for(call, kernel)) for kernel in FORMS]
    for i, answer in enumerate(answers):
        assert [off(answer, one) <= 2 for one in meant] == [i == j for j in range(len(FORMS))]


def test_a_key_of_the_folded_pool_takes_five_eighths_of_what_k_and_v_take() -> None:
    call = shared(512)
    assert folded_pool(call.k_cache, call.v_cache).shape[-1] == 640


@each
def test_nothing_past_the_plan_changes_a_bit(kernel: Kernel) -> None:
    assert_same_bits(run(shared(), kernel), run(shared(fill=torch.inf, garbage=2**31 - 1), kernel))


@each
def test_rows_without_keys_are_empty(kernel: Kernel) -> None:
    out, lse = run(shared(lens=((9, 4), (5, 0))), kernel)

    assert bool((out[:4] == 0).all() and (lse[:4] == -torch.inf).all() and (out[9:] == 0).all() and (lse[9:] == -torch.inf).all())


def test_other_formats_are_refused() -> None:
    call = shared()
    with pytest.raises(ValueError, match="expected bfloat16 and 64, 128, 256 or 512"):
        shared_kv.prefill(
            call.q.half(),
            folded_pool(call.k_cache, call.v_cache),
            form="folded",
            cu_seqlens_q=call.cu_seqlens_q,
            seqused_k=call.seqused_k,
            page_table=call.page_table,
            softmax_scale=1.0,
            k_norm_weight=weight(128),
        )
