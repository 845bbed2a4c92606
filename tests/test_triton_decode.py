"""The decode kernel keeps the whole kernel contract, however many programs share the keys of a sequence.

Limits and helpers are those of test_triton_prefill.  Sums of shares are rescaled once more, in float32: nothing that these
limits do not hold.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_prefill import DEVICE, E4M3, assert_right, assert_same_bits, case, run
from torch import Tensor

from oracle.contract import OPTIONAL, REQUIRED, Call
from oracle.kernels import triton_decode
from oracle.kernels.triton_decode import MANY, MOST_KEYS, SHARE, TOKENS, Tiling, decode, most_shares, tiling

# One share, several of 128 keys, of 256 keys; few rows and more; more tokens than are split; no query, no key.
LONG = ((1, 8, 2, 0, TOKENS + 1, 3), (100, 300, 530, 70, 260, 0))
SHARED_MEMORY = 227 * 2**10  # bytes that a program can have on Hopper


def test_the_kernel_names_every_argument_of_the_contract_and_promises_its_bits() -> None:
    assert set(inspect.signature(decode).parameters) == {"q", "k_cache", "v_cache", *REQUIRED, *OPTIONAL}
    assert decode.record.batch_invariant
    assert set(decode.record.thresholds) >= {TOKENS, SHARE}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"causal": False, "window_size": (-1, 3)},
        {"window_size": (150, 0), "sinks": torch.tensor([-900.0, 0.0, 2.5, 30.0])},
        {"softcap": 3.0, "window_size": (200, 7), "causal": False},
        {
            "cache_dtype": E4M3,
            "k_scale": torch.tensor([0.4, 2.0]),
            "v_scale": torch.linspace(0.1, 9.0, 12).view(6, 2),
            "q_scale": 1.7,
        },
    ],
    ids=lambda options: ",".join(options),
)
def test_each_option_follows_the_formula(options: dict[str, Any]) -> None:
    assert_right(case(LONG, dims=(32, 32), **options), decode)


@pytest.mark.parametrize(
    ("heads", "dims", "page_size"),
    [((5, 1), (40, 40), 1), ((20, 1), (64, 128), 8), ((2, 1), (512, 512), 64), ((3, 1), (576, 512), 64)],
)
def test_any_group_head_dim_and_page_size_will_do(heads: tuple[int, int], dims: tuple[int, int], page_size: int) -> None:
    assert_right(case(((3, 1), (140, 6)), heads=heads, dims=dims, page_size=page_size), decode)


def test_a_row_without_keys_has_the_sink_as_lse() -> None:
    sinks = torch.tensor([-2.0, 0.5, 3.0, 40.0])

    out, lse = run(case(((2,), (0,)), sinks=sinks), decode)

    assert bool((out == 0).all())
    assert torch.equal(lse, sinks.expand(2, 4))


def test_rows_before_the_first_key_are_empty() -> None:
    out, lse = run(case(((9, 4), (5, 0))), decode)

    assert bool((out[:4] == 0).all() and (lse[:4] == -torch.inf).all() and (out[9:] == 0).all() and (lse[9:] == -torch.inf).all())


def test_nothing_past_the_plan_and_no_page_id_changes_a_bit() -> None:
    one = case(LONG, dims=(32, 32), window_size=(290, 0))
    other = case(LONG, dims=(32, 32), window_size=(290, 0), fill=torch.inf, garbage=2**31 - 1, seed=1)

    assert_same_bits(run(one, decode), run(other, decode))


def test_a_sequence_has_the_same_bits_alone_and_beside_a_longer_one_and_with_padding() -> None:
    batch = case(LONG, dims=(32, 32))
    longer = replace(  # a wider page table makes room for more shares, a plan of more sequences for other slots
        batch,
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, torch.tensor([-5, 2**31 - 1] * 4, dtype=torch.int32, device=DEVICE)]),
        seqused_k=torch.cat([batch.seqused_k, torch.tensor([2**31 - 1] * 8, dtype=torch.int32, device=DEVICE)]),
        page_table=torch.nn.functional.pad(batch.page_table, (0, 500, 0, 8), value=-1),
        num_seqs=6,
    )
    out, lse = run(batch, decode)

    assert_same_bits((out, lse), run(longer, decode))
    for seq, begin, end in ((0, 0, 1), (1, 1, 9), (2, 9, 11)):
        alone = replace(
            batch,
            q=batch.q[begin:end],
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            seqused_k=batch.seqused_k[seq : seq + 1],
            page_table=batch.page_table[seq : seq + 1],
        )
        assert_same_bits((out[begin:end], lse[begin:end]), run(alone, decode))


def test_strides_and_a_given_out_change_no_bit_and_rows_past_the_plan_are_untouched() -> None:
    call = case(((2, 0, 3), (200, 5, 0)), dims=(64, 80))
    pool = torch.full((call.k_cache.shape[0], 2, 16, 300), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    k, v = pool[..., 0:128:2].transpose(1, 2), pool[..., 130:290:2].transpose(1, 2)  # one pool, heads before slots
    k.copy_(call.k_cache)
    v.copy_(call.v_cache)
    q = call.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = torch.full((80, call.q.shape[0], 4), 123.0, dtype=torch.bfloat16, device=DEVICE).permute(1, 2, 0)

    assert_same_bits(run(call, decode), run(replace(call, q=q, k_cache=k, v_cache=v, out=out), decode))
    assert bool((out[5:] == 123.0).all() and (out[:5] != 123.0).all())


def test_every_finite_e4m3_code_is_taken_for_what_it_is() -> None:
    """Of a single key the output is V, and the LSE of the query that picks a column is that of K: once even, once odd."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127] + [0, 0], dtype=torch.uint8, device=DEVICE)
    pool = torch.zeros(2, 16, 1, 256, dtype=torch.uint8, device=DEVICE)
    pool[:, 0, 0] = torch.stack([codes, codes.roll(1)])
    call = Call(
        q=torch.eye(256, dtype=torch.bfloat16, device=DEVICE).expand(2, -1, -1),
        k_cache=pool.view(E4M3),
        v_cache=pool.view(E4M3),
        cu_seqlens_q=torch.arange(3, dtype=torch.int32, device=DEVICE),
        seqused_k=torch.ones(2, dtype=torch.int32, device=DEVICE),
        page_table=torch.arange(2, dtype=torch.int32, device=DEVICE)[:, None],
        softmax_scale=1.0,
    )

    out, lse = run(call, decode)

    expected = pool[:, 0].view(E4M3).float()
    assert torch.equal(out.float(), expected.expand_as(out))
    torch.testing.assert_close(lse, expected[:, 0], rtol=2.0**-21, atol=0.0)


