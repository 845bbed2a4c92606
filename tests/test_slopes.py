"""Systematic errors: planted gains, temperatures and biases are recovered, and what a correct kernel does is none of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Record
from oracle.doors import BIAS_BETA, SLOPE_BETA
from oracle.families import Family
from oracle.measure import DIRECTIONS, Measured, Sums, Truth, measure, slope, tell
from oracle.pool import without_fill
from oracle.references.arithmetic import Arithmetic
from oracle.references.attention import attend
from oracle.references.emulator import emulate
from oracle.references.rounding import DTYPES
from oracle.references.roundoff import tie_width
from oracle.trial import prepare

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=32, head_dim_v=32, scale=32**-0.5)
MANY = Case(name="many", family=FAMILY, q_lens=(100, 100), kv_lens=(160, 140), page_size=8, rows=200, seed=1)


@cache
def truth_of(case: Case) -> tuple[Truth, Call]:
    made = prepare(case, Record())
    return made.truth, without_fill(made.laid)


def measured(case: Case, out: Tensor) -> Measured:
    truth, call = truth_of(case)
    return measure(truth, call, out, None)


def noisy(case: Case, exact: Tensor, seed: int, size: float = 0.15) -> Tensor:
    """`exact` with zero-mean noise of `size` bounds, in the output's format."""
    truth, _ = truth_of(case)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (exact + size * truth.bound.b * noise).to(DTYPES[case.dtype])


def warmer(case: Case, by: float) -> Tensor:
    """The exact answer at another softmax scale."""
    truth, call = truth_of(case)
    warm = replace(call, softmax_scale=call.softmax_scale * (1 + by))
    return attend(warm, truth.rows, tie_width(truth.roundoff)).out


PEAKED = replace(MANY, inputs="peaked")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", [1e-3, -1e-3, 3e-3])
def test_slopes_recover_a_planted_gain(by: float, seed: int) -> None:
    truth, _ = truth_of(PEAKED)
    found = {name: slope(s) for name, s in measured(PEAKED, noisy(PEAKED, truth.exact.out * (1 + by), seed)).sums.items()}

    gain = found["gain"]
    assert gain.beta == pytest.approx(by, abs=5 * abs(gain.beta / gain.z)) and gain.beta * by > 0
    assert abs(gain.z) > 5 and gain.z * by > 0 and gain.rows > 20 and gain.effect > 0.02
    assert abs(found["bias"].z) < 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", [1e-3, -1e-3, 3e-3])
def test_slopes_recover_a_planted_temperature(by: float, seed: int) -> None:
    found = {name: slope(s) for name, s in measured(PEAKED, noisy(PEAKED, warmer(PEAKED, by), seed)).sums.items()}

    temperature = found["temperature"]
    assert temperature.beta == pytest.approx(by, abs=5 * abs(temperature.beta / temperature.z))
    assert abs(temperature.z) > 5 and temperature.z * by > 0 and temperature.rows > 20 and temperature.effect > 0.02


@pytest.mark.parametrize("by", [0.1, -0.1])
def test_slopes_recover_a_planted_bias(by: float) -> None:
    truth, _ = truth_of(MANY)
    found = slope(measured(MANY, noisy(MANY, truth.exact.out + by * truth.bound.b, 0)).sums["bias"])

    assert found.beta == pytest.approx(by, rel=0.2) and abs(found.z) > 5


@pytest.mark.parametrize("inputs", ["randn", "peaked", "offset-v", "constant-v", "ones-v", "cancel-v", "probe-v"])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_stay_quiet_for_noise_of_mean_zero(inputs: str, seed: int) -> None:
    """Half the size at which they count, or z below 5: outputs lie closer below a power of two, as 1 is, than above."""
    case = replace(MANY, inputs=inputs)
    truth, _ = truth_of(case)
    found = {name: slope(sums) for name, sums in measured(case, noisy(case, truth.exact.out, seed)).sums.items()}

    for name, floor in (("gain", SLOPE_BETA), ("temperature", SLOPE_BETA), ("bias", BIAS_BETA)):
        assert abs(found[name].z) < 5 or abs(found[name].beta) < floor / 2, (name, found[name])


