"""How the other calls of each relation are made from its base, and the changes that must show.

Every function takes the base, a stream to draw from and the kernel's scope, and names each call in the words of a finding.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.relations.sides import Piece, Side, as_it_is, chunk, cut, first, on_bits, other, own, values_shifted, whole
from oracle.scope import Scope
from oracle.streams import Stream

FAR_BELOW = -1e4  # a sink whose weight is 0 in float32 beside any logit of the base
FAR_ABOVE = 1000.0  # a softcap that moves logits of 30 by less than eps_tanh; larger ones cost digits in honest tanh formulas
PAST_ANY = 2**20  # a window longer than any sequence

Sides = tuple[Side, ...]


def other_values(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (values_shifted(base),)


# Pages and memory


def second_doubled(base: Side) -> Side:
    """The values of the second sequence are twice as large: who reads another's pages shows under any arithmetic."""
    v = base.material.v.clone()
    v[int(base.material.cu_k[1]) : int(base.material.cu_k[2])] *= 2
    return other(base, "", data={"v": v})


def pages_and_table_exchanged(base: Side, stream: Stream, scope: Scope) -> Sides:
    def exchange(call: Call) -> Call:
        one, two = call.page_table[:2, : _full_pages(call)].long()
        there, here = torch.cat([one, two]), torch.cat([two, one])
        for cache in (call.k_cache, call.v_cache):
            on_bits(cache, lambda bits: bits.index_copy_(0, there, bits[here]))
        return _table_exchanged(call)

    moved = replace(other(base, "with full pages of two sequences exchanged, in the pool and in the table"), change=exchange)
    return moved, other(base, "once more, after the table changed and changed back")


