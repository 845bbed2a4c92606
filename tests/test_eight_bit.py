"""8-bit attention is plain attention on dequantised codes, and a scale reaches as far as its scheme says and no further.

The plain computation quantises by labels (numbers of one label share a scale) and attends row by row in fp64.

Limits.  The output is rounded once (relative error u), and each P once (u_p, or a_p where it is small; P is at most 1, and so
is what it is rescaled by).  A logit is off by (head_dim + 8) u32 times the largest sum of |q k| behind it, softmax_scale
included, and a weight by twice as much; exp2, sums and products in float32 add less than 2^-18 for 300 keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import Call
from oracle.doors import looser_than_default
from oracle.formats import FORMATS, U32
from oracle.kernels import eight_bit
from oracle.kernels.eight_bit import ATTENTIONS, K_BLOCK, Q_BLOCK, Scheme, kernel
from oracle.kernels.quantised import rotate
from oracle.references.plan import live_rows, row_plan, tokens

MIXED = ((5, 1, 0, 17, 3, 9), (40, 130, 9, 17, 0, 5))  # new tokens, decode, no query, prefill, no key, more queries than keys
LONG = ((140, 1), (300, 70))  # both kinds of block end inside
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
every = pytest.mark.parametrize("name", list(ATTENTIONS))


def case(
    lens: tuple[tuple[int, ...], tuple[int, ...]] = MIXED,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    fill: float = math.nan,
    garbage: int = -1,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with normal data; keys have a common offset.  What lies past the plan is `fill`, page ids past it `garbage`.

    The pool has one page that nobody owns, q two rows past the plan.  `seed` picks the page ids, but not the data.
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
        k_cache[at] = (torch.randn(n, heads[1], dims[0], generator=data) + 0.5).to(dtype)
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


def run(call: Call, name: str) -> tuple[Tensor, Tensor]:
    """Output and LSE of the live rows."""
    given = {k: v for k, v in call.keywords().items() if k not in ("q_scale", "k_scale", "v_scale")}
    result = kernel(name)(call.q, call.k_cache, call.v_cache, **given, return_lse=True)
    assert isinstance(result, tuple)
    live = int(call.cu_seqlens_q[call.live_seqs])
    return result[0][:live], result[1][:live]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What the plain computation gives for the live rows, and how far a kernel may be from it."""

    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: Tensor


def dequantised(x: Tensor, label: Tensor, format_name: str) -> Tensor:
    """float32 `x` through its 8-bit codes, in float64; numbers with one label (broadcast to x) share a scale."""
    label = label.expand_as(x)
    result = torch.zeros(x.shape, dtype=torch.float64)
    for own in torch.unique(label).tolist():
        at = label == own
        peak = x[at].abs().max()
        largest = 127.0 if format_name == "int8" else 448.0
        scale = (peak if peak > 0 else torch.tensor(1.0)) / largest
        ratio = (x[at] / scale).clamp(-largest, largest)
        codes = ratio.round() if format_name == "int8" else ratio.to(torch.float8_e4m3fn).float()
        result[at] = codes.double() * scale.double()
    return result


def labels(scale: str, seq: int, length: int, heads: int, dim: int, block: int) -> Tensor:
    """Labels of the numbers (length, heads, dim) of one sequence: those of `heads` kv heads, or of the query heads of one."""
    token, head, channel = torch.arange(length)[:, None, None], torch.arange(heads)[:, None], torch.arange(dim)
    return {
        "token": token * heads + head,
        "block": token // block * heads + head,
        "channel": head * dim + channel + 0 * token,
        "head": head + 0 * token,
        "tensor": torch.zeros(1, 1, 1, dtype=torch.int64),
    }[scale].expand(length, heads, dim)


