"""Correct kernels that a search found out of bounds: each case here was once rejected, and none of them is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Precision, Record
from oracle.doors import slope_findings
from oracle.families import Family
from oracle.kernels.emulated import VARIANTS
from oracle.measure import Measured, measure, tell
from oracle.pool import without_fill
from oracle.references.arithmetic import Arithmetic, precision_of
from oracle.references.attention import attend
from oracle.references.emulator import emulate, record_of
from oracle.references.plan import live_rows
from oracle.references.rounding import DTYPES
from oracle.references.roundoff import roundoff
from oracle.trial import Seen, prepare

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=128, head_dim_v=128, scale=128**-0.5)
CASE = Case(name="case", family=FAMILY, q_lens=(64, 20), kv_lens=(400, 130), rows=60, seed=1)
ONE_KEY = replace(CASE, family=replace(FAMILY, window=(0, 0)))
CAPPED = replace(FAMILY, softcap=30.0)
SINKS = replace(CASE, family=replace(FAMILY, sinks=True), sinks="dominant")


def judged(case: Case, arithmetic: Arithmetic) -> Seen:
    """One case put to a correct kernel, under the tightest contract that it keeps."""
    made = prepare(case, record_of(arithmetic))
    out, lse = emulate(made.laid.call, arithmetic, made.truth.rows)
    m = measure(made.truth, without_fill(made.laid), out, lse)
    return Seen(
        case=case,
        candidate=m,
        incumbent=None,
        same_bits=None,
        findings=(),
        fills=(),
        calls=1,
        seconds=0.0,
        far_from_fp32=0.0,
    )


def figures(case: Case, arithmetic: Arithmetic) -> Measured:
    m = judged(case, arithmetic).candidate
    assert m is not None and m.worst_lse is not None
    assert m.worst.units <= 1 and m.worst_lse.units <= 1, (m.worst, m.worst_lse)
    return m


def near_ties(apart: float, dtype: str, keys: int = 2) -> tuple[Call, Tensor]:
    """Rows of a few keys whose logits lie about `apart` from each other, and values that cancel."""
    generator = torch.Generator().manual_seed(0)
    rows, dim = 200, 64
    q = torch.randn(rows, 1, dim, generator=generator) * apart
    k, v = (torch.randn(16, 1, dim, generator=generator) for _ in range(2))
    v[1] = -v[0]
    call = Call(
        q=q.to(DTYPES[dtype]),
        k_cache=k[None].to(DTYPES[dtype]),
        v_cache=v[None].to(DTYPES[dtype]),
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
        seqused_k=torch.tensor([keys], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        softmax_scale=dim**-0.5,
        causal=False,
    )
    return call, live_rows(call)


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", "textbook"), ("fp16", "textbook"), ("bf16", "p_e4m3"), ("bf16", "sum_after")]
)
def test_two_keys_of_nearly_equal_weight_and_opposite_values(dtype: str, name: str, apart: float) -> None:
    """They share a bin of ties, but a midpoint may lie between them: e was 45."""
    call, rows = near_ties(apart, dtype)
    truth = tell(call, rows, roundoff(precision_of(VARIANTS[name]), dtype=dtype, out_dtype=dtype, scaled=False))
    m = measure(truth, call, *emulate(call, VARIANTS[name]))

    assert m.worst.units <= 1


@pytest.mark.parametrize("inputs", ["needle", "one-hot", "peaked", "x10", "logits-3e3"])
@pytest.mark.parametrize("case", [CASE, ONE_KEY, SINKS], ids=["causal", "one-key", "sinks"])
@pytest.mark.parametrize("name", ["int8_qk", "e4m3"])
def test_kernels_that_quantise_inside_on_rows_where_nothing_averages(name: str, case: Case, inputs: str) -> None:
    """e_lse was 1.3 to 6e5, e up to 4e5: 2.2 deviations, scales of the keys in reach alone, weights that the errors lift."""
    figures(replace(case, inputs=inputs), VARIANTS[name])


@pytest.mark.parametrize("seed", range(3))
def test_errors_of_several_nats_beside_a_sink(seed: int) -> None:
    """Keys of little mass, whose logits may be off by nats: they come up, and the LSE with them; e_lse was 1.36."""
    family = replace(FAMILY, q_heads=1, kv_heads=1, head_dim=40, head_dim_v=40, scale=1.0, sinks=True)
    for sinks in ("below", "small", "dominant"):
        case = replace(CASE, family=family, q_lens=(100,), kv_lens=(200,), inputs="shifted-down", sinks=sinks, seed=seed)
        figures(replace(case, rows=100), VARIANTS["e4m3"])


@pytest.mark.parametrize("case", [CASE, ONE_KEY], ids=["causal", "one-key"])
def test_quantised_values_under_the_smallest_normal(case: Case) -> None:
    """A v far below the largest of its tile has an absolute error, not a relative one: e was 15."""
    figures(replace(case, inputs="needle"), Arithmetic(v_format="e4m3"))


@pytest.mark.parametrize("inputs", ["needle", "one-hot", "first-token"])
@pytest.mark.parametrize("dim", [128, 512])
def test_accumulators_without_guard_bits_on_rows_that_point_at_one_key(dim: int, inputs: str) -> None:
    """Products of one sign, each truncated: e_lse was 3.5."""
    family = replace(FAMILY, head_dim=dim, head_dim_v=64, scale=1.0)
    figures(replace(CASE, family=family, inputs=inputs, q_lens=(20,), kv_lens=(150,), rows=20), VARIANTS["aligned"])


def test_a_row_sum_after_rounding_to_eight_bits() -> None:
    """The rounding acts through v - out, over a sum that is less by as much: e was 1.008, e_det 1.003."""
    arithmetic = replace(VARIANTS["p_e4m3"], row_sum="after", splits=7, tile=32)
    for seed in range(4):
        assert figures(replace(CASE, inputs="probe-v", seed=seed), arithmetic).worst_det <= 1


@pytest.mark.parametrize(
    ("inputs", "family", "name"),
    [
        ("flat", FAMILY, "poly3"),
        ("x10", CAPPED, "tanh_approx"),
        ("shifted-down", CAPPED, "poly3"),
        ("positive-v", FAMILY, "p_e4m3"),
    ],
)
def test_no_slope_of_a_correct_kernel_is_a_finding(inputs: str, family: Family, name: str) -> None:
    """A polynomial's error over a narrow range of logits, tanh's over saturated ones, coarse weights: each has a slope."""
    arithmetic = VARIANTS[name]
    seen = [judged(replace(CASE, inputs=inputs, family=family, seed=seed), arithmetic) for seed in range(4)]

    assert slope_findings(seen, Record(precision=precision_of(arithmetic)))[0] == []


def test_a_second_moment_under_a_dominant_sink() -> None:
    """sqrt(sum p t^2) is larger than sum p t by 1 / sqrt(sum p): the output's bound takes the first, the LSE's the second."""
    made = prepare(SINKS, Record())
    x = made.truth.exact
    live = ~x.empty

    assert bool((x.b1 <= x.mass.sqrt() * x.b2 * (1 + 1e-9))[live].all())
    assert float((x.b2 / x.b1)[live].median()) > 10


def test_the_gap_is_what_separates_the_two_heaviest_atoms() -> None:
    call, rows = near_ties(1.0, "bf16", keys=5)
    s = torch.einsum("rhd,jhd->rhj", call.q.double(), call.k_cache[0, :5].double()) * call.softmax_scale
    two = s.topk(2).values

    assert torch.allclose(attend(call, rows, 2**-8).gap, two[..., 0] - two[..., 1])
    sunk = replace(call, sinks=torch.tensor([100.0]))
    assert torch.allclose(attend(sunk, rows, 2**-8).gap, 100.0 - two[..., 0])
    alone, rows = near_ties(1.0, "bf16", keys=1)
    assert bool(attend(alone, rows, 2**-8).gap.isinf().all())


def test_the_default_contract_is_no_wider_for_all_this() -> None:
    """On rows like most, RMS e of the textbook is what it was: the roundings of P and of the output."""
    m = judged(replace(CASE, inputs="randn"), VARIANTS["textbook"]).candidate
    truth = prepare(replace(CASE, inputs="randn"), Record(precision=Precision())).truth

    assert m is not None and 0.12 <= m.rms <= 0.16
    assert float((truth.exact.v2g / truth.exact.v2).median()) < 1.05