def test_an_exact_value_between_two_outputs_is_no_bias() -> None:
    """A constant v of e4m3 under a scale lies halfway between two bf16: correct kernels give either, by chance."""
    tie = 1 + 2.0**-8
    truth, call = truth_of(replace(MANY, inputs="ones-v"))
    exact = replace(truth.exact, out=truth.exact.out * tie)
    halfway = replace(truth, exact=exact)
    up = torch.rand(exact.out.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    out = torch.where(up, tie + 2.0**-8, tie - 2.0**-8).bfloat16()
    m = measure(halfway, call, out, None)

    assert all(abs(slope(m.sums[name]).z) < 5 for name in DIRECTIONS)
    nearest = torch.full_like(out, tie)
    assert float(nearest[0, 0, 0]) != tie
    assert all(abs(slope(measure(halfway, call, nearest, None).sums[name]).z) < 5 for name in DIRECTIONS)


def test_an_output_truncated_where_it_should_be_rounded_is_a_gain() -> None:
    truth, _ = truth_of(MANY)
    noise = torch.randn(truth.exact.out.shape, generator=torch.Generator().manual_seed(1))
    fine_grained = (truth.exact.out + 0.1 * truth.bound.b * noise).float()
    truncated = (fine_grained.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    found = slope(measured(MANY, truncated).sums["gain"])

    assert found.beta < -4e-4 and found.z < -5 and found.effect > 0.02


def test_inputs_that_say_nothing_of_a_direction_give_no_slope() -> None:
    """A constant v has no temperature; nothing has one where there is nothing."""
    case = replace(MANY, inputs="constant-v")
    constant = measured(case, truth_of(case)[0].exact.out.bfloat16())

    assert slope(constant.sums["temperature"]).rows == 0
    assert slope(Sums()) == slope(Sums(elements=5)) and slope(Sums()).z == 0


def test_a_shift_of_all_logits_shows_beside_a_sink_only() -> None:
    """As a gain of the size that `level` says, and without a sink not at all."""
    shift = 1e-6
    for case, sink in ((replace(MANY, q_lens=(100,), kv_lens=(160,)), False), (replace(MANY, inputs="shifted-up"), True)):
        truth, call = truth_of(case)
        if sink:
            call = replace(call, sinks=torch.full((4,), 155.0))
            truth = tell(call, truth.rows, truth.roundoff)
            moved = attend(replace(call, softmax_scale=call.softmax_scale * (1 + shift)), truth.rows, 2.0**-8).out
            sums = measure(truth, call, moved, None).sums["gain"]
            assert slope(sums).beta == pytest.approx(shift * sums.level / sums.b, rel=0.1)
            lower = replace(call, sinks=torch.full((4,), 155.0 - 2.0**-12))  # as if exp were too large by that for every key
            sums = measure(truth, call, attend(lower, truth.rows, 2.0**-8).out, None).sums["gain"]
            assert slope(sums).beta == pytest.approx(2.0**-12 * sums.weight / sums.b, rel=0.1)
        else:
            sums = measure(truth, call, truth.exact.out.bfloat16(), None).sums["gain"]
            assert sums.level == pytest.approx(0.0, abs=1e-9 * sums.b)


def test_a_tight_cap_leaves_few_values_of_p_and_their_rounding_looks_like_a_temperature() -> None:
    """Of the textbook kernel, by less than u_p over the deviation of the logits, and not where P is float32."""
    family = replace(FAMILY, softcap=0.75)
    case = replace(MANY, family=family, inputs="x10")
    truth, call = truth_of(case)
    seen = {}
    for p_format in ("input", "fp32"):
        out, _ = emulate(call, Arithmetic(p_format=p_format), truth.rows)
        seen[p_format] = measure(truth, call, out, None).sums["temperature"]
    coarse, exact = slope(seen["input"]), slope(seen["fp32"])

    assert abs(coarse.z) > 5 and abs(coarse.beta) > 4 * abs(exact.beta)
    assert abs(coarse.beta) < 2.0**-8 * seen["input"].narrow / seen["input"].b


def test_sums_add_as_the_cases_they_are_of() -> None:
    """The slope of two halves together is that of the whole."""
    truth, call = truth_of(MANY)
    out = noisy(MANY, truth.exact.out * 1.002, 0)
    whole = measure(truth, call, out, None).sums
    parts = [measure(tell(call, truth.rows[i], truth.roundoff), call, out[i], None).sums for i in (slice(80), slice(80, None))]
    for name in DIRECTIONS:
        assert slope(parts[0][name] + parts[1][name]).beta == pytest.approx(slope(whole[name]).beta, rel=1e-9)
        assert slope(parts[0][name] + parts[1][name]).z == pytest.approx(slope(whole[name]).z, rel=1e-6)