def plain(call: Call, scheme: Scheme) -> Plain:
    """Attention on the dequantised q, k and v of `call`, row by row in fp64."""
    plan, q_heads, kv_heads = row_plan(call, live_rows(call)), call.q.shape[1], call.k_cache.shape[2]
    group, dim, dim_v = q_heads // kv_heads, call.q.shape[2], call.v_cache.shape[3]
    lens = call.seqused_k[: call.live_seqs].tolist()
    starts = call.cu_seqlens_q[: call.live_seqs + 1].tolist()
    q_of = [call.q[starts[s] : starts[s + 1]].float() for s in range(len(lens))]
    k_of = [tokens(call, call.k_cache, s, 0, n).float() for s, n in enumerate(lens)]
    v_of = [tokens(call, call.v_cache, s, 0, n).float() for s, n in enumerate(lens)]
    # the mean key moves all logits of a row alike: it is added back in fp64
    means = [
        k.double().mean(0).to(call.q.dtype).float() if scheme.smooth_k and len(k) else torch.zeros(kv_heads, dim) for k in k_of
    ]
    k_of = [k - mean for k, mean in zip(k_of, means, strict=True)]
    if scheme.rotated:
        q_of, k_of = [rotate(q) for q in q_of], [rotate(k) for k in k_of]

    def through(parts: list[Tensor], scale: str, block: int, format_name: str, of_group: bool = False) -> list[Tensor]:
        marks, first = [], 0
        for seq, x in enumerate(parts):
            own = labels(scale, seq, x.shape[0], x.shape[1], x.shape[2], block)
            if of_group and scale == "head":
                own = own // group
            marks.append(own if scale == "tensor" else own + first)
            first += 0 if scale == "tensor" else x.numel()
        whole = dequantised(torch.cat([x.flatten() for x in parts]), torch.cat([m.flatten() for m in marks]), format_name)
        return [part.view(x.shape) for part, x in zip(torch.split(whole, [x.numel() for x in parts]), parts, strict=True)]

    raw_of = [call.q[starts[s] : starts[s + 1]].double() for s in range(len(lens))]
    q_of = through(q_of, scheme.qk_scale, Q_BLOCK, scheme.qk_format, of_group=True)
    k_of = through(k_of, scheme.qk_scale, K_BLOCK, scheme.qk_format)
    v_of = [v.double() for v in v_of] if scheme.v_scale is None else through(v_of, scheme.v_scale, K_BLOCK, "e4m3")

    u = U[call.q.dtype]
    p_name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[call.q.dtype] if scheme.p_scale is None else "e4m3"
    u_p, a_p = FORMATS[p_name].u, FORMATS[p_name].smallest_subnormal / 2 / (scheme.p_scale or 1.0)
    largest = torch.tensor(scheme.p_scale or 1.0)  # a row's only key has a P of 1, times p_scale
    one_off = float((largest.to(torch.float8_e4m3fn).double() / largest.double() - 1).abs())
    out = torch.zeros(len(plan), q_heads, dim_v, dtype=torch.float64)
    lse = torch.full((len(plan), q_heads), -math.inf, dtype=torch.float64)
    out_limit, lse_limit = torch.zeros_like(out), torch.zeros_like(lse)
    for r, (row, seq, lo, hi) in enumerate(zip(*(t.tolist() for t in (plan.row, plan.seq, plan.lo, plan.hi)), strict=True)):
        for head in range(q_heads):
            q = q_of[seq][row - starts[seq], head]
            k, v = k_of[seq][lo:hi, head // group], v_of[seq][lo:hi, head // group]
            offset = raw_of[seq][row - starts[seq], head] @ means[seq][head // group].double()
            s = (k @ q + offset) * call.softmax_scale
            sizes = k.abs() @ q.abs() * call.softmax_scale
            if call.softcap:
                s = call.softcap * (s / call.softcap).tanh()
            if call.sinks is not None:
                s, v = torch.cat((s, call.sinks[head : head + 1].double())), torch.cat((v, torch.zeros(1, dim_v)))
            if not len(s):
                continue
            p = s.softmax(0)
            out[r, head], lse[r, head] = p @ v, s.logsumexp(0)
            slack = 2 * (dim + 8) * U32 * float(sizes.max() if len(sizes) else 0.0) + 2.0**-18
            u_here, a_here = (one_off, 0.0) if len(s) == 1 else (u_p, a_p)
            size, kept = p @ v.abs(), float((s - s.max()).exp().sum())
            exact = out[r, head].abs()
            rounded = (u_here + slack) * size + a_here * v.abs().sum(0) / (kept if call.sinks is None else 1.0) + slack * exact
            out_limit[r, head] = u * (exact + rounded) + rounded + FORMATS["fp16"].smallest_subnormal / 2
            lse_limit[r, head] = slack + 4 * U32 * lse[r, head].abs()
    return Plain(out=out, lse=lse, out_limit=out_limit, lse_limit=lse_limit)


def excess(call: Call, name: str, scheme: Scheme | None = None) -> float:
    """The largest error over its limit, of the output and the LSE; the plain computation is that of `scheme`."""
    expected, (out, lse) = plain(call, scheme or ATTENTIONS[name]), run(call, name)
    dead = expected.lse == -math.inf
    assert bool((lse[dead] == -math.inf).all())
    assert not out[dead].any()
    over = (out.double() - expected.out).abs() / expected.out_limit
    over_lse = (lse.double() - expected.lse).abs() / expected.lse_limit
    return max(float(over[~dead].max()), float(over_lse[~dead].max()))


@every
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "dims": (48, 16)},
        {"causal": False},
        {"window_size": (20, 0)},
        {"window_size": (7, 5), "causal": False, "page_size": 1},
        {"softcap": 2.0, "heads": (6, 2)},
        {"sinks": torch.tensor([0.0, 3.0, -2.0, 12.0])},
        {"num_seqs": 4},
        {"window_size": (0, 0), "dtype": torch.float16},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_a_kernel_is_plain_attention_on_dequantised_codes(name: str, options: dict[str, Any]) -> None:
    assert excess(case(**options), name) <= 1


@every
def test_a_kernel_keeps_to_its_blocks_where_there_are_several(name: str) -> None:
    assert excess(case(LONG, heads=(2, 1), dims=(16, 16)), name) <= 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("int8-token", {"qk_scale": "block"}),
        ("int8-block", {"smooth_k": False}),
        ("int8-block", {"qk_format": "e4m3"}),
        ("int8-block-v8", {"v_scale": "head"}),
        ("fp8-head", {"qk_scale": "tensor"}),
        ("fp8-tensor", {"qk_scale": "head"}),
        ("fp8-tensor", {"v_scale": "head"}),
        ("fp8-block", {"v_scale": "head"}),
        ("fp8-hadamard", {"rotated": False}),
    ],
)
def test_codes_of_another_scheme_are_told_apart(name: str, wrong: dict[str, Any]) -> None:
    """By the LSE, where no P is rounded; and those of v by rows that see one key, whose P is 1."""
    window = (0, 0) if "v_scale" in wrong else (-1, -1)
    call = case(LONG, heads=(2, 1), dims=(16, 16), dtype=torch.float16, window_size=window)
    assert excess(call, name) <= 1
    assert excess(call, name, replace(ATTENTIONS[name], **wrong)) > 1