def table_exchanged(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (replace(own(base, "with full pages of two sequences exchanged in the table"), change=_table_exchanged),)


def _full_pages(call: Call) -> int:
    """Pages that both of the first two sequences have whole."""
    return int(call.seqused_k[:2].min()) // call.k_cache.shape[1]


def _table_exchanged(call: Call) -> Call:
    table, full = call.page_table.clone(), _full_pages(call)
    table[:2, :full] = table[:2, :full].flip(0)
    return replace(call, page_table=table)


def other_page_size(base: Side, stream: Stream, scope: Scope) -> Sides:
    sizes = [size for size in scope.record.page_sizes if size != base.case.page_size]
    return tuple(other(base, f"in pages of {size}", page_size=size) for size in sizes[:2])


def other_layouts(base: Side, stream: Stream, scope: Scope) -> Sides:
    return tuple(other(base, f"laid out as {layout}", layout=layout) for layout in ("hnd", "strided", "kv-in-page"))


def prefix_copied(base: Side) -> Side:
    """Every sequence begins with the first page of tokens of the first one; on its second page v is 8 more.

    So a page read in place of another shows under a wide bound, too.
    """
    m, size = base.material, base.case.page_size

    def copied(x: Tensor) -> Tensor:
        x = x.clone()
        for start in m.cu_k[1:-1].tolist():
            x[start : start + size] = x[:size]
        return x

    def apart(v: Tensor) -> Tensor:
        for start, end in pairwise(m.cu_k[1:].tolist()):
            v[start + size : min(start + 2 * size, end)] += 8.0
        return v

    return other(base, "", data={"k": on_bits(m.k, copied), "v": apart(on_bits(m.v, copied))})


def prefix_shared(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (replace(other(base, "with the prefix page shared and not copied"), change=lambda call: _shared(call, 1)),)


def more_than_the_prefix_shared(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (replace(own(base, "with the page after the prefix shared too"), change=lambda call: _shared(call, 2)),)


def _shared(call: Call, pages: int) -> Call:
    table = call.page_table.clone()
    table[:, :pages] = table[0, :pages]
    return replace(call, page_table=table)


# Chunks and batches


def shortened(base: Side) -> Side:
    """Every sequence has half of its keys, in a call that has room for all."""
    return replace(base, change=lambda call: replace(call, seqused_k=call.seqused_k // 2))


def whole_again(base: Side, stream: Stream, scope: Scope) -> Sides:
    longer = replace(own(base, "with twice as many keys in the same shapes"), change=as_it_is)
    return longer, other(base, "once more, after longer sequences in the same shapes")


def chunked(base: Side, stream: Stream, scope: Scope) -> Sides:
    case, n, page = base.case, base.case.q_lens[0], base.case.page_size
    edges = (0, n // 3, 2 * n // 3 + 1, n)
    chunks = [
        cut(base, f"with new tokens {start} to {stop - 1} as a chunk of their own", [chunk(case, 0, start, stop)])
        for start, stop in pairwise(edges)
        if start < stop
    ]
    steps = sorted({i for i in (0, 1, page - 1, page, n - 2, n - 1) if 0 <= i < n})
    named = ", ".join(map(str, steps))
    return *chunks, cut(base, f"with new tokens {named} as decode steps", [chunk(case, 0, i, i + 1) for i in steps])


def without_the_past(base: Side, stream: Stream, scope: Scope) -> Sides:
    q_len, kv_len = base.case.q_lens[0], base.case.kv_lens[0]
    start = q_len // 2
    piece = Piece(seq=0, q=(start, q_len), k=(kv_len - q_len + start, kv_len))
    return (own(cut(base, "", [piece]), "with a chunk that has lost the keys before it"),)


def moved(base: Side, stream: Stream, scope: Scope) -> Sides:
    seqs = [whole(base.case, seq) for seq in range(len(base.case.q_lens))]
    return cut(base, "with the last sequence first", seqs[-1:] + seqs[:-1]), cut(base, "with the sequences reversed", seqs[::-1])


def queries_moved_alone(base: Side, stream: Stream, scope: Scope) -> Sides:
    q = base.material.q.roll(base.case.q_lens[0], 0)
    return (own(other(base, "", data={"q": q}), "with the queries of each sequence given to the next"),)


def alone(base: Side, stream: Stream, scope: Scope) -> Sides:
    return tuple(cut(base, f"with sequence {seq} alone", [whole(base.case, seq)]) for seq in range(2))


def fewer(base: Side, stream: Stream, scope: Scope) -> Sides:
    seqs = [whole(base.case, seq) for seq in range(len(base.case.q_lens))]
    return tuple(
        cut(base, f"with the first {n} of {len(seqs)} rows", seqs[:n]) for n in range(len(seqs) - 1, len(seqs) - 4, -1) if n
    )


def first_left_out(base: Side, stream: Stream, scope: Scope) -> Sides:
    """A few rows from 1 on, read as those from 0 on."""
    rows = range(1, min(9, len(base.case.q_lens)))
    few = own(cut(base, "", [whole(base.case, seq) for seq in rows]), f"with the first row left out of {len(rows) + 1}")
    return (replace(few, rows=base.rows[: len(rows)]),)


def long_alone(base: Side, stream: Stream, scope: Scope) -> Sides:
    long = whole(base.case, 0)
    return cut(base, "with the long sequence alone", [long]), cut(base, "beside one other", [long, whole(base.case, 1)])


def padded(base: Side, stream: Stream, scope: Scope) -> Sides:
    def wider(call: Call) -> Call:
        past = torch.full((call.page_table.shape[0], 70), -1, dtype=torch.int32)
        return replace(call, page_table=torch.cat([call.page_table, past], 1))

    sides = [
        other(base, "without rows past the plan", tail_rows=0),
        other(base, "with 130 rows past the plan", tail_rows=130),
        replace(other(base, "with 70 more columns of the page table"), change=wider),
    ]
    if "num_seqs" in scope.parameters:
        sides.append(other(base, "with 5 sequences past the live ones", padded_seqs=5))
    return tuple(sides)


def half_as_long(base: Side, stream: Stream, scope: Scope) -> Sides:
    lengths = zip(base.case.q_lens, base.case.kv_lens, strict=True)
    pieces = [Piece(seq=i, q=(0, q), k=(0, k // 2)) for i, (q, k) in enumerate(lengths)]
    return (own(cut(base, "", pieces), "with every sequence half as long"),)


# Heads and values


def heads_moved(base: Side, stream: Stream, scope: Scope) -> Sides:
    m, f = base.material, base.case.family
    data = _kv_heads_moved(base) | {
        "q": m.q.roll(f.group, 1),
        "sinks": None if m.sinks is None else m.sinks.roll(f.group),
        "q_scale": _heads_rolled(m.q_scale),
        "k_scale": _heads_rolled(m.k_scale),
        "v_scale": _heads_rolled(m.v_scale),
    }
    side = other(base, "with the last kv head and its group first", data=data)
    return (replace(side, heads=torch.arange(f.q_heads).roll(f.group)),)


def kv_heads_moved_alone(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", data=_kv_heads_moved(base)), "with kv heads moved and query heads not"),)


def _kv_heads_moved(base: Side) -> dict[str, Tensor]:
    m = base.material
    return {name: on_bits(x, lambda bits: bits.roll(1, 1)) for name, x in (("k", m.k), ("v", m.v))}


def _heads_rolled(scale: Tensor | float | None) -> Tensor | float | None:
    return scale.roll(1, -1) if isinstance(scale, Tensor) else scale


def v_times_power_of_2(base: Side, stream: Stream, scope: Scope) -> Sides:
    k = (-2, -1, 2, 3)[int(stream.integers(0, 4, 1))]
    side = other(base, f"with v times 2^{k}", data={"v": base.material.v * 2.0**k})
    return (replace(side, factor=2.0**-k),)


def v_doubled(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", data={"v": base.material.v * 2}), "with v doubled"),)


def keys_moved(base: Side, stream: Stream, scope: Scope) -> Sides:
    k = base.material.k.roll(1, 0)
    return (own(other(base, "", data={"k": k}), "with other weights"),)


# Options


def q_times_scale_over(base: Side, stream: Stream, scope: Scope) -> Sides:
    def times(k: int) -> Side:
        scale, q = base.case.family.scale / k, base.material.q * k
        return other(base, f"with q times {k} and the softmax scale / {k}", family={"scale": scale}, data={"q": q})

    twice = times(2)
    return times(4), own(twice, twice.text)


def scale_over_8(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", family={"scale": base.case.family.scale / 8}), "with the softmax scale / 8"),)


def window_of_all(base: Side, stream: Stream, scope: Scope) -> Sides:
    windows = ((max(base.case.kv_lens) - 1, 0), (PAST_ANY, -1))
    return tuple(other(base, f"with a window of {window}", family={"window": window}) for window in windows)


def window_of_half(base: Side, stream: Stream, scope: Scope) -> Sides:
    window = (min(base.case.kv_lens) // 2 - 1, 0)
    return (own(other(base, "", family={"window": window}), f"with a window of {window}"),)


def softcap_far_above(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", family={"softcap": FAR_ABOVE}), f"with a softcap of {FAR_ABOVE:g}"),)


def softcap_of_two(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", family={"softcap": 2.0}), "with a softcap of 2"),)


def sinks_far_below(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (_with_sinks(base, FAR_BELOW),)


def sinks_of_zero(base: Side, stream: Stream, scope: Scope) -> Sides:
    side = _with_sinks(base, 0.0)
    return (own(side, side.text),)


def _with_sinks(base: Side, value: float) -> Side:
    sinks = torch.full((base.case.family.q_heads,), value)
    return other(base, f"with sinks of {value:g}", family={"sinks": True}, data={"sinks": sinks}, sinks="small")


def last_queries_not_causal(base: Side, stream: Stream, scope: Scope) -> Sides:
    case = base.case
    last = cut(base, "", [chunk(case, seq, n - 1, n) for seq, n in enumerate(case.q_lens)])
    return (other(last, "with the last query of each sequence alone and not causal", family={"causal": False}),)


def not_causal(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(other(base, "", family={"causal": False}), "not causal"),)


def scales_times_4_and_undone(base: Side, stream: Stream, scope: Scope) -> Sides:
    m, f = base.material, base.case.family
    taken = [name for name in ("q_scale", "k_scale") if getattr(m, name) is not None]
    data = {name: getattr(m, name) * 4 for name in (*taken, "v_scale")}
    family = {"scale": f.scale / 4 ** len(taken)}
    return (replace(other(base, "with every scale times 4, and undone", family=family, data=data), factor=0.25),)


def each_scale_times_8(base: Side, stream: Stream, scope: Scope) -> Sides:
    scales = {name: getattr(base.material, name) for name in ("q_scale", "k_scale", "v_scale")}
    return tuple(
        own(other(base, "", data={name: scale * 8}), f"with {name} times 8")
        for name, scale in scales.items()
        if scale is not None
    )


# The LSE, and calls between


def halves_of_the_keys(base: Side, stream: Stream, scope: Scope) -> Sides:
    lengths = base.case.kv_lens
    middles = [int(stream.integers(1, n, 1)) for n in lengths]
    parts = (("before", [(0, m) for m in middles]), ("after", [(m, n) for m, n in zip(middles, lengths, strict=True)]))
    return tuple(
        own(cut(base, "", [Piece(seq=i, q=(0, 1), k=keys) for i, keys in enumerate(ranges)]), f"on the keys {word} a cut")
        for word, ranges in parts
    )


def first_half_of_the_keys(base: Side, stream: Stream, scope: Scope) -> Sides:
    pieces = [Piece(seq=i, q=(0, 1), k=(0, n // 2)) for i, n in enumerate(base.case.kv_lens)]
    return (own(cut(base, "", pieces), "on the first half of the keys"),)


def others_between(base: Side, stream: Stream, scope: Scope) -> Sides:
    """A call of another dtype, head dim and page size as far as the kernel has them, one of other strides, then the base."""
    case, r = base.case, scope.record
    dtype = next((d for d in r.dtypes if d != case.dtype), case.dtype)
    d, dv = next(
        (dims for dims in sorted(scope.dims) if dims[0] != case.family.head_dim), (case.family.head_dim, case.family.head_dim_v)
    )
    page = next((size for size in r.page_sizes if size != case.page_size), case.page_size)
    family = replace(case.family, head_dim=d, head_dim_v=dv, scale=d**-0.5)
    stranger = first(replace(case, family=family, dtype=dtype, page_size=page, seed=case.seed + 1))
    return (
        own(stranger, f"then a call of {dtype}, head dims {d}/{dv} and pages of {page}"),
        own(other(base, "", layout="strided"), "then it with other strides"),
        other(base, "once more, after calls of other dtypes, shapes and strides"),
    )


def other_data(base: Side, stream: Stream, scope: Scope) -> Sides:
    return (own(first(replace(base.case, seed=base.case.seed + 1)), "with other data of the same shapes"),)