@pytest.mark.parametrize("dim", [33, 34])
def test_an_e4m3_cache_in_which_columns_do_not_pair_up_will_do(dim: int) -> None:
    call = case(((3,), (140,)), dims=(dim, dim), cache_dtype=E4M3)
    wide = torch.zeros(*call.k_cache.shape[:3], 2 * dim, dtype=torch.uint8, device=DEVICE)
    wide[..., ::2] = call.k_cache.view(torch.uint8)

    assert_right(call, decode)
    assert_right(replace(call, k_cache=wide.view(E4M3)[..., ::2]), decode)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_programs_that_share_the_columns_of_v_give_the_bits_of_one(
    cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = case(((3, 9), (300, 20)), dims=(64, 72), cache_dtype=cache_dtype, sinks=torch.linspace(-2.0, 2.0, 4))
    found = []
    for parts in (1, 2):
        monkeypatch.setattr(triton_decode, "tiling", lambda *_, p=parts: Tiling(rows=MANY, keys=32, parts=p, warps=4, stages=2))
        assert_right(call, decode)
        found.append(run(call, decode))

    assert_same_bits(*found)


def share_of(seen: int) -> int:
    """Keys of a share, where so many are seen: the power of two from SHARE on whose square is 32 times that or more."""
    share = SHARE
    while share * share < 32 * seen:
        share *= 2
    return share


def test_there_is_room_for_every_share_of_every_sequence_that_a_page_table_can_hold() -> None:
    for keys in (*range(1, 3000), 2**14, 2**14 + 1, 2**17, 2**20):
        assert -(-keys // share_of(keys)) <= most_shares(keys) <= max(1, round((keys / 32) ** 0.5 + 1))
    assert all(most_shares(keys) <= most_shares(keys + 1) for keys in range(3000))


def test_shares_are_many_and_their_sums_are_few_beside_the_cache() -> None:
    """16k keys are 16 shares; of eight rows a share writes and later reads 8 bytes a column, and K and V of a key have 4."""
    assert -(-16384 // share_of(16384)) == 16
    assert all(8 * 8 / (4 * share_of(keys)) < 0.02 for keys in (2**14, 2**17))


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("group", [1, 4, 8, 64])
def test_the_tiles_of_every_declared_head_dim_fit_into_shared_memory(group: int, words: bool, few: bool) -> None:
    for dim in {max(dims) for dims in (*((d, d) for d in decode.record.head_dims), *decode.record.uneven_head_dims)}:
        size = max(16, 1 << (dim - 1).bit_length())
        tile = tiling(size, words, group, few)
        columns = size + min(size, 512) // tile.parts  # of K and V; K of 576 columns has a V of 512
        q, operands = 2 * tile.rows * size, 2 * tile.keys * columns
        # Beside the tiles in flight: q, where wgmma reads it or it is read again for each tile, and e4m3 as wgmma takes it.
        if tile.rows < MANY:
            held = operands // (1 + words) * max(1, tile.stages - 1) + q
        else:
            held = operands * (1 if words else tile.stages) + operands // 2 * (tile.stages - 1) * words + q
        assert MOST_KEYS % tile.keys == 0
        assert held <= SHARED_MEMORY, (dim, held)


def test_a_share_that_is_left_out_is_seen() -> None:
    """The limits are tight enough for the cases to mean something: without the last share of three they are exceeded."""

    def without(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, seqused_k: Tensor, **rest: Any) -> Any:
        return decode(q, k_cache, v_cache, seqused_k=(seqused_k - 1) // SHARE * SHARE, **rest)

    with pytest.raises(AssertionError, match=r"off by|largest excess"):
        assert_right(case(((1,), (300,)), heads=(1, 1), dims=(32, 32)), without)