@every
@pytest.mark.parametrize(("fill", "garbage"), [(0.0, 0), (math.inf, 2**30), (60000.0, -7)])
def test_what_lies_past_the_plan_changes_no_bit(name: str, fill: float, garbage: int) -> None:
    clean, other = run(case(), name), run(case(fill=fill, garbage=garbage), name)
    assert torch.equal(clean[0], other[0])
    assert torch.equal(clean[1], other[1])


@every
def test_page_ids_change_no_bit(name: str) -> None:
    once, again = run(case(LONG), name), run(case(LONG, seed=5), name)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


def alone(call: Call, seq: int) -> Call:
    """One sequence of a call."""
    begin, end = call.cu_seqlens_q[seq : seq + 2].tolist()
    return replace(
        call,
        q=call.q[begin:end],
        cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        seqused_k=call.seqused_k[seq : seq + 1],
        page_table=call.page_table[seq : seq + 1],
    )


@every
def test_a_sequence_has_the_same_bits_alone_if_the_record_says_so(name: str) -> None:
    call = case()
    out, lse = run(call, name)
    same = True
    for seq in range(call.live_seqs):
        begin, end = call.cu_seqlens_q[seq : seq + 2].tolist()
        own_out, own_lse = run(alone(call, seq), name)
        same &= torch.equal(out[begin:end], own_out) and torch.equal(lse[begin:end], own_lse)
    assert same == kernel(name).record.batch_invariant


@every
def test_an_outlier_in_one_row_of_q_reaches_as_far_as_its_scale(name: str) -> None:
    """Rows and heads whose bits change are those that share a scale with it, and there are some where any share one."""
    call = case(((140, 9), (140, 9)), heads=(4, 2), dims=(16, 16))
    loud = call.q.clone()
    loud[3, 0] *= 3.0**4
    before, after = run(call, name)[1], run(replace(call, q=loud), name)[1]
    changed = before != after
    changed[3, 0] = False
    reach = torch.zeros_like(changed)
    match ATTENTIONS[name].qk_scale:
        case "token":
            pass
        case "block":
            reach[:Q_BLOCK, 0] = True
        case "head":
            reach[:140, :2] = True
        case "tensor":
            reach[:] = True
    assert not changed[~reach].any()
    if ATTENTIONS[name].qk_scale != "token":
        assert bool(changed[reach].any())


