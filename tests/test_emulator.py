"""The emulator: correct attention with any knobs, off by no more than what the knobs round, and by the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.contract import Call, Precision
from oracle.formats import FORMATS, U32
from oracle.kernels import emulated
from oracle.kernels.emulated import VARIANTS
from oracle.references import emulator
from oracle.references.arithmetic import Accumulator, Arithmetic, Planted, precision_of
from oracle.references.emulator import as_kernel, emulate
from oracle.references.operations import accumulate, exp2, round_p, tanh, tree_sum
from oracle.references.plan import RowPlan, head_scales, live_rows, row_plan, tokens
from oracle.references.rounding import FORMAT_NAMES
from oracle.references.schedule import Cost, batches
from oracle.strategies import calls

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=20)
any_call = calls(dtypes=("bf16", "fp16", "fp32", "e4m3"), max_kv=150, page_sizes=(4, 1, 16))

ALIGNED = Arithmetic(qk_accumulator="aligned", pv_accumulator="aligned")
E4M3 = Arithmetic(p_format="e4m3")
INT8 = Arithmetic(qk_format="int8")

# one entry for each field of Arithmetic, or for each of its values: what it changes, and from what
KNOBS: dict[str, tuple[Arithmetic, Arithmetic]] = {
    "tile": (Arithmetic(tile=16), Arithmetic()),
    "reverse": (Arithmetic(reverse=True), Arithmetic()),
    "splits": (Arithmetic(splits=4), Arithmetic()),
    "qk_accumulator=rz16": (Arithmetic(qk_accumulator="rz16"), Arithmetic()),
    "qk_accumulator=aligned": (Arithmetic(qk_accumulator="aligned"), Arithmetic()),
    "qk_accumulator=bf16": (Arithmetic(qk_accumulator="bf16"), Arithmetic()),
    "qk_accumulator=fp22": (Arithmetic(qk_accumulator="fp22"), Arithmetic()),
    "pv_accumulator=rz16": (Arithmetic(pv_accumulator="rz16"), Arithmetic()),
    "pv_accumulator=aligned": (Arithmetic(pv_accumulator="aligned"), Arithmetic()),
    "pv_accumulator=bf16": (Arithmetic(pv_accumulator="bf16"), Arithmetic()),
    "pv_accumulator=fp22": (Arithmetic(pv_accumulator="fp22"), Arithmetic()),
    "aligned_width": (replace(ALIGNED, aligned_width=16), ALIGNED),
    "aligned_guard": (replace(ALIGNED, aligned_guard=2), ALIGNED),
    "p_format=fp32": (Arithmetic(p_format="fp32"), Arithmetic()),
    "p_format=fp16": (Arithmetic(p_format="fp16"), Arithmetic(p_format="fp32")),
    "p_format=bf16": (Arithmetic(p_format="bf16"), Arithmetic()),
    "p_format=e4m3": (E4M3, Arithmetic()),
    "p_format=bf16-truncated": (Arithmetic(p_format="bf16-truncated"), Arithmetic(p_format="bf16")),
    "p_format=fp16-flushed": (Arithmetic(p_format="fp16-flushed"), Arithmetic(p_format="fp16")),
    "p_scale": (replace(E4M3, p_scale=256.0), E4M3),
    "exp2=poly3": (Arithmetic(exp2="poly3"), Arithmetic()),
    "exp2=error-1e-3": (Arithmetic(exp2="error-1e-3"), Arithmetic()),
    "row_sum": (Arithmetic(row_sum="after"), Arithmetic()),
    "row_sum_format": (Arithmetic(row_sum_format="bf16"), Arithmetic()),
    "lazy": (Arithmetic(lazy=8.0), Arithmetic()),
    "subtract_first": (Arithmetic(subtract_first=True), Arithmetic()),
    "tanh": (Arithmetic(tanh="approx"), Arithmetic()),
    "qk_format=int8": (INT8, Arithmetic()),
    "qk_format=e4m3": (Arithmetic(qk_format="e4m3"), Arithmetic()),
    "qk_block": (replace(INT8, qk_block=16), INT8),
    "smooth_k": (replace(INT8, smooth_k=True), INT8),
    "v_format": (Arithmetic(v_format="e4m3"), Arithmetic()),
}
ARITHMETICS = VARIANTS | {name: changed for name, (changed, _) in KNOBS.items() if changed not in VARIANTS.values()}

# roundings on the path of one accumulation of d products, times the error of each (see Arithmetic)
CHAINS: dict[Accumulator, tuple[float, float]] = {  # roundings of k products = first * k + 1, error of one
    "rn": (0.0, U32),
    "rz16": (1 / 16, 2 * U32),
    "aligned": (1.25, 2 * U32),  # of 8 products and the accumulator each loses a place of the largest, and so does the sum
    "bf16": (0.0, 2.0**-8 + U32),
    "fp22": (1 / 32, 2.0**-13 + U32),
}
U_P = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4, "bf16-truncated": 2.0**-7, "fp16-flushed": 2.0**-11}
A_P = {"fp16": 2.0**-25, "fp16-flushed": 2.0**-14, "e4m3": 2.0**-10}
EPS_EXP = {"exact": U32, "poly3": 2.0**-13, "error-1e-3": 1.01e-3}


class Dense:
    """The exact softmax of one row and head, and what limits a kernel's distance from it.

    The limit is that of docs/numerics.md, section 2.3, with every float32 rounding of a logit counted at its largest.
    """

    def __init__(self, call: Call, row: int, head: int) -> None:
        plan = row_plan(call, torch.tensor([row]))
        self.call, seq, hk = call, int(plan.seq[0]), head // (call.q.shape[1] // call.k_cache.shape[2])
        self.every_q = call.q[: int(call.cu_seqlens_q[call.live_seqs]), head].double()
        self.q = call.q[row, head].double()
        lo, hi, kv_len = int(plan.lo[0]), int(plan.hi[0]), int(call.seqused_k[seq])
        q_scale, k_scale, v_scale = (
            float(head_scales(scale, call.live_seqs, call.k_cache.shape[2])[seq, hk])
            for scale in (call.q_scale, call.k_scale, call.v_scale)
        )
        self.sigma = call.softmax_scale * q_scale * k_scale
        self.every_k = tokens(call, call.k_cache, seq, 0, kv_len)[:, hk].double()
        every_v = tokens(call, call.v_cache, seq, 0, kv_len)[:, hk].double() * v_scale
        self.k, self.v, self.v_peak = self.every_k[lo:hi], every_v[lo:hi], float(every_v.abs().max()) if len(every_v) else 0.0
        self.sink = 0.0 if call.sinks is None else float(call.sinks[head])
        s = self.k @ self.q * self.sigma
        self.s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
        atoms = self.s if call.sinks is None else torch.cat((self.s, self.s.new_tensor([self.sink])))
        self.lse = torch.logsumexp(atoms, 0) if len(atoms) else torch.tensor(-math.inf, dtype=torch.float64)
        self.p = (self.s - self.lse).exp()
        self.out = self.p @ self.v

    def logit_error(self, a: Arithmetic) -> float:
        """The largest error of a logit, the sink's included."""
        magnitude = self.q.abs() * self.every_k.abs().amax(0)
        largest = 2 * self.sigma * float(magnitude.sum())  # a mean key taken off and put back makes it two
        per_product, u = CHAINS[a.qk_accumulator]
        chain = per_product * len(self.q) + 4
        tanh_error = {"exact": 4 * U32, "approx": 2.0**-11 + 4 * U32}[a.tanh] * self.call.softcap
        size = largest + abs(self.sink)
        return chain * u * largest + self._quantisation(a) + tanh_error + 20 * U32 * size

    def _quantisation(self, a: Arithmetic) -> float:
        if a.qk_format is None:
            return 0.0
        relative, steps, largest = {"int8": (U32, 0.5, 127.0), "e4m3": (2.0**-4, 2.0**-10, 448.0)}[a.qk_format]
        k = self.every_k - self.every_k.mean(0) if a.smooth_k else self.every_k
        dq = relative * self.q.abs() + steps * self.every_q.abs().max() / largest
        dk = relative * k.abs() + steps * k.abs().max() / largest
        return 1.001 * self.sigma * float((self.q.abs() * dk + k.abs() * dq + dq * dk).sum(1).max())

    def limits(self, a: Arithmetic) -> tuple[Tensor, float]:
        """How far the output (head_dim_v,) and the LSE of a kernel may be off."""
        u_out, a_out, name = _output(self.call)
        p_format = name if a.p_format == "input" else a.p_format
        n, tiles = len(self.every_k), len(self.every_k) // a.tile + 2 + a.splits
        shared = self.logit_error(a) + EPS_EXP[a.exp2] + 4 * tiles * U32
        per_product, u = CHAINS[a.pv_accumulator]
        numerator = U_P[p_format] + tiles * (per_product * a.tile + 2) * u + 2 * tiles * U32
        denominator = (8 + 4 * tiles) * U32 + (tiles * 2.0**-8 if a.row_sum_format == "bf16" else 0.0)
        if a.row_sum == "after":
            denominator += U_P[p_format]
        v_relative, v_absolute = (2.0**-4, 2.0**-10 / 448 * self.v_peak) if a.v_format else (0.0, 0.0)
        l_inverse = float(torch.exp(max(float(self.s.max()), self.sink if self.call.sinks is not None else -math.inf) - self.lse))
        a_p = A_P.get(p_format, 2.0**-134) / a.p_scale + 2.0**-126
        v1 = self.p @ self.v.abs()
        error = (
            shared * (self.p @ (self.v - self.out).abs())
            + (shared * float(1 - self.p.sum()) + denominator + 4 * U32) * self.out.abs()
            + (numerator + v_relative) * v1
            + v_absolute
            + a_p * l_inverse * n * self.v_peak
        )
        # to first order while the weights change by less than a factor of 3; else all that is sure is the range of v
        growth = math.exp(min(4 * (shared + denominator + numerator), 1.0))
        sure = torch.full_like(error, 4 * self.v_peak)
        error = sure if growth == math.e else torch.minimum(growth * error, sure)
        absolute_sum = a_p * l_inverse * n if a.row_sum == "after" else 0.0
        lse = shared + growth * (denominator + absolute_sum) + 8 * U32 * (abs(float(self.lse)) + abs(self.sink))
        return (1 + 2 * u_out) * (u_out * self.out.abs() + error) + a_out + 2.0**-140, lse + 20 * U32 * float(self.s.abs().max())


