"""The SDPA adapter maps the contract onto torch and adds nothing; torch's arithmetic is what the records say.

Limits.  An output is rounded once (relative error u), and P where the record says so (u times sum p|v|).  With |s| < 40, fp32
arithmetic adds less than 2^-17 of sum p|v| + |out|, and the exp of `sdpa_flash` in 16-bit formats 2^-13 of it, since it errs by
as much in the numerator and in the row sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import Call, Record
from oracle.kernels.torch_sdpa import sdpa_flash, sdpa_math, sdpa_math_reduced
from oracle.references.plan import live_rows, row_plan, tokens

Kernel = Callable[..., Any]  # these name a part of the contract's arguments, so they are no oracle.contract.Kernel
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
MIXED = ((5, 1, 0, 17, 3, 9), (40, 130, 9, 17, 0, 5))  # new tokens, decode, no query, prefill, no key, more queries than keys
SMALLEST = 2.0**-25  # half of fp16's smallest subnormal


def case(
    lens: tuple[tuple[int, ...], tuple[int, ...]] = MIXED,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    fill: float = torch.nan,
    garbage: int = -1,
    seed: int = 0,
    spread: float = 1.0,
    **options: Any,
) -> Call:
    """A call with normal data, keys `spread` wide; what lies past the plan is `fill`, page-table entries past it `garbage`.

    The pool has one page that nobody owns, q two rows past the plan.  `seed` picks the page ids too, but not the data.
    """
    q_lens, kv_lens = lens
    data, ids = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    order = torch.split(torch.randperm(sum(pages) + 1, generator=ids), [*pages, 1])
    table = torch.full((len(kv_lens), max(pages) + 1), garbage, dtype=torch.int32)
    k_cache, v_cache = (torch.full((sum(pages) + 1, page_size, heads[1], dim), fill, dtype=dtype) for dim in dims)
    for seq, n in enumerate(kv_lens):
        table[seq, : pages[seq]] = order[seq]
        at = order[seq][torch.arange(n) // page_size], torch.arange(n) % page_size
        k_cache[at] = (torch.randn(n, heads[1], dims[0], generator=data) * spread).to(dtype)
        v_cache[at] = torch.randn(n, heads[1], dims[1], generator=data).to(dtype)
    q = torch.randn(sum(q_lens) + 2, heads[0], dims[0], generator=data).to(dtype)
    q[sum(q_lens) :] = fill
    return Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=torch.tensor((0, *q_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table,
        softmax_scale=dims[0] ** -0.5,
        **options,
    )


def arguments(call: Call) -> dict[str, Any]:
    """The keyword arguments that the SDPA kernels name."""
    return {k: v for k, v in call.keywords().items() if k not in ("softcap", "sinks", "q_scale", "k_scale", "v_scale")}


def run(call: Call, kernel: Kernel) -> Tensor:
    """Output of the live rows."""
    out = kernel(call.q, call.k_cache, call.v_cache, **arguments(call))
    assert isinstance(out, Tensor)
    return out[: int(call.cu_seqlens_q[call.live_seqs])]


def run_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """Output and LSE of the live rows, by `sdpa_flash`."""
    out, lse = sdpa_flash(call.q, call.k_cache, call.v_cache, **arguments(call), return_lse=True)
    live = int(call.cu_seqlens_q[call.live_seqs])
    return out[:live], lse[:live]


def exact(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """out and sum p|v|, (rows, q_heads, head_dim_v), and the LSE (rows, q_heads), row by row in fp64."""
    plan, q_heads = row_plan(call, live_rows(call)), call.q.shape[1]
    out = torch.zeros(len(plan), q_heads, call.v_cache.shape[3], dtype=torch.float64)
    size, lse = torch.zeros_like(out), torch.full((len(plan), q_heads), -torch.inf, dtype=torch.float64)
    for r, (row, seq, lo, hi) in enumerate(zip(plan.row, plan.seq, plan.lo, plan.hi, strict=True)):
        if lo == hi:
            continue
        k, v = (
            tokens(call, cache, int(seq), int(lo), int(hi)).double().repeat_interleave(q_heads // cache.shape[2], 1)
            for cache in (call.k_cache, call.v_cache)
        )
        s = torch.einsum("hd,nhd->hn", call.q[row].double(), k) * call.softmax_scale
        lse[r] = s.logsumexp(1)
        out[r], size[r] = (torch.einsum("hn,nhd->hd", s.softmax(1), w) for w in (v, v.abs()))
    return out, size, lse


def excess(call: Call, kernel: Kernel) -> float:
    """Largest error over the limit of the module's docstring."""
    record: Record = kernel.record  # type: ignore[attr-defined]  # functions have no declared attributes
    (out, size, _), u = exact(call), U[call.q.dtype]
    u_p = 0.0 if record.precision.p_format == "fp32" else u
    u_exp = 2.0**-13 if kernel is sdpa_flash and u > U[torch.float32] else 0.0
    limit = (u + 2.0**-17 + u_exp) * out.abs() + (u_p + 2.0**-17 + u_exp) * size + SMALLEST
    return float(((run(call, kernel).double() - out).abs() / limit).max())


