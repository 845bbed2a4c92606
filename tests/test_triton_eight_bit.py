"""The 8-bit Triton kernels have the codes, the scales and, but for the order of sums, the answers of the CPU's 8-bit kernels.

Codes and scales are compared bit for bit.  The order of sums moves a score by (head_dim + 8) u32 of its terms, far below the
distance of two P in e4m3; but where P lies at a midpoint that is a step of 2^-3 of one weight.  So an answer may be off by 2^-6
of the largest, and beyond 2^-7 of it in one element of a hundred.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_eight_bit import alone, case
from torch import Tensor

from oracle.contract import Call, DeclaredKernel
from oracle.doors import looser_than_default
from oracle.kernels import eight_bit
from oracle.kernels import triton_eight_bit as own
from oracle.kernels.eight_bit import K_BLOCK, Q_BLOCK, Scheme, SchemeAttention
from oracle.kernels.triton_host import launch_for
from oracle.kernels.triton_language import INTERPRETED
from oracle.kernels.triton_quantise import quantised
from oracle.references.attention import attend
from oracle.references.bound import bound
from oracle.references.plan import live_rows
from oracle.references.roundoff import roundoff, tie_width

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the CPU's kernels are what these are compared with")

KERNELS: dict[str, tuple[DeclaredKernel, Scheme]] = {
    "fp8": (own.prefill_fp8, own.FP8),
    "hadamard": (own.prefill_fp8_hadamard, own.HADAMARD),
    "int8": (own.prefill_int8, own.INT8),
    "int8_v8": (own.prefill_int8_v8, own.INT8_V8),
}
every = pytest.mark.parametrize("name", list(KERNELS))
BLOCKS = ((140, 1, 0, 3), (150, 70, 5, 0))  # blocks of rows and of keys that end inside; no query, no key


def run(call: Call, kernel: DeclaredKernel) -> tuple[Tensor, Tensor]:
    """Output and LSE of the live rows."""
    given = {k: v for k, v in call.keywords().items() if k not in ("q_scale", "k_scale", "v_scale")}
    result = kernel(call.q, call.k_cache, call.v_cache, **given, return_lse=True)
    assert isinstance(result, tuple)
    live = int(call.cu_seqlens_q[call.live_seqs])
    return result[0][:live], result[1][:live]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of codes or scales have the same bits."""
    bits = [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


@every
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16, "dims": (48, 80), "page_size": 1}], ids=["bf16", "fp16"])
def test_codes_and_scales_are_those_of_the_cpu_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    call, scheme = case(BLOCKS, heads=(2, 1), **options), KERNELS[name][1]
    got = quantised(launch_for(call, torch.empty_like(call.q), None), scheme)
    dim, dim_v = call.q.shape[2], call.v_cache.shape[3]
    starts = call.cu_seqlens_q.tolist()
    for seq, kv_len in enumerate(call.seqused_k.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start < rows.stop:
            q = eight_bit._quantised_q(scheme, call.q[rows].transpose(0, 1)[None].float(), None)
            assert same(got.q[rows, :, :dim], q.codes[0].transpose(0, 1))
            assert same(got.q_scale[rows], q.scale[0, :, :, 0].T)
            assert not got.q[rows, :, dim:].float().any()
        if not kv_len:
            continue
        keys, blocks = slice(0, kv_len), -(-kv_len // K_BLOCK)
        k, mean = eight_bit._quantised_k(scheme, eight_bit._live(call.k_cache, call, seq), keys, None)
        assert same(got.k[seq, :, keys, :dim], k.codes)
        assert same(got.k_scale[seq, :, :blocks], k.scale[:, ::K_BLOCK, 0])
        assert not got.k[seq, :, kv_len : blocks * K_BLOCK].float().any()
        if mean is not None:
            assert got.mean is not None
            assert same(got.mean[seq, :, :dim], mean[:, 0])
        if scheme.v_scale is not None:
            assert got.v is not None and got.v_scale is not None
            v = eight_bit._quantised_v(scheme, eight_bit._live(call.v_cache, call, seq), keys, None)
            assert same(got.v[seq, :, :dim_v, keys], v.codes.transpose(1, 2))
            if scheme.v_scale == "channel":
                assert same(got.v_scale[seq, :, :dim_v], v.scale[:, 0])
            else:
                assert same(got.v_scale[seq, :, :blocks], v.scale[:, ::K_BLOCK, 0])
            assert not got.v[seq, :, :, kv_len : blocks * K_BLOCK].float().any()


def test_codes_of_another_scheme_are_told_apart() -> None:
    call = case(((3,), (70,)), heads=(2, 1))
    launch = launch_for(call, torch.empty_like(call.q), None)
    fp8, turned = quantised(launch, own.FP8), quantised(launch, own.HADAMARD)
    int8, rough = quantised(launch, own.INT8), quantised(launch, replace(own.INT8, smooth_k=False))

    assert not same(fp8.q[:3], turned.q[:3])
    assert not same(int8.k[:, :, :70], rough.k[:, :, :70])


@pytest.mark.parametrize("wrong", [{"qk_scale": "token"}, {"qk_scale": "tensor"}, {"v_scale": "head"}])
def test_scales_that_it_has_not_are_refused(wrong: dict[str, Any]) -> None:
    call = case(((1,), (1,)))

    with pytest.raises(ValueError, match="expected block"):
        quantised(launch_for(call, torch.empty_like(call.q), None), replace(own.FP8, **wrong))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {}),
        ("fp8", {"window_size": (20, 0), "sinks": torch.tensor([0.0, 3.0])}),
        ("hadamard", {"dtype": torch.float16, "dims": (48, 80)}),
        ("int8", {"softcap": 2.0, "window_size": (70, 5), "causal": False}),
        ("int8_v8", {"sinks": torch.tensor([-2.0, 12.0]), "page_size": 64}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain",
)
def test_answers_are_those_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    kernel, scheme = KERNELS[name]
    call = case(BLOCKS, heads=(2, 1), **options)
    out, lse = run(call, kernel)
    expected, expected_lse = SchemeAttention(scheme)(call, True)
    live = len(out)
    error = (out.double() - expected[:live].double()).abs() / expected[:live].double().abs().max()

    assert float(error.max()) <= 2.0**-6
    assert float((error > 2.0**-7).double().mean()) <= 0.01
    assert bool(torch.isclose(lse, expected_lse[:live], rtol=2.0**-18, atol=2.0**-16, equal_nan=False).all())


def test_nothing_past_the_plan_and_no_page_id_changes_a_bit() -> None:
    for name in ("fp8", "int8_v8"):
        one, other = (run(call, KERNELS[name][0]) for call in (case(((9, 1), (70, 20)), heads=(2, 1)), case(
            ((9, 1), (70, 20)), heads=(2, 1), fill=math.inf, garbage=2**30, seed=3)))  # fmt: skip
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_sequence_has_the_same_bits_alone() -> None:
    call = case(((9, 2), (70, 20)), heads=(2, 1))
    for name in ("fp8", "int8_v8"):
        out, lse = run(call, KERNELS[name][0])
        own_out, own_lse = run(alone(call, 1), KERNELS[name][0])
        assert KERNELS[name][0].record.batch_invariant
        assert torch.equal(out[9:], own_out)
        assert torch.equal(lse[9:], own_lse)


# What must be rejected


def units(call: Call, kernel: DeclaredKernel) -> tuple[float, float]:
    """The largest e and e_lse of a kernel under its record."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[call.q.dtype]
    r = roundoff(kernel.record.precision, dtype=name, out_dtype=name, scaled=False)
    exact = attend(call, live_rows(call), tie_width(r), every_tie=True)
    limit = bound(exact, r, softcap=False, head_dim=call.q.shape[2])
    out, lse = run(call, kernel)
    return (
        float(((out.double() - exact.out).abs() / limit.b).nan_to_num(math.inf).max()),
        float(((lse.double() - exact.lse).abs() / limit.b_lse).nan_to_num(math.inf).max()),
    )


def of_one_sign(lens: tuple[int, int], first: float = 0.0, **options: Any) -> Call:
    """q and v near 1, keys near 0 that raise the logits of those after the first tile by `first`: quantising costs little."""
    call = case(((lens[0],), (lens[1],)), heads=(2, 1), dims=(128, 32), page_size=64, **options)
    q, k, v = (x.clone() for x in (call.q, call.k_cache, call.v_cache))
    q.mul_(0.1).add_(1)
    v.mul_(0.1).add_(1)
    k.sub_(0.5).mul_(0.1)
    k[call.page_table[0, 1 : -(-lens[1] // 64)].long()] += first / (128 * call.softmax_scale)
    return replace(call, q=q, k_cache=k, v_cache=v)


def test_p_that_saturates_behind_a_stale_maximum_is_out_of_bounds_and_its_lse_is_clean() -> None:
    """Later keys are 5 nats above the first tile's, 7 powers of two: P times 256 is past 448 there."""
    call = of_one_sign((2, 300), first=5.0)
    right, wrong = units(call, own.prefill_fp8), units(call, own.prefill_fp8_lazy)

    assert max(right) <= 1
    assert wrong[0] > 1
    assert wrong[1] <= 1


def test_unscaled_p_that_underflows_behind_a_sink_is_out_of_bounds() -> None:
    call = of_one_sign((2, 100), sinks=torch.tensor([8.0, 12.0]))
    right, wrong = units(call, own.prefill_fp8), units(call, own.prefill_fp8_unscaled)

    assert max(right) <= 1
    assert wrong[0] > 1


def ones_v(keys: int) -> Call:
    """One row whose v are all 1, as the input class ones-v has them: only what sums lose is left of an error."""
    call = case(((1,), (keys,)), heads=(1, 1), dims=(32, 32), page_size=256, dtype=torch.float16)
    return replace(call, v_cache=torch.ones_like(call.v_cache))


def test_a_narrow_accumulator_loses_long_contexts_and_keeps_short_ones() -> None:
    """Of 3,072 keys, 96 instructions cut 33 addends each by half of 2^-13 of the sum: several percent of it."""
    assert max(units(ones_v(64), own.prefill_fp8_narrow)) <= 1
    assert max(units(ones_v(3072), own.prefill_fp8)) <= 1
    assert units(ones_v(3072), own.prefill_fp8_narrow)[0] > 1


def test_a_contract_of_fp22_would_let_the_narrow_accumulator_pass() -> None:
    """Why the records promise float32 sums, which two levels keep within what the rounding of P allows."""
    promised, call, limits = own.prefill_fp8.record.precision, ones_v(16384), []
    for precision in (promised, replace(promised, u_acc=2.0**-13)):
        r = roundoff(precision, dtype="fp16", out_dtype="fp16", scaled=False)
        limits.append(float(bound(attend(call, live_rows(call), tie_width(r)), r, softcap=False, head_dim=32).b.max()))

    assert limits[0] < 0.02
    assert limits[1] > 0.5


@every
def test_a_record_is_that_of_the_scheme(name: str) -> None:
    kernel, scheme = KERNELS[name]
    assert kernel.record.precision == eight_bit.record_of(scheme).precision
    assert looser_than_default(kernel.record.precision)
    assert kernel.record.precision.qk_block == Q_BLOCK