def _output(call: Call) -> tuple[float, float, str]:
    """Unit roundoff, absolute error and name of the format of the output."""
    name = "bf16" if call.q.dtype.itemsize == 1 else FORMAT_NAMES[call.q.dtype]
    return FORMATS[name].u, FORMATS[name].smallest_subnormal / 2, name


def sampled(call: Call, count: int = 12) -> Iterator[tuple[int, int]]:
    """Some (row, head) pairs of a call, spread over all of them."""
    pairs = len(live_rows(call)) * call.q.shape[1]
    for pair in torch.linspace(0, pairs - 1, min(count, pairs)).long().tolist():
        yield divmod(pair, call.q.shape[1])


@settings(drawn, max_examples=40)
@given(call=any_call)
def test_any_arithmetic_is_within_what_it_rounds_of_the_exact_softmax(call: Call) -> None:
    """So any two tile sizes, orders and numbers of splits are within twice that of each other."""
    exact = {pair: Dense(call, *pair) for pair in sampled(call)}
    for name, arithmetic in ARITHMETICS.items():
        out, lse = emulate(call, arithmetic)

        assert out.shape == (len(live_rows(call)), call.q.shape[1], call.v_cache.shape[3])
        assert lse.dtype == torch.float32
        for (row, head), dense in exact.items():
            if len(dense.s) == 0:
                assert not out[row, head].any(), name
                assert float(lse[row, head]) == (-math.inf if call.sinks is None else dense.sink), name
                continue
            limit, lse_limit = dense.limits(arithmetic)
            assert bool(((out[row, head].double() - dense.out).abs() <= limit).all()), name
            assert abs(float(lse[row, head]) - float(dense.lse)) <= lse_limit, name