@pytest.mark.parametrize("kernel", [sdpa_flash, sdpa_math])
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
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"heads": (5, 1), "dims": (80, 80), "page_size": 1},
        {"heads": (14, 2), "dims": (40, 40), "page_size": 24},
        {"heads": (4, 1), "dims": (576, 576), "page_size": 256},
        {"spread": 6.0},
    ],
    ids=str,
)
def test_the_answer_is_as_accurate_as_the_record_says(kernel: Kernel, options: dict[str, Any]) -> None:
    assert excess(case(**options), kernel) <= 1


def test_math_takes_any_head_dim_of_v() -> None:
    assert excess(case(dims=(192, 128)), sdpa_math) <= 1


def test_the_lse_is_natural_and_minus_infinity_where_nothing_is_seen() -> None:
    call = case(window_size=(20, 0))

    out, lse = run_with_lse(call)

    want = exact(call)[2]
    assert torch.equal(lse == -torch.inf, want == -torch.inf)
    assert bool((torch.where(lse == want, 0.0, (lse - want).abs()) <= 2.0**-13 + 2.0**-17).all())
    assert bool((out[want == -torch.inf] == 0).all() and (want == -torch.inf).any())


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"dtype": torch.float32}, {"heads": (5, 1), "causal": False}])
def test_asking_for_the_lse_does_not_change_a_bit(options: dict[str, Any]) -> None:
    call = case(**options)

    assert torch.equal(run(call, sdpa_flash), run_with_lse(call)[0])


@pytest.mark.parametrize("kernel", [sdpa_flash, sdpa_math])
@pytest.mark.parametrize(("fill", "garbage", "seed"), [(torch.inf, 2**31 - 1, 0), (-3e38, 0, 0), (0.0, -1, 5)])
def test_nothing_past_the_plan_and_no_page_id_changes_a_bit(kernel: Kernel, fill: float, garbage: int, seed: int) -> None:
    hostile = case(window_size=(30, 0), fill=fill, garbage=garbage, seed=seed)

    assert torch.equal(run(case(window_size=(30, 0)), kernel), run(hostile, kernel))


@pytest.mark.parametrize("kernel", [sdpa_flash, sdpa_math])
def test_strides_do_not_change_a_bit(kernel: Kernel) -> None:
    call = case()
    pool = torch.full((call.k_cache.shape[0], 2, 16, 300), torch.nan, dtype=torch.bfloat16)
    k, v = pool[..., 0:128:2].transpose(1, 2), pool[..., 130:258:2].transpose(1, 2)  # one pool, heads before slots
    k.copy_(call.k_cache)
    v.copy_(call.v_cache)
    q, out = (x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (call.q, torch.zeros_like(call.q)))

    assert torch.equal(run(call, kernel), run(replace(call, q=q, k_cache=k, v_cache=v, out=out), kernel))


@pytest.mark.parametrize("kernel", [sdpa_flash, sdpa_math])
def test_a_given_out_is_returned_and_what_lies_past_the_plan_is_neither_read_nor_written(kernel: Kernel) -> None:
    call = case()
    out = torch.full_like(call.q, 123.0)
    longer = replace(
        call,
        cu_seqlens_q=torch.cat([call.cu_seqlens_q, torch.tensor([-5, 2**31 - 1], dtype=torch.int32)]),
        seqused_k=torch.cat([call.seqused_k, torch.tensor([2**31 - 1, -1], dtype=torch.int32)]),
        num_seqs=6,
        out=out,
    )

    answer = kernel(longer.q, longer.k_cache, longer.v_cache, **arguments(longer))

    assert answer is out
    assert torch.equal(out[:-2], run(call, kernel))
    assert bool((out[-2:] == 123.0).all())


def test_math_reduced_in_bf16_is_wrong_by_far_more_than_it_declares_and_leaves_the_switch_as_it_was() -> None:
    # Scores of up to 40 rounded to bf16 are off by up to 2^-3, and P by as much of itself.
    assert excess(case(spread=6.0), sdpa_math_reduced) > 3
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.parametrize("kernel", [sdpa_flash, sdpa_math])
def test_only_flash_rounds_p(kernel: Kernel) -> None:
    # Two keys, P = (1, w) with w = exp(-1/4) and v = (-bf16(w), 1): a kernel that rounds P to bf16 answers 0, one that does
    # not answers (w - bf16(w)) / (1 + w).
    w = math.exp(-0.25)
    nearest = float(torch.tensor(w).bfloat16())
    call = case(((1,), (2,)), heads=(1, 1), causal=False)
    k, v = (cache[call.page_table[0, 0], :2, 0] for cache in (call.k_cache, call.v_cache))
    k[:], call.q[0] = 0, 0
    k[1, 0], call.q[0, 0, 0] = -0.25, 1
    v[0], v[1] = -nearest, 1

    out = run(replace(call, softmax_scale=1.0), kernel)

    rounds = kernel.record.precision.p_format == "input"  # type: ignore[attr-defined]  # functions have no declared attributes
    want = 0.0 if rounds else (w - nearest) / (1 + w)
    assert bool(((out - want).abs() <= 2.0**-8 * abs(want)).all())