def test_one_loud_token_costs_the_others_nothing_with_scales_of_their_own_and_much_in_its_block() -> None:
    """Its block's step is 2^10 times as wide, 8 times the others' numbers: their codes are 0, and all keys weigh the same."""
    call = case(((100,), (100,)), heads=(1, 1))
    loud = call.q.clone()
    loud[50] *= 2.0**10
    call = replace(call, q=loud)
    exact = plain(call, Scheme(about="", qk_format="int8", qk_scale="token", smooth_k=True))  # close enough to say which is far
    others = torch.arange(100) != 50
    own, shared = ((run(call, name)[0].double() - exact.out)[others].norm() for name in ("int8-token", "int8-block"))
    assert own < 0.02 * shared


def test_smoothing_takes_off_what_all_keys_share() -> None:
    """Keys that come in pairs about a mean of 4 have the codes of those about 0: no bit of the output changes."""
    call = case(((20,), (20,)), heads=(2, 1))
    half = torch.randint(-16, 17, (10, 1, 32), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) / 8
    pair = torch.cat((half, -half))
    at = call.page_table[0, torch.arange(20) // 16].long(), torch.arange(20) % 16
    results = []
    for mean in (0.0, 4.0):
        cache = call.k_cache.clone()
        cache[at] = pair + mean
        results.append(run(replace(call, k_cache=cache), "int8-block"))
    assert torch.equal(results[0][0], results[1][0])
    moved = 4.0 * call.q[:20].double().sum(-1) * call.softmax_scale
    assert torch.allclose(results[1][1].double() - results[0][1].double(), moved, atol=1e-4)
    assert not torch.allclose(moved, torch.zeros_like(moved), atol=1.0)


@pytest.mark.parametrize("name", [name for name, scheme in ATTENTIONS.items() if scheme.smooth_k])
def test_a_sequence_of_one_key_has_the_lse_of_its_logit(name: str) -> None:
    """All of that key is mean, so no code is left to be wrong: the LSE is the logit, rounded to float32."""
    call = case(((1,), (1,)), heads=(16, 2), dims=(256, 256))
    call = replace(call, q=call.q * 8, k_cache=call.k_cache * 64)
    key = tokens(call, call.k_cache, 0, 0, 1)[0].double().repeat_interleave(8, 0)
    logits = (call.q[:1].double() * key).sum(-1) * call.softmax_scale
    assert float(logits.abs().max()) > 500
    assert bool(((run(call, name)[1].double() - logits).abs() <= 2 * U32 * logits.abs()).all())


@every
def test_rows_past_the_plan_stay_as_they_are_in_a_strided_out(name: str) -> None:
    call = case(num_seqs=4)
    live = int(call.cu_seqlens_q[4])
    wide = torch.full((len(call.q), 4, 64), 7.0, dtype=torch.bfloat16)
    expected, _ = run(call, name)
    got, _ = run(replace(call, out=wide[..., :32]), name)
    assert torch.equal(got, expected)
    assert bool((wide[live:] == 7).all())
    assert bool((wide[..., 32:] == 7).all())


def test_a_row_of_few_keys_and_one_of_many_come_out_alike_whatever_is_in_hand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More or fewer rows at a time: products of P and v may be added in another order, scores may not change."""
    call = case(LONG)
    out, lse = run(call, "int8-block")
    monkeypatch.setattr(eight_bit, "_SCORES", 4096)
    again, lse_again = run(call, "int8-block")
    assert torch.equal(lse, lse_again)
    assert float((out.double() - again.double()).abs().max()) <= 2 * U[torch.bfloat16] * float(out.abs().max())


def test_every_kernel_declares_what_it_quantises() -> None:
    for name, scheme in ATTENTIONS.items():
        found = getattr(eight_bit, name.replace("-", "_"))
        precision = found.record.precision
        assert found.record == kernel(name).record
        assert looser_than_default(precision)
        assert (precision.qk_format, precision.smooth_k) == (scheme.qk_format, scheme.smooth_k)
        assert (precision.v_format is None) == (scheme.v_scale is None)
        assert (precision.p_format == "e4m3") == (scheme.p_scale is not None)


def test_a_kernel_of_another_name_is_no_kernel() -> None:
    with pytest.raises(AttributeError, match="has no kernel 'int4_token'; it has int8-token"):
        getattr(eight_bit, "int4_token")  # noqa: B009