def example(**options: Any) -> Call:
    """A call that every knob shows on, in fp16: chunks of 30 and 8 rows after a long prefix, logits of deviation 3, capped."""
    g = torch.Generator().manual_seed(1)
    q_lens, kv_lens, page_size = (30, 8), (400, 150), 16
    pages = [-(-n // page_size) for n in kv_lens]
    table = torch.zeros(2, max(pages), dtype=torch.int32)
    table[0, : pages[0]] = torch.arange(pages[0])
    table[1, : pages[1]] = torch.arange(pages[1]) + pages[0]
    shape = (sum(pages), page_size, 2)
    call = Call(
        q=(3 * torch.randn(sum(q_lens), 4, 64, generator=g)).half(),
        k_cache=(torch.randn(*shape, 64, generator=g) + 0.5).half(),
        v_cache=torch.randn(*shape, 32, generator=g).half(),
        cu_seqlens_q=torch.tensor([0, 30, 38], dtype=torch.int32),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table,
        softmax_scale=0.125,
        softcap=30.0,
    )
    return replace(call, **options)


@pytest.mark.parametrize("name", list(KNOBS))
def test_every_knob_changes_bits(name: str) -> None:
    changed, base = (emulate(example(), arithmetic) for arithmetic in KNOBS[name])

    assert not (torch.equal(changed[0], base[0]) and torch.equal(changed[1], base[1]))


def test_no_knob_is_left_out() -> None:
    assert {name.split("=")[0] for name in KNOBS} == {f.name for f in fields(Arithmetic)} - {"planted"}


@drawn
@given(call=any_call, data=st.data())
def test_a_row_has_the_same_bits_in_any_company(call: Call, data: st.DataObject) -> None:
    """Rows computed apart, in another order or twice are those of the whole call, under planted faults too."""
    live = len(live_rows(call))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, max(live - 1, 0)), max_size=5 if live else 0)), dtype=torch.int64)
    planted = Arithmetic(planted=Planted(unscaled_tile=1, skipped_tile=2, page_fault="stale", wrong_head=True))
    for name, arithmetic in {**VARIANTS, "qk_block": replace(INT8, qk_block=16), "planted": planted}.items():
        out, lse = emulate(call, arithmetic)
        some_out, some_lse = emulate(call, arithmetic, rows)

        assert torch.equal(some_out, out[rows]), name
        assert torch.equal(some_lse, lse[rows]), name


