"""The Triton kernel keeps the whole kernel contract, interpreted on the CPU or compiled on a GPU.

Limits.  P is rounded to the format of q (relative error u each, so at most u * sum p|v| in the output) and the output once
more (u * |out|).  All else is fp32: with |s| < 32 in these cases, exp, tanh, the scales and the sums add less than 2^-17 of
sum p|v| + |out|, and 2^-17 to the LSE.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import OPTIONAL, REQUIRED, Call, Kernel, Record
from oracle.kernels import triton_host
from oracle.kernels.triton_prefill import prefill_16, prefill_32, prefill_64, prefill_truncating
from oracle.references.plan import head_scales, live_rows, row_plan, tokens

RECORD: Record = prefill_16.record  # type: ignore[attr-defined]  # functions have no declared attributes
DEVICE = RECORD.devices[0]
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
E4M3 = torch.float8_e4m3fn
MIXED = ((5, 1, 0, 17, 3), (40, 130, 9, 17, 0))  # (q_lens, kv_lens): new tokens, decode, no query, prefill, no key


def case(
    lens: tuple[tuple[int, ...], tuple[int, ...]] = MIXED,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    fill: float = torch.nan,
    garbage: int = -1,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with normal data; what lies past the plan is `fill`, page-table entries past it are `garbage`.

    The pool has one page that nobody owns, q two rows past the plan.  `seed` picks the page ids too, but not the data.
    """
    q_lens, kv_lens = lens
    cache_dtype = cache_dtype or dtype
    data, ids = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    order = torch.split(torch.randperm(sum(pages) + 1, generator=ids), [*pages, 1])
    table = torch.full((len(kv_lens), max(pages) + 1), garbage, dtype=torch.int32)
    pool = [torch.full((sum(pages) + 1, page_size, heads[1], dim), fill).to(cache_dtype) for dim in dims]
    for seq, n in enumerate(kv_lens):
        table[seq, : pages[seq]] = order[seq]
        for cache in pool:
            at = order[seq][torch.arange(n) // page_size], torch.arange(n) % page_size
            cache[at] = torch.randn(n, heads[1], cache.shape[3], generator=data).to(cache_dtype)
    q = torch.randn(sum(q_lens) + 2, heads[0], dims[0], generator=data).to(dtype)
    q[sum(q_lens) :] = fill
    call = Call(
        q=q,
        k_cache=pool[0],
        v_cache=pool[1],
        cu_seqlens_q=torch.tensor((0, *q_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table,
        softmax_scale=dims[0] ** -0.5,
        **options,
    )
    moved: dict[str, Any] = {f.name: value.to(DEVICE) for f in fields(call) if isinstance(value := getattr(call, f.name), Tensor)}
    return replace(call, **moved)


def run(call: Call, kernel: Kernel = prefill_16) -> tuple[Tensor, Tensor]:
    """Output and LSE of the live rows."""
    out, lse = kernel(call.q, call.k_cache, call.v_cache, **call.keywords(), return_lse=True)
    live = int(call.cu_seqlens_q[call.live_seqs])
    return out[:live].cpu(), lse[:live].cpu()


def exact(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """out and sum p|v|, (rows, q_heads, head_dim_v), and the LSE (rows, q_heads), row by row in fp64."""
    plan, q_heads, kv_heads = row_plan(call, live_rows(call)), call.q.shape[1], call.k_cache.shape[2]
    group = q_heads // kv_heads
    scale, v_scale = (
        torch.stack([head_scales(s, call.live_seqs, kv_heads) for s in scales]).prod(0).repeat_interleave(group, 1)
        for scales in ((call.q_scale, call.k_scale), (call.v_scale,))
    )
    out = torch.zeros(len(plan), q_heads, call.v_cache.shape[3], dtype=torch.float64)
    size, lse = torch.zeros_like(out), torch.full((len(plan), q_heads), -torch.inf, dtype=torch.float64)
    for r, (row, seq, lo, hi) in enumerate(zip(plan.row, plan.seq, plan.lo, plan.hi, strict=True)):
        k, v = (
            tokens(call, cache, int(seq), int(lo), int(hi)).cpu().double().repeat_interleave(group, 1)
            for cache in (call.k_cache, call.v_cache)
        )
        s = torch.einsum("hd,nhd->hn", call.q[row].cpu().double(), k) * (call.softmax_scale * scale[seq, :, None])
        if call.softcap:
            s = call.softcap * torch.tanh(s / call.softcap)
        atoms = s if call.sinks is None else torch.cat([s, call.sinks.cpu().double()[:, None]], 1)
        if atoms.shape[1]:
            lse[r] = atoms.logsumexp(1)
            p = torch.exp(s - lse[r, :, None])
            out[r], size[r] = (torch.einsum("hn,nhd->hd", p, w) * v_scale[seq, :, None] for w in (v, v.abs()))
    return out, size, lse


def assert_right(call: Call, kernel: Kernel = prefill_16) -> None:
    """Output and LSE lie within the limits of the module's docstring; rows that see nothing are exactly 0 and -inf."""
    (got, got_lse), (out, size, lse) = run(call, kernel), exact(call)
    error, limit = (got.double() - out).abs(), (U[call.q.dtype] + 2.0**-17) * (size + out.abs())
    assert bool((error <= limit).all()), f"largest excess {float((error - limit).max()):.3g}"
    error = torch.where(got_lse == lse, 0.0, (got_lse - lse).abs())
    assert bool((error <= 2.0**-17).all()), f"lse off by {float(error.max()):.3g}"


def error(call: Call, kernel: Kernel) -> float:
    """RMS error of the outputs that see a key, over what one rounding of P and one of the output may make of each."""
    (got, _), (out, size, _) = run(call, kernel), exact(call)
    some = size > 0
    return float(((got.double() - out)[some] / (U[call.q.dtype] * (size + out.abs())[some])).square().mean().sqrt())


def assert_a_dominant_sink_costs_no_accuracy(kernel: Kernel) -> None:
    """Beside a sink of 12 every weight is under 2^-14, a subnormal of fp16; beside the largest weight of its row none is.

    The sink scales a row, so the errors scale with it; the factor for v keeps outputs normal numbers.  Two RMS errors of 6,400
    outputs each, rounded independently, differ by 1 %.
    """
    plain = case(dtype=torch.float16)
    beside = replace(plain, sinks=torch.full((4,), 12.0, device=DEVICE), v_scale=2.0**14)
    assert error(beside, kernel) < 1.1 * error(plain, kernel)


def assert_same_bits(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_the_kernels_name_every_argument_of_the_contract() -> None:
    for kernel in (prefill_16, prefill_32, prefill_64, prefill_truncating):
        assert set(inspect.signature(kernel).parameters) == {"q", "k_cache", "v_cache", *REQUIRED, *OPTIONAL}
        assert kernel.record.precision.subtract_first  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (20, 0)},
        {"window_size": (0, 0)},
        {"window_size": (20, 7), "causal": False},
        {"window_size": (-1, 3), "causal": False},
        {"window_size": (30, -1), "causal": False},
        {"softcap": 3.0},
        {"sinks": torch.tensor([-9.0, 0.0, 2.5, 30.0])},
        {"softcap": 3.0, "sinks": torch.tensor([-9.0, 0.0, 2.5, 30.0]), "window_size": (9, 0)},
        {"q_scale": 1.7, "k_scale": 0.4, "v_scale": 3.0},
        {"q_scale": torch.tensor([1.7, 0.3]), "k_scale": torch.tensor([0.4, 2.0]), "v_scale": torch.tensor([3.0, 0.2])},
        {
            "q_scale": torch.linspace(0.2, 2.0, 10).view(5, 2),
            "k_scale": torch.linspace(2.0, 0.2, 10).view(5, 2),
            "v_scale": torch.linspace(0.1, 9.0, 10).view(5, 2),
        },
        {"softmax_scale_is": -0.2},
        {"softmax_scale_is": 0.0},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_each_option_follows_the_formula(options: dict[str, Any]) -> None:
    scale = options.get("softmax_scale_is")
    call = case(**{name: value for name, value in options.items() if name != "softmax_scale_is"})
    assert_right(call if scale is None else replace(call, softmax_scale=scale))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float16, None), (torch.float32, None), (torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.float32, E4M3)],
)
def test_each_format_is_as_accurate_as_its_roundoff(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    assert_right(case(dtype=dtype, cache_dtype=cache_dtype, k_scale=0.5, v_scale=torch.tensor([2.0, 0.3])))


@pytest.mark.parametrize(
    ("heads", "dims", "page_size"),
    [
        ((5, 1), (80, 80), 1),
        ((14, 2), (40, 40), 24),
        ((12, 1), (96, 64), 256),
        ((20, 1), (64, 128), 8),
        ((4, 4), (192, 128), 1),
        ((2, 1), (576, 512), 64),
    ],
)
def test_any_group_head_dim_and_page_size_will_do(heads: tuple[int, int], dims: tuple[int, int], page_size: int) -> None:
    assert_right(case(((3, 6), (70, 6)), heads=heads, dims=dims, page_size=page_size))


def test_rows_before_the_first_key_are_empty() -> None:
    call = case(((9, 4), (5, 0)))

    out, lse = run(call)

    assert_right(call)
    assert bool((out[:4] == 0).all() and (lse[:4] == -torch.inf).all() and (out[9:] == 0).all() and (lse[9:] == -torch.inf).all())


def test_a_row_without_keys_has_the_sink_as_lse() -> None:
    sinks = torch.tensor([-2.0, 0.5, 3.0, 40.0])

    out, lse = run(case(((2,), (0,)), sinks=sinks))

    assert bool((out == 0).all())
    assert torch.equal(lse, sinks.expand(2, 4))


def test_a_dominant_sink_costs_no_accuracy() -> None:
    assert_a_dominant_sink_costs_no_accuracy(prefill_16)


@pytest.mark.parametrize("fill", [0.0, torch.inf, -3e38])
@pytest.mark.parametrize("garbage", [2**31 - 1, -(2**31)])
def test_nothing_past_the_plan_changes_a_bit(fill: float, garbage: int) -> None:
    assert_same_bits(run(case(window_size=(30, 0))), run(case(window_size=(30, 0), fill=fill, garbage=garbage)))


def test_sequences_past_num_seqs_are_not_read() -> None:
    call = case()
    longer = replace(
        call,
        cu_seqlens_q=torch.cat([call.cu_seqlens_q, torch.tensor([-5, 2**31 - 1], dtype=torch.int32, device=DEVICE)]),
        seqused_k=torch.cat([call.seqused_k, torch.tensor([2**31 - 1, -1], dtype=torch.int32, device=DEVICE)]),
        page_table=torch.cat([call.page_table, torch.full_like(call.page_table[:2], 2**31 - 1)]),
        num_seqs=5,
    )

    assert_same_bits(run(call), run(longer))


def test_page_ids_do_not_change_a_bit() -> None:
    assert_same_bits(run(case(seed=0)), run(case(seed=1)))


def test_strides_do_not_change_a_bit() -> None:
    call = case(dims=(64, 80))
    pool = torch.full((call.k_cache.shape[0], 2, 16, 300), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    k, v = pool[..., 0:128:2].transpose(1, 2), pool[..., 130:290:2].transpose(1, 2)  # one pool, heads before slots
    k.copy_(call.k_cache)
    v.copy_(call.v_cache)
    q = call.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = torch.zeros(80, call.q.shape[0], 4, dtype=torch.bfloat16, device=DEVICE).permute(1, 2, 0)

    assert_same_bits(run(call), run(replace(call, q=q, k_cache=k, v_cache=v, out=out)))


def test_addresses_go_past_two_to_the_31_elements() -> None:
    call = case(((3,), (40,)))
    high = torch.empty(2**31 // call.k_cache[0].numel() + 9, *call.k_cache.shape[1:], dtype=torch.bfloat16, device=DEVICE)
    moved = high.shape[0] - call.k_cache.shape[0]  # nothing else of the pool is touched, so the CPU never allocates it
    high[moved:] = call.k_cache
    table = torch.where(call.page_table >= 0, call.page_table + moved, call.page_table)
    v = torch.empty_like(high)
    v[moved:] = call.v_cache

    assert_same_bits(run(call), run(replace(call, k_cache=high, v_cache=v, page_table=table)))


def test_a_given_out_is_returned_and_its_rows_past_the_plan_are_untouched() -> None:
    call = case(((4, 0, 3), (20, 5, 0)))
    out = torch.full_like(call.q, 123.0)

    answer = prefill_16(call.q, call.k_cache, call.v_cache, **(call.keywords() | {"out": out}))

    assert answer is out
    assert bool((out[7:] == 123.0).all() and (out[:7] != 123.0).all())
    assert_same_bits(run(call), (out[:7].cpu(), run(call)[1]))


@pytest.mark.parametrize("lens", [((), ()), ((0, 0), (3, 0))])
def test_a_call_without_queries_does_nothing(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    call = case(((2,), (3,)))
    cu = torch.zeros(len(lens[0]) + 1, dtype=torch.int32, device=DEVICE)
    used = torch.tensor(lens[1], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(call.q, 123.0)

    prefill_16(
        call.q,
        call.k_cache,
        call.v_cache,
        cu_seqlens_q=cu,
        seqused_k=used,
        softmax_scale=1.0,
        out=out,
        page_table=call.page_table.expand(len(lens[0]), -1) if lens[0] else call.page_table[:0],
    )

    assert bool((out == 123.0).all())


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch() -> None:
    batch = case()
    alone = replace(
        batch,
        q=batch.q[6:23],
        cu_seqlens_q=torch.tensor([0, 17], dtype=torch.int32, device=DEVICE),
        seqused_k=batch.seqused_k[3:4],
        page_table=batch.page_table[3:4],
    )

    out, lse = run(batch)

    assert_same_bits((out[6:23], lse[6:23]), run(alone))


@pytest.mark.parametrize(
    "options",
    [
        {"heads": (8, 2), "softcap": 9.0, "sinks": torch.linspace(-3, 3, 8)},
        {"heads": (7, 1), "dims": (128, 128), "window_size": (50, 0)},
        {"heads": (4, 2), "dims": (512, 512), "page_size": 64},
        {"heads": (12, 1), "dtype": torch.float32},
        {"heads": (5, 1), "dims": (80, 80), "dtype": torch.float16, "causal": False},
    ],
)
def test_the_rows_of_a_tile_do_not_change_a_bit(options: dict[str, Any]) -> None:
    call = case(((40, 1, 9), (90, 150, 9)), **options)
    if not RECORD.interpreted and call.q.dtype == torch.float32:
        pytest.skip("compiled fp32 products lay out a tile by its size, and the row sum follows the layout")

    assert_same_bits(run(call, prefill_16), run(call, prefill_32))
    if RECORD.interpreted:  # compiled for Hopper, 64 rows take other matrix instructions
        assert_same_bits(run(call, prefill_16), run(call, prefill_64))


@pytest.mark.parametrize("kernel", [prefill_32, prefill_64])
def test_every_tiling_is_right_past_its_first_tile(kernel: Kernel) -> None:
    assert_right(case(((70, 3), (100, 3)), heads=(3, 1), window_size=(33, 0)), kernel)


def test_truncation_of_p_makes_a_bias_that_rounding_has_not() -> None:
    # All v are positive, so that errors of P add up.  Truncation loses half a spacing on average, 2^-8 of the power of two
    # below p: 0.72 * 2^-8 of p where mantissas are log-uniform.  Rounding loses nothing on average; its noise and that of the
    # output, 0.4 * 2^-8 each, fall below 2^-12 in the mean of 2048 outputs of 300 keys.
    call = case(((8,), (300,)), causal=False)
    call.v_cache.copy_(torch.rand(call.v_cache.shape, generator=torch.Generator().manual_seed(1)) + 1)
    out, _, _ = exact(call)

    rounded, truncated = ((run(call, kernel)[0].double() / out - 1) for kernel in (prefill_16, prefill_truncating))

    assert abs(float(rounded.mean())) < 2.0**-12
    assert -0.9 * 2.0**-8 < float(truncated.mean()) < -0.5 * 2.0**-8
    assert float(truncated.square().mean() / rounded.square().mean()) > 1.5**2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_e4m3_value_passes_through_unchanged(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(E4M3).to(DEVICE)
    call = case(((1,), (1,)), heads=(1, 1), dims=(64, 254), dtype=dtype, cache_dtype=E4M3)
    call.v_cache[call.page_table[0, 0], 0, 0] = values

    out, _ = run(call)

    assert torch.equal(out[0, 0], values.to(dtype).cpu())


@pytest.mark.parametrize("v_scale", [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1.37])
def test_outputs_are_rounded_to_nearest_ties_to_even(v_scale: float) -> None:
    call = case(((1,), (1,)), v_scale=v_scale)  # one key: out is v * v_scale, rounded once to fp32 and once to bf16
    v = call.v_cache[call.page_table[0, 0], 0]
    v[:, ::2] = 2.0 ** torch.arange(32).to(v)  # with the first two scales these are ties, with even and odd neighbours

    out, _ = run(call)

    assert torch.equal(out.view(2, 2, 64), (v.float() * v_scale).bfloat16().cpu()[:, None].expand(2, 2, 64))


def test_tanh_keeps_its_declared_accuracy_at_every_size() -> None:
    # One key with logit x and softcap 1: the LSE is tanh(x), rounded to fp32 once or twice (2^-23).
    x = torch.cat([2.0 ** torch.linspace(-20, 5, 97), torch.linspace(0.2, 0.3, 60)])
    call = case(((len(x) * 2,), (1,)), heads=(1, 1), dtype=torch.float32, causal=False, softcap=1.0)
    call.q[:-2], call.k_cache[:] = 0, 0
    call.q[:-2, 0, 0], call.k_cache[..., 0] = torch.cat([x, -x]), 1

    _, lse = run(replace(call, softmax_scale=1.0))

    want = torch.tanh(torch.cat([x, -x]).double())
    assert bool(((lse[:, 0] / want - 1).abs() < RECORD.precision.eps_tanh + 2.0**-23).all())


def test_cpu_tensors_without_the_interpreter_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    call = case(((1,), (1,)))
    call = replace(call, q=call.q.cpu())
    monkeypatch.setattr(triton_host, "INTERPRETED", False)

    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before"):
        run(call)


@pytest.mark.parametrize(
    ("change", "kernel"),
    [({"q": torch.float64}, prefill_16), ({"k_cache": torch.float16}, prefill_16), ({"q": torch.float16}, prefill_truncating)],
)
def test_undeclared_formats_are_refused(change: dict[str, torch.dtype], kernel: Kernel) -> None:
    call = case(((1,), (1,)))

    with pytest.raises(ValueError, match="has dtype"):
        run(replace(call, **{name: getattr(call, name).to(dtype) for name, dtype in change.items()}), kernel)
