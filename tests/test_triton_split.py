"""The split kernel keeps the whole kernel contract, interpreted on the CPU or compiled on a GPU.

Limits and helpers are those of test_triton_prefill: exp2 of logits over ln 2 costs no more than exp of logits.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_prefill import (
    DEVICE,
    E4M3,
    MIXED,
    assert_a_dominant_sink_costs_no_accuracy,
    assert_right,
    assert_same_bits,
    case,
    run,
)

from oracle.contract import OPTIONAL, REQUIRED, Kernel, Record
from oracle.kernels import triton_host, triton_split
from oracle.kernels.triton_host import key_tile, padded
from oracle.kernels.triton_split import split_64, split_tuned
from oracle.kernels.triton_tiles import fits_tma

RECORD: Record = split_tuned.record  # type: ignore[attr-defined]  # functions have no declared attributes
SHARED = 227 * 2**10  # bytes of shared memory that a program can have on Hopper
LONG = ((40, 1, 9, 0), (300, 150, 9, 70))  # several key tiles: some that all rows see, and the edges
both = pytest.mark.parametrize("kernel", [split_64, split_tuned])


@both
def test_the_kernels_name_every_argument_of_the_contract(kernel: Kernel) -> None:
    assert set(inspect.signature(kernel).parameters) == {"q", "k_cache", "v_cache", *REQUIRED, *OPTIONAL}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (150, 0)},
        {"window_size": (20, 7), "causal": False},
        {"window_size": (-1, 3), "causal": False},
        {"window_size": (150, -1), "causal": False},
        {"softcap": 3.0, "sinks": torch.tensor([-9.0, 0.0, 2.5, 30.0]), "window_size": (9, 0)},
        {"sinks": torch.tensor([-900.0, 0.0, 900.0, 30.0])},
        {
            "q_scale": 1.7,
            "k_scale": torch.tensor([0.4, 2.0]),
            "v_scale": torch.linspace(0.1, 9.0, 8).view(4, 2),
        },
        {"softmax_scale_is": -0.2},
        {"softmax_scale_is": 0.0},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_each_option_follows_the_formula(options: dict[str, Any]) -> None:
    scale = options.get("softmax_scale_is")
    call = case(LONG, **{name: value for name, value in options.items() if name != "softmax_scale_is"})
    assert_right(call if scale is None else replace(call, softmax_scale=scale), split_tuned)


@pytest.mark.parametrize(
    ("heads", "dims", "page_size"),
    [
        ((5, 1), (80, 80), 1),
        ((14, 2), (40, 40), 24),
        ((12, 1), (96, 64), 256),
        ((8, 1), (512, 512), 64),
        ((2, 1), (576, 512), 64),
    ],
)
def test_any_group_head_dim_and_page_size_will_do(heads: tuple[int, int], dims: tuple[int, int], page_size: int) -> None:
    assert_right(case(((3, 6), (140, 6)), heads=heads, dims=dims, page_size=page_size), split_tuned)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float16, None), (torch.bfloat16, E4M3), (torch.float16, E4M3)])
def test_each_format_is_as_accurate_as_its_roundoff(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    assert_right(case(dtype=dtype, cache_dtype=cache_dtype, k_scale=0.5, v_scale=torch.tensor([2.0, 0.3])), split_tuned)


def test_a_dominant_sink_costs_no_accuracy() -> None:
    assert_a_dominant_sink_costs_no_accuracy(split_tuned)


@both
def test_a_row_without_keys_has_the_sink_as_lse(kernel: Kernel) -> None:
    sinks = torch.tensor([-2.0, 0.5, 3.0, 40.0])

    out, lse = run(case(((2,), (0,)), sinks=sinks), kernel)

    assert bool((out == 0).all())
    assert torch.equal(lse, sinks.expand(2, 4))


@both
def test_rows_before_the_first_key_are_empty(kernel: Kernel) -> None:
    out, lse = run(case(((9, 4), (5, 0)), dims=(512, 512), page_size=64), kernel)

    assert bool((out[:4] == 0).all() and (lse[:4] == -torch.inf).all() and (out[9:] == 0).all() and (lse[9:] == -torch.inf).all())


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("fill", "garbage"), [(torch.inf, 2**31 - 1), (0.0, -(2**31))])
def test_nothing_past_the_plan_changes_a_bit(fill: float, garbage: int, page_size: int) -> None:
    one = case(LONG, page_size=page_size, window_size=(90, 0))
    other = case(LONG, page_size=page_size, window_size=(90, 0), fill=fill, garbage=garbage)
    assert_same_bits(run(one, split_tuned), run(other, split_tuned))


def test_page_ids_and_page_size_do_not_change_a_bit() -> None:
    one = run(case(LONG, seed=0), split_tuned)

    assert_same_bits(one, run(case(LONG, seed=1), split_tuned))
    assert_same_bits(one, run(case(LONG, page_size=64), split_tuned))  # compiled, these tiles come by the copy engine


def test_strides_do_not_change_a_bit() -> None:
    call = case(LONG, dims=(64, 80))
    pool = torch.full((call.k_cache.shape[0], 2, 16, 300), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    k, v = pool[..., 0:128:2].transpose(1, 2), pool[..., 130:290:2].transpose(1, 2)  # one pool, heads before slots
    k.copy_(call.k_cache)
    v.copy_(call.v_cache)
    q = call.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = torch.zeros(80, call.q.shape[0], 4, dtype=torch.bfloat16, device=DEVICE).permute(1, 2, 0)

    assert_same_bits(run(call, split_tuned), run(replace(call, q=q, k_cache=k, v_cache=v, out=out), split_tuned))


def test_a_given_out_is_returned_and_its_rows_past_the_plan_are_untouched() -> None:
    call = case(((4, 0, 3), (20, 5, 0)), dims=(512, 512))
    out = torch.full_like(call.q, 123.0)

    answer = split_tuned(call.q, call.k_cache, call.v_cache, **(call.keywords() | {"out": out}))

    assert answer is out
    assert bool((out[7:] == 123.0).all() and (out[:7] != 123.0).all())


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch() -> None:
    batch = case()
    alone = replace(
        batch,
        q=batch.q[6:23],
        cu_seqlens_q=torch.tensor([0, 17], dtype=torch.int32, device=DEVICE),
        seqused_k=batch.seqused_k[3:4],
        page_table=batch.page_table[3:4],
    )

    out, lse = run(batch, split_tuned)

    assert_same_bits((out[6:23], lse[6:23]), run(alone, split_tuned))


@pytest.mark.parametrize(
    "options",
    [
        {"heads": (8, 2), "softcap": 9.0, "sinks": torch.linspace(-3, 3, 8)},
        {"heads": (7, 1), "dims": (128, 128), "window_size": (50, 0)},
        {"heads": (4, 2), "dims": (512, 512), "page_size": 64},
        {"heads": (5, 1), "dims": (80, 80), "dtype": torch.float16, "causal": False},
    ],
)
def test_incumbent_and_candidate_have_the_same_bits(options: dict[str, Any]) -> None:
    call = case(LONG, **options)
    assert_same_bits(run(call, split_64), run(call, split_tuned))


@both
def test_the_tiles_of_every_declared_head_dim_fit_into_shared_memory(kernel: Kernel) -> None:
    pick = triton_split._plain if kernel is split_64 else triton_split._tuned
    for dims in (*((d, d) for d in RECORD.head_dims), *RECORD.uneven_head_dims):
        dim_pad, dim_v_pad = (padded(size) for size in dims)
        width = min(dim_v_pad, 256)
        for tma in (False, True):
            tiling, keys = pick(max(dim_pad, width), tma), key_tile(max(dim_pad, dim_v_pad), 2)
            one = keys * (dim_pad + width) if tiling.stages != 1 else keys * max(dim_pad, width)  # alone, K makes room for V
            assert 2 * (tiling.rows * dim_pad + (tiling.stages or 1) * one) <= SHARED, (dims, tma)


@pytest.mark.parametrize(
    ("pool", "fits"),
    [
        (torch.empty(3, 64, 2, 128, dtype=torch.bfloat16), True),
        (torch.empty(3, 256, 2, 128, dtype=torch.bfloat16), True),
        (torch.empty(3, 4, 64, 2, 128, dtype=torch.bfloat16)[:, 1], True),  # one layer of several in a page
        (torch.empty(3, 16, 2, 128, dtype=torch.bfloat16), False),  # a key tile spans pages
        (torch.empty(3, 64, 2, 256, dtype=torch.bfloat16)[..., ::2], False),  # columns apart
        (torch.empty(3, 64, 2, 130, dtype=torch.bfloat16)[..., :128], False),  # heads not 16 bytes apart
        (torch.empty(3, 64, 2, 136, dtype=torch.bfloat16)[..., 1:129], False),  # the first not on 16 bytes
        (torch.empty(1, 64, 2, 128, dtype=torch.bfloat16).expand(3, -1, -1, -1), False),  # pages on each other
    ],
)
def test_the_copy_engine_is_used_where_tiles_lie_as_it_needs_them(pool: torch.Tensor, fits: bool) -> None:
    assert fits_tma(pool, 64) is fits


def test_cpu_tensors_without_the_interpreter_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    call = case(((1,), (1,)))
    call = replace(call, q=call.q.cpu())
    monkeypatch.setattr(triton_host, "INTERPRETED", False)

    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before"):
        run(call, split_tuned)


@pytest.mark.parametrize("change", [{"q": torch.float32}, {"k_cache": torch.float16}, {"v_cache": torch.float16}])
def test_undeclared_formats_are_refused(change: dict[str, torch.dtype]) -> None:
    call = case(MIXED)

    with pytest.raises(ValueError, match="has dtype"):
        run(replace(call, **{name: getattr(call, name).to(dtype) for name, dtype in change.items()}), split_tuned)