@drawn
@given(call=any_call, tile=st.sampled_from([1, 16, 64]), splits=st.integers(1, 4), limit=st.sampled_from([1, 1 << 12, 1 << 20]))
def test_the_schedule_covers_every_key_of_every_row_once(call: Call, tile: int, splits: int, limit: int) -> None:
    """Whatever a batch may cost; a block alone in its batch has no more than twice the tiles that any of its rows needs."""
    plan = row_plan(call, live_rows(call))
    kv_len = call.seqused_k[: call.live_seqs].long()
    seen = torch.zeros(len(plan), int(kv_len.max()) + 1, dtype=torch.int64)
    for batch in batches(plan, kv_len, tile=tile, splits=splits, cost=Cost(per_row=3, per_block=7, limit=limit, rows=2)):
        assert batch.row.shape[1] <= 2
        for g, r in batch.live.nonzero().tolist():
            row, lo, hi = int(batch.row[g, r]), int(batch.lo[g, r]), int(batch.hi[g, r])
            first = int(batch.first[g])
            seen[row, lo:hi] += 1
            assert int(plan.seq[row]) == int(batch.seq[g])
            assert first * tile <= lo < hi <= (first + batch.tiles) * tile
            assert limit > 1 or batch.tiles <= 2 * ((hi - 1) // tile + 1 - lo // tile)
    key = torch.arange(seen.shape[1])

    assert torch.equal(seen, ((key >= plan.lo[:, None]) & (key < plan.hi[:, None])).long())


def test_rows_far_apart_do_not_share_a_block() -> None:
    """Windows of 100 keys, 1000 apart: the keys between them are no one's."""
    lo = torch.arange(0, 9000, 1000)
    plan = RowPlan(row=torch.arange(9), seq=torch.zeros(9, dtype=torch.int64), pos=lo + 99, lo=lo, hi=lo + 100)
    cost = Cost(per_row=1, per_block=1, limit=1 << 20, rows=64)

    assert all(batch.tiles <= 8 for batch in batches(plan, torch.tensor([9000]), tile=16, splits=1, cost=cost))


@pytest.mark.parametrize("name", list(ARITHMETICS))
def test_how_many_tiles_are_in_hand_does_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([0, 29, 37])
    expected = emulate(example(), ARITHMETICS[name], rows)
    monkeypatch.setattr(emulator, "_LIMIT", 8)
    got = emulate(example(), ARITHMETICS[name], rows)

    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def one_number_keys(logits: Tensor, v: Tensor) -> Call:
    """One query that sees keys of the given logits, exact in bf16, in units of ln 2; v (keys, head_dim_v)."""
    return Call(
        q=torch.ones(1, 1, 1).bfloat16(),
        k_cache=logits.view(1, -1, 1, 1).bfloat16(),
        v_cache=v.view(1, len(v), 1, -1).bfloat16(),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seqused_k=torch.tensor([len(v)], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        softmax_scale=math.log(2),
    )


def test_a_lazy_maximum_stays_up_to_its_threshold_and_no_further() -> None:
    """64 keys of about 0, and 64 of about the threshold: P of the second tile is 2^threshold larger, and rounds otherwise."""
    g = torch.Generator().manual_seed(3)
    part, v = torch.randint(0, 128, (64,), generator=g) / 128, torch.randn(128, 8, generator=g)

    def differs(jump: float) -> bool:
        highest = torch.cat((part - part.max(), jump + part - part.max()))
        call = one_number_keys((highest * 16).round() / 16, v)
        lazy, eager = emulate(call, Arithmetic(lazy=4.0)), emulate(call, Arithmetic())
        return not torch.equal(lazy[0], eager[0])

    assert not differs(4.0625)
    assert not differs(0.0)
    # a maximum that stays by a power of two rounds P alike; by 2^3.9 it does not
    assert differs(3.9375)


def test_rescaling_is_exact_where_the_exponential_is_a_polynomial() -> None:
    """20 tiles, of one logit each and rising by half an octave: every P is 1, and the LSE that of the exact exponential."""
    call = one_number_keys(torch.arange(20).repeat_interleave(16) / 2, torch.ones(320, 1))

    assert torch.equal(emulate(call, Arithmetic(tile=16, exp2="poly3"))[1], emulate(call, Arithmetic(tile=16))[1])


def test_splits_are_merged_however_small_their_sums() -> None:
    """Logits of -1000 ln 2: exp of any LSE is 0."""
    call = one_number_keys(torch.full((256,), -1000.0), torch.arange(256.0).view(-1, 1) / 256)
    out, lse = emulate(call, Arithmetic(splits=4))

    assert float(out) == 0.498046875  # 127.5 / 256
    assert float(lse) == pytest.approx((8 - 1000) * math.log(2), rel=2 * U32)


def test_a_mean_key_taken_off_and_exact_int8_change_nothing() -> None:
    """q, k - mean(k) are integers up to 127 and reach it: both steps are 1, and nothing rounds before the softmax."""
    g = torch.Generator().manual_seed(2)
    half = torch.randint(-127, 128, (4, 16, 2, 64), generator=g)
    half[..., 0] = 127
    centred = torch.cat((half, -half))  # pages 0 to 7: one sequence of 128 keys, of mean 0
    mean = torch.randint(-100, 101, (2, 64), generator=g)
    q = torch.randint(-127, 128, (5, 4, 64), generator=g)
    q[..., 0] = -127
    call = replace(
        example(),
        q=q.bfloat16(),
        k_cache=(centred + mean).bfloat16(),
        cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
        seqused_k=torch.tensor([128], dtype=torch.int32),
        page_table=torch.arange(8, dtype=torch.int32)[None],
        softmax_scale=2e-5,
    )
    assert torch.equal(call.k_cache.long(), centred + mean)
    expected = emulate(call, Arithmetic())

    for arithmetic in (Arithmetic(smooth_k=True), Arithmetic(qk_format="int8", smooth_k=True, qk_block=64)):
        got = emulate(call, arithmetic)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_the_exponent_by_one_multiplication_breaks_where_subtracting_first_does_not() -> None:
    """Logits of 1e36: fl(m c) is off by more than any exponent holds (docs/numerics.md, section 2.2)."""
    call = example(softmax_scale=1e35, softcap=0.0)

    assert not bool(torch.isfinite(emulate(call, Arithmetic())[0]).all())
    assert bool(torch.isfinite(emulate(call, Arithmetic(subtract_first=True))[0]).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's bits with the CPU's")
def test_a_gpu_gives_the_same_bits() -> None:
    call = example()
    on_gpu: dict[str, Any] = {f.name: x.cuda() for f in fields(call) if isinstance(x := getattr(call, f.name), Tensor)}
    for name, arithmetic in VARIANTS.items():
        for got, want in zip(emulate(replace(call, **on_gpu), arithmetic), emulate(call, arithmetic), strict=True):
            assert torch.equal(got.cpu(), want), name


@drawn
@given(call=any_call, name=st.sampled_from(list(VARIANTS)))
def test_a_kernel_writes_live_rows_only_and_returns_what_the_contract_says(call: Call, name: str) -> None:
    kernel = getattr(emulated, name)
    live = len(live_rows(call))
    dtype = torch.bfloat16 if call.q.dtype.itemsize == 1 else call.q.dtype
    out = torch.full((*call.q.shape[:2], call.v_cache.shape[3]), math.nan, dtype=dtype)
    given_call = replace(call, out=out)
    before = [t.clone() for t in (call.q, call.k_cache, call.v_cache, call.page_table)]
    expected_out, expected_lse = emulate(call, VARIANTS[name])
    returned, lse = kernel(call.q, call.k_cache, call.v_cache, **given_call.keywords(), return_lse=True)

    assert returned is out
    assert torch.equal(out[:live], expected_out)
    assert bool(out[live:].isnan().all())
    assert lse.shape == call.q.shape[:2]
    assert torch.equal(lse[:live], expected_lse)
    for tensor, copy in zip((call.q, call.k_cache, call.v_cache, call.page_table), before, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8))
    alone = kernel(call.q, call.k_cache, call.v_cache, **call.keywords())
    assert torch.equal(alone[:live], expected_out)


def test_every_variant_resolves_and_promises_what_it_computes() -> None:
    for name, arithmetic in VARIANTS.items():
        kernel = getattr(emulated, name)
        assert (kernel.__name__, kernel.record.precision) == (name, precision_of(arithmetic))
    with pytest.raises(AttributeError, match=r"no kernel 'flash'; it has textbook, "):
        _ = emulated.flash


def test_a_promise_is_as_tight_as_the_knobs() -> None:
    assert precision_of(Arithmetic()) == Precision(u_acc=2.0**-24, eps_exp=2.0**-21, eps_tanh=2.0**-21)
    assert precision_of(Arithmetic(p_format="fp16-flushed", pv_accumulator="fp22", exp2="poly3", tanh="approx")) == Precision(
        p_format="fp16", u_acc=2.0**-13, flush_to_zero=True
    )
    assert precision_of(Arithmetic(qk_accumulator="fp22")).u_acc == 2.0**-13
    assert as_kernel(E4M3, "x").record.precision.p_format == "e4m3"


@pytest.mark.parametrize(("tile", "qk_block"), [(48, 1), (0, 1), (64, 48), (64, 0), (16, 32)])
def test_impossible_tiles_are_refused(tile: int, qk_block: int) -> None:
    with pytest.raises(ValueError, match=r"must (be a power of two|divide the tile)"):
        Arithmetic(tile=tile, qk_block=qk_block)


@pytest.mark.parametrize(
    ("kind", "options", "product", "expected"),
    [
        ("rn", {}, 2.0**-24, 1 + 2.0**-18),  # all 64 of them, rounded once
        ("rz16", {}, 2.0**-24, 1 + 2.0**-18),  # four times 16, a whole number of places
        ("rz16", {}, 2.0**-28, 1.0),  # four times 16, half a place
        ("aligned", {}, 2.0**-24, 1.0),  # each is below the last place of 1
        ("aligned", {"aligned_guard": 1}, 2.0**-24, 1 + 2.0**-18),  # each is the guard bit, and eight of them four places
        ("aligned", {"aligned_guard": 2, "aligned_width": 1}, 1.5 * 2.0**-24, 1.0),  # alone, its guard bits are truncated
        ("fp22", {}, 2.0**-19, 1.0),  # twice 32, half a place
        ("fp22", {}, 2.0**-18, 1 + 2.0**-12),  # twice 32, a place
        ("bf16", {}, 2.0**-14, 1.0),  # half a place, to even
        ("bf16", {}, 1.5 * 2.0**-14, 1 + 2.0**-7),
    ],
)
def test_an_accumulator_drops_what_the_hardware_drops(
    kind: Accumulator, options: dict[str, Any], product: float, expected: float
) -> None:
    """1 and 64 products, of either sign."""
    one, ones = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 64, 1, dtype=torch.float64)
    products = torch.full((1, 1, 64), product, dtype=torch.float64)
    arithmetic = Arithmetic(**options)

    assert float(accumulate(one, products, ones, kind, arithmetic)) == expected
    assert float(accumulate(-one, -products, ones, kind, arithmetic)) == -expected


def test_a_truncating_accumulator_never_gains() -> None:
    """1 and seven eighths of its last place."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    a = torch.full((1, 1, 7), 2.0**-13, dtype=torch.float64)

    assert float(accumulate(one, a, a.transpose(1, 2), "rn", Arithmetic())) == 1 + 2.0**-23
    assert float(accumulate(one, a, a.transpose(1, 2), "rz16", Arithmetic())) == 1.0


def test_the_row_sum_is_a_tree_of_float32_sums() -> None:
    """In order the sum were 1, rounded once 1 + 2^-22."""
    x = torch.tensor([[1.0, 2.0**-24, 2.0**-24, 2.0**-24], [1.0, 2.0, 3.0, 4.0]])

    assert tree_sum(x).tolist() == [1 + 2.0**-23, 10.0]


def test_exp2_is_as_wrong_as_it_says() -> None:
    """The polynomial: 8.77e-5 at most (docs/numerics.md, section 1); below 2^-126 it gives 0."""
    x = torch.linspace(-125.5, 8.0, 2**17).double()

    def error(variant: str) -> float:
        return float((exp2(x.float().double(), variant).double() / torch.exp2(x.float().double()) - 1).abs().max())

    assert error("exact") <= U32
    assert 8.7e-5 < error("poly3") < 8.8e-5
    assert 0.99e-3 < error("error-1e-3") < 1.01e-3
    limits = torch.tensor([-math.inf, -200.0, -126.5, 0.0, 7.0], dtype=torch.float64)
    assert exp2(limits, "poly3").tolist() == [0.0, 0.0, 0.0, 1.0, 128.0]
    assert exp2(limits, "error-1e-3")[0] == 0.0


def test_tanh_is_as_wrong_as_it_says() -> None:
    x = torch.linspace(-20.0, 20.0, 2**16).double()

    for variant, low, high in (("exact", 0.0, U32), ("approx", 2.0**-11 * 0.99, 2.0**-11 * 1.01)):
        error = float((tanh(x, variant) / torch.tanh(x) - 1).abs().max())
        assert low <= error <= high


def test_p_saturates_behind_a_stale_maximum() -> None:
    """FlashAttention-4, issue 2577: 256 x 2^4 is above the largest e4m3."""
    p = torch.tensor([0.0, 1.0, 1.75, 2.0, 16.0])

    assert round_p(p, "e4m3", 256.0).tolist() == [0.0, 1.0, 1.75, 1.75, 1.75]
