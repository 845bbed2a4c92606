"""The bound holds for kernels that keep their promises, grows with what they promise, and is too small for those that do not."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Precision
from oracle.families import Family
from oracle.formats import FORMATS
from oracle.kernels.emulated import VARIANTS
from oracle.material import material
from oracle.mutants.planted import FAULTS
from oracle.pool import Fill, lay_out, without_fill
from oracle.references.arithmetic import Arithmetic, precision_of
from oracle.references.attention import Exact, attend
from oracle.references.bound import Bound, bound
from oracle.references.emulator import emulate
from oracle.references.logits import UNSEEN
from oracle.references.operations import accumulate
from oracle.references.plan import live_rows
from oracle.references.rounding import FORMAT_NAMES
from oracle.references.roundoff import Roundoff, roundoff, tie_width
from oracle.strategies import calls

laws = settings(derandomize=True, deadline=None, database=None, max_examples=25)
few = settings(laws, max_examples=8)

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=32, head_dim_v=32, scale=32**-0.5)
CASE = Case(name="case", family=FAMILY, q_lens=(20, 1, 6), kv_lens=(150, 60, 3), page_size=8, seed=1)
PLAIN = Precision()


def promised(call: Call, precision: Precision = PLAIN) -> Roundoff:
    name = FORMAT_NAMES[call.q.dtype]
    scaled = any(s is not None for s in (call.q_scale, call.k_scale, call.v_scale))
    return roundoff(precision, dtype=name, out_dtype=name, scaled=scaled)


def limits(call: Call, precision: Precision = PLAIN) -> tuple[Exact, Bound]:
    r = promised(call, precision)
    exact = attend(call, live_rows(call), tie_width(r), every_tie=True)
    return exact, bound(exact, r, softcap=call.softcap > 0, head_dim=call.q.shape[2])


@cache
def call_of(case: Case) -> Call:
    return without_fill(lay_out(case, material(case), fill=Fill.STALE, salt=0))


def units(call: Call, arithmetic: Arithmetic, precision: Precision = PLAIN) -> tuple[float, float, float]:
    """(e, e_det, e_lse) of a kernel under a promise."""
    exact, b = limits(call, precision)
    out, lse = emulate(call, arithmetic)
    live = ~exact.empty
    if not bool(live.any()):
        return 0.0, 0.0, 0.0
    error, lse_error = (out.double() - exact.out).abs()[live], (lse.double() - exact.lse).abs()[live]
    return float((error / b.b[live]).max()), float((error / b.b_det[live]).max()), float((lse_error / b.b_lse[live]).max())


# The constants


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_the_constants_are_those_of_the_formats(name: str) -> None:
    f = FORMATS[name]
    r = roundoff(PLAIN, dtype=name, out_dtype=name, scaled=False)

    assert (r.u_out, r.u_p, r.a_out) == (f.u, f.u, f.smallest_subnormal / 2)
    assert r.a_p == (2.0**-25 if name == "fp16" else 2.0**-126), "exp2 flushes what the format of P could hold"
    assert r.u_product == (2.0**-24 if name == "fp32" else 0.0)
    assert (r.u_acc, r.eps_exp, r.eps_tanh) == (2.0**-23, 2.0**-13, 2.0**-11)
    assert (r.u_qk, r.qk_step, r.u_v, r.p_step, r.scales, r.sum_after) == (0.0, 0.0, 0.0, 0.0, 0, False)


@pytest.mark.parametrize(
    ("width", "guard", "u_acc"), [(16, 2, 2.0**-23), (8, 2, 2.0**-23), (32, -10, 2.0**-13)], ids=["16-bit", "tf32", "fp22"]
)
def test_products_beside_a_larger_sum_cost_the_places_that_the_bound_allows(width: int, guard: int, u_acc: float) -> None:
    """And more than one place for 16 products, as a tensor core that aligns all addends to the largest one cuts each of them."""
    a = torch.rand(1, 64, 2048, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * u_acc * 2.0**8
    a = a.float().double()
    arithmetic = Arithmetic(aligned_width=width, aligned_guard=guard)
    got = accumulate(
        torch.ones(1, 64, 1, dtype=torch.float64), a, torch.ones(1, 2048, 1, dtype=torch.float64), "aligned", arithmetic
    )
    lost = ((1 + a.sum(-1, keepdim=True) - got) / got / u_acc / (2048 / 16)).mean()
    allowed = roundoff(Precision(u_acc=u_acc), dtype="bf16", out_dtype="bf16", scaled=False).truncations

    assert 1 < float(lost) <= allowed


def test_a_promise_changes_its_constant() -> None:
    def of(**promises: Any) -> Roundoff:
        return roundoff(Precision(**promises), dtype="bf16", out_dtype="bf16", scaled=True)

    assert of(p_format="e4m3", p_scale=256.0).u_p == 2.0**-4 and of(p_format="e4m3", p_scale=256.0).a_p == 2.0**-10 / 256
    assert of(p_format="int8").p_step == 1 / 127 and of(p_format="int8").u_p == 0
    assert of(p_format="fp16", flush_to_zero=True).a_p == 2.0**-14 and of(flush_to_zero=True).a_out == 2.0**-126
    assert of(qk_format="e4m3").u_qk == of(v_format="e4m3").u_v == 2.0**-4 and of(qk_format="int8").qk_step == 1 / 127
    assert of(row_sum="after").sum_after and of().scales == 2
    assert roundoff(PLAIN, dtype="bf16", out_dtype="fp32", scaled=False).u_out == 2.0**-24


def test_weights_are_told_apart_by_the_coarsest_format_that_rounds_them() -> None:
    for precision, width in (
        (PLAIN, 2.0**-8),
        (Precision(p_format="fp32"), 2.0**-24),
        (Precision(p_format="e4m3"), 2.0**-4),
        (Precision(p_format="int8"), 2.0**-4),
        (Precision(v_format="e4m3"), 2.0**-4),
    ):
        assert tie_width(roundoff(precision, dtype="bf16", out_dtype="bf16", scaled=False)) == width


# Its form


@laws
@given(calls())
def test_the_likely_bound_lies_between_the_output_rounding_and_the_worst_case(call: Call) -> None:
    """And no live element has a bound of 0, no row without keys another."""
    exact, b = limits(call)
    live, r = ~exact.empty, promised(call)

    assert bool((b.b[live] >= (1 + 2 * r.u_out) * (r.u_out * exact.out[live].abs() + r.a_out)).all())
    assert bool((b.b <= b.b_det).all()) and bool(torch.isfinite(b.b_det).all())
    assert bool((b.b_lse[live] > 0).all()) and bool((b.b_lse <= b.b_lse_after).all()) and bool((b.b_lse <= b.b_lse_det).all())
    for name in ("b", "b_det", "b_lse", "b_lse_after", "b_lse_det"):
        assert bool((getattr(b, name)[~live] == 0).all())
    assert bool(((b.logit_share >= 0) & (b.logit_share <= 1)).all())


LOOSER: list[dict[str, Any]] = [
    {"p_format": "e4m3"},
    {"p_scale": 0.5},
    {"u_acc": 2.0**-13},
    {"eps_exp": 2.0**-10},
    {"eps_tanh": 2.0**-9},
    {"row_sum": "after"},
    {"flush_to_zero": True},
    {"qk_format": "int8"},
    {"qk_format": "e4m3"},
    {"v_format": "e4m3"},
]


@pytest.mark.parametrize("promise", LOOSER, ids=lambda p: ",".join(map(str, p.items())))
def test_a_looser_promise_never_lowers_a_limit(promise: dict[str, Any]) -> None:
    """And raises some; the moments of the softmax are the same for both."""
    names = ("b", "b_det", "b_lse")
    raised = 0
    for case in (CASE, replace(CASE, family=replace(FAMILY, softcap=5.0)), replace(CASE, dtype="fp16", inputs="peaked")):
        call = call_of(case)
        loose = promised(call, Precision(**promise))
        exact = attend(call, live_rows(call), tie_width(loose), every_tie=True, quantised_v=loose.u_v > 0)
        tight, wide = (bound(exact, r, softcap=call.softcap > 0, head_dim=32) for r in (promised(call), loose))
        for name in names:
            before, after = getattr(tight, name), getattr(wide, name)
            assert bool((after >= before * (1 - 1e-12)).all()), name
            raised += bool((after > before * 1.0001).any())
    assert raised


@pytest.mark.parametrize("power", [-20, 7, 30])
@pytest.mark.parametrize("inputs", ["randn", "peaked", "offset-v", "ties"])
def test_limits_scale_with_v_and_those_of_the_lse_do_not(power: int, inputs: str) -> None:
    call = call_of(replace(CASE, inputs=inputs))
    _, one = limits(call)
    _, two = limits(replace(call, v_cache=call.v_cache * 2.0**power))

    for name in ("b", "b_det"):
        assert torch.allclose(getattr(two, name), getattr(one, name) * 2.0**power, rtol=1e-9, atol=0.0)
    assert torch.equal(one.b_lse, two.b_lse) and torch.equal(one.b_lse_det, two.b_lse_det)


@pytest.mark.parametrize("inputs", ["randn", "peaked", "ties"])
def test_a_scale_of_v_is_a_v_of_that_size(inputs: str) -> None:
    """But for the rounding of the product."""
    call = call_of(replace(CASE, inputs=inputs))
    _, one = limits(replace(call, v_scale=4.0))
    _, two = limits(replace(call, v_cache=call.v_cache * 4.0))

    assert torch.allclose(one.b, two.b, rtol=1e-3) and bool((one.b >= two.b).all())


def test_the_order_of_keys_matters_to_no_limit_of_the_lse() -> None:
    call = call_of(replace(CASE, family=replace(FAMILY, causal=False), q_lens=(20,), kv_lens=(64,)))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    table = call.page_table.clone()
    table[0, :8] = table[0, order]
    (_, one), (_, two) = limits(call), limits(replace(call, page_table=table))

    for name in ("b_lse", "b_lse_after", "b_lse_det"):
        assert torch.allclose(getattr(one, name), getattr(two, name), rtol=1e-9)


# Kernels that keep their promises

KEEPING = (
    "textbook",
    "tile_16",
    "reversed",
    "splits_4",
    "lazy_8",
    "poly3",
    "sum_after",
    "p_fp32",
    "tanh_approx",
    "rz16",
    "wgmma",
    "p_e4m3",
)


@few
@given(call=calls(spreads=(1.0, 0.1, 5.0, 30.0)), name=st.sampled_from(KEEPING))
def test_what_a_kernel_promises_bounds_its_error(call: Call, name: str) -> None:
    assume(bool((attend(call, live_rows(call), 2.0**-8).out.abs() < torch.finfo(call.q.dtype).max).all()))
    e, e_det, e_lse = units(call, VARIANTS[name], precision_of(VARIANTS[name]))

    assert e <= 1 and e_det <= 1 and e_lse <= 1


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_kernel_promises_bounds_its_error_on_inputs_of_every_kind(name: str) -> None:
    for inputs in ("randn", "peaked", "ties", "cancel-v", "offset-v", "first-token"):
        call = call_of(replace(CASE, inputs=inputs, family=replace(FAMILY, softcap=20.0 if name == "tanh_approx" else 0.0)))
        e, e_det, e_lse = units(call, VARIANTS[name], precision_of(VARIANTS[name]))
        assert e <= 1 and e_det <= 1 and e_lse <= 1, inputs


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("above", [85.0, 100.0])
def test_the_bound_holds_where_outputs_are_subnormal_before_v_is_scaled(dtype: str, above: float) -> None:
    """Under a sink that takes all but 1e-40 of the weight, what a scale multiplies has lost most of its bits."""
    call = call_of(replace(CASE, dtype=dtype, kv_lens=(20, 4, 3), q_lens=(20, 4, 3)))
    call = replace(call, sinks=torch.full((4,), above), v_scale=5.5)
    e, e_det, _ = units(call, Arithmetic())

    assert e <= 1 and e_det <= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("above", "fits"), [(100.0, True), (80.0, False)])
def test_weights_that_exp2_flushes_may_be_lost_and_larger_ones_may_not(dtype: str, above: float, fits: bool) -> None:
    """Logits are a few nats here, and e^-88 is 2^-127.  A kernel on a GPU gave 0 for -4.0e-38, rightly."""
    call = call_of(replace(CASE, dtype=dtype, kv_lens=(20, 4, 3), q_lens=(20, 4, 3)))
    exact, b = limits(replace(call, sinks=torch.full((4,), above)))
    live = ~exact.empty
    all_flushed = bool((exact.out[live].abs() <= b.b[live]).all())  # a kernel without those weights gives 0

    assert all_flushed == fits
    assert bool((exact.out[live] != 0).any()), "no weight was there to be lost"


@laws
@given(call=calls(), qk_block=st.sampled_from((1, 16)))
def test_the_largest_error_of_a_key_is_no_less_than_what_it_is_on_average(call: Call, qk_block: int) -> None:
    exact = attend(call, live_rows(call), 2.0**-8, qk_block=qk_block)
    for mean, largest in (("b2", "b_max"), ("k_peak", "k_peak_max"), ("q_peak", "q_peak_max"), ("a2", "a_max")):
        assert bool((getattr(exact, mean) <= getattr(exact, largest) * (1 + 1e-9)).all()), mean


@pytest.mark.parametrize(("name", "larger"), [("e4m3", 1.0), ("int8_qk", 10.0)])
def test_the_bound_holds_where_a_sink_leaves_the_keys_no_weight_that_float64_shows(name: str, larger: float) -> None:
    """Quantised logits of thousands are off by thousands: a key far below the sink may come up above it."""
    lifted = 0
    for seed in range(8):
        case = replace(CASE, inputs="logits-3e4", q_lens=(1,) * 100, kv_lens=(2,) * 100, seed=seed)
        call = call_of(case)
        call = replace(call, sinks=torch.zeros(4), softmax_scale=larger * call.softmax_scale)
        exact = attend(call, live_rows(call), 2.0**-8)
        _, lse = emulate(call, VARIANTS[name])
        lifted += int(((lse - exact.lse).abs() > 1)[exact.mass < UNSEEN].sum())
        e, e_det, e_lse = units(call, VARIANTS[name], precision_of(VARIANTS[name]))
        assert e <= 1 and e_det <= 1 and e_lse <= 1
    assert lifted > 0, "no key came up: the test shows nothing"


def test_a_sink_far_above_exact_keys_leaves_the_bound_of_the_lse_narrow() -> None:
    call = replace(call_of(replace(CASE, inputs="logits-3e4")), sinks=torch.full((4,), 1e5))
    exact, b = limits(call)

    assert bool((exact.mass == 0).any()) and float(b.b_lse.max()) < 0.5


# The worst case is a theorem


def one_head(keys: int, seed: int, spread: float = 1.0) -> Call:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        spread * torch.randn(4, 1, 16, generator=g),
        torch.randn(keys, 1, 16, generator=g),
        torch.randn(keys, 1, 8, generator=g),
    )
    return Call(
        q=q.bfloat16(), k_cache=k.view(1, keys, 1, 16).bfloat16(), v_cache=v.view(1, keys, 1, 8).bfloat16(),
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32), seqused_k=torch.tensor([keys], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32), softmax_scale=0.25, causal=False,
    )  # fmt: skip


def with_rounded_weights(call: Call, rounding: Tensor) -> Tensor:
    """The output where each weight of the numerator is off by a share `rounding` (4, columns, keys) of itself, exactly."""
    s = torch.einsum("rhd,jhd->rj", call.q.double(), call.k_cache[0].double()) * call.softmax_scale
    p = torch.softmax(s, -1)
    return torch.einsum("rcj,jc->rc", p[:, None, :] * (1 + rounding), call.v_cache[0, :, 0].double())[:, None]


@laws
@given(keys=st.integers(1, 120), seed=st.integers(0, 99), spread=st.floats(0.0, 8.0), adverse=st.booleans())
def test_no_roundings_of_p_exceed_the_worst_case(keys: int, seed: int, spread: float, adverse: bool) -> None:
    """Not even where each of them is as large as it can be and has the sign of its v."""
    call = one_head(keys, seed, spread)
    sign = torch.sign(call.v_cache[0, :, 0].double().T).expand(4, -1, -1)
    signs = sign if adverse else torch.randn(4, 8, keys, generator=torch.Generator().manual_seed(seed)).sign()
    exact, b = limits(call)
    got = with_rounded_weights(call, signs * 2.0**-8).bfloat16().double()

    assert bool(((got - exact.out).abs() <= b.b_det).all())


def test_conspiring_roundings_exceed_the_likely_bound_and_not_the_worst_case() -> None:
    """Why e > 1 on an input found by search is looked at, and on a natural one is a fault."""
    call = one_head(120, 0)
    sign = torch.sign(call.v_cache[0, :, 0].double().T).expand(4, -1, -1)
    exact, b = limits(call)
    error = (with_rounded_weights(call, sign * 2.0**-8).bfloat16().double() - exact.out).abs()

    assert float((error / b.b).max()) > 1.5 and float((error / b.b_det).max()) <= 1


# Kernels that do not keep their promises: the bound is too small for them


@pytest.mark.parametrize(
    ("name", "inputs", "options"),
    [
        ("p_e4m3_scaled", "randn", {}),
        ("p_e4m3_unscaled", "peaked", {}),
        ("pv_bf16", "positive-v", {"family": replace(FAMILY, causal=False), "kv_lens": (600, 60, 3)}),
        ("softcap_omitted", "peaked", {"family": replace(FAMILY, softcap=5.0)}),
        ("last_key_dropped", "randn", {}),
        ("diagonal_plus_1", "randn", {}),
        ("tile_1_skipped", "randn", {}),
        ("page_stale", "randn", {}),
        ("head_mapped_wrong", "randn", {}),
        ("scale_half_percent", "first-token", {}),
        ("zeros", "randn", {}),
    ],
)
def test_a_broken_promise_exceeds_the_bound(name: str, inputs: str, options: dict[str, Any]) -> None:
    e, _, _ = units(call_of(replace(CASE, inputs=inputs, **options)), FAULTS[name].arithmetic)

    assert e > 1


@pytest.mark.parametrize("name", ["row_sum_bf16", "scale_tenth_percent", "last_key_dropped", "exp2_error"])
def test_a_broken_promise_about_weights_exceeds_the_bound_of_the_lse(name: str) -> None:
    _, _, e_lse = units(call_of(replace(CASE, inputs="peaked")), FAULTS[name].arithmetic)

    assert e_lse > 1


def test_a_rounding_of_fp32_is_far_inside_the_bounds_of_narrow_formats_and_fills_that_of_fp32() -> None:
    """The bound is no wider than what its format does: a textbook kernel takes a tenth of it or more."""
    for dtype in ("bf16", "fp16"):
        e, _, _ = units(call_of(replace(CASE, dtype=dtype)), Arithmetic())
        assert 0.1 < e <= 1, dtype
    exact, b = limits(call_of(CASE))
    fine = exact.out.float().double()
    assert float(((fine - exact.out).abs() / b.b)[~exact.empty].max()) < 1e-3


def test_every_field_of_the_bound_and_of_the_constants_is_compared_somewhere_above() -> None:
    """A new term wants a law of its own."""
    assert {f.name for f in fields(Bound)} == {"b", "b_det", "b_lse", "b_lse_after", "b_lse_det", "logit_share"}
    assert math.isclose(2 * FORMATS["bf16"].u, torch.finfo(torch.bfloat16).eps)
