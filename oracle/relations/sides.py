"""The calls that a relation is between: how one is made from another, and how its answer is read as the other's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call
from oracle.material import Material, material, offsets

T = TypeVar("T")


def as_it_is(x: T) -> T:
    """`x` unchanged."""
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One call of a relation.  The first one, its base, is read as itself."""

    text: str  # what it is, beside the base: "sequence 0 alone"
    case: Case
    material: Material
    rows: Tensor  # (total_q,) int64: the base's live row that each live row of this call answers
    heads: Tensor | None = None  # (q_heads,) int64: the base's query head that each head answers; None = the same one
    factor: float = 1.0  # the base's output is this call's times it, a power of two
    own: bool = False  # its exact answer or its bound is another than the base's: judged by its own, and not by bits
    change: Callable[[Call], Call] = as_it_is  # of the call, once laid out; it may write into the call's tensors

    def read(self, base: Tensor, answer: Tensor, *, factor: float = 1.0) -> Tensor:
        """`base` (rows, q_heads, ...) with what this call's `answer` says of it put in its place."""
        part = answer * factor
        if self.heads is not None:
            part = torch.empty_like(part).index_copy_(1, self.heads, part)
        return base.index_copy(0, self.rows, part)


def first(case: Case) -> Side:
    """The base of a relation on `case`."""
    return Side(text="", case=case, material=material(case), rows=torch.arange(case.total_q))


def other(
    side: Side, text: str, *, family: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **case: Any
) -> Side:
    """`side`, named `text`, with other fields of the family, of the material and of the case."""
    changed = replace(side.case, family=replace(side.case.family, **(family or {})), **case)
    return replace(side, text=text, case=changed, material=replace(side.material, **(data or {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some queries of a sequence and some of its keys, as half-open ranges in the sequence."""

    seq: int
    q: tuple[int, int]
    k: tuple[int, int]


def whole(case: Case, seq: int) -> Piece:
    """Sequence `seq` as it is."""
    return Piece(seq=seq, q=(0, case.q_lens[seq]), k=(0, case.kv_lens[seq]))


def chunk(case: Case, seq: int, start: int, stop: int) -> Piece:
    """New tokens start..stop-1 of a sequence, as if those after them had not come yet."""
    before = case.kv_lens[seq] - case.q_lens[seq]
    return Piece(seq=seq, q=(start, stop), k=(0, before + stop))


def cut(side: Side, text: str, pieces: Sequence[Piece]) -> Side:
    """A call whose sequences are `pieces` of those of `side`, in that order."""
    m, device = side.material, side.rows.device
    queries = torch.cat([int(m.cu_q[p.seq]) + torch.arange(*p.q, device=device) for p in pieces])
    keys = torch.cat([int(m.cu_k[p.seq]) + torch.arange(*p.k, device=device) for p in pieces])
    seqs = torch.tensor([p.seq for p in pieces])
    q_lens, kv_lens = (
        tuple(stop - start for start, stop in ranges) for ranges in zip(*((p.q, p.k) for p in pieces), strict=True)
    )

    def of_seqs(scale: Tensor | float | None) -> Tensor | float | None:
        return scale[seqs] if isinstance(scale, Tensor) and scale.dim() == 2 else scale

    return replace(
        side,
        text=text,
        case=replace(side.case, q_lens=q_lens, kv_lens=kv_lens),
        material=replace(
            m,
            q=m.q[queries],
            k=on_bits(m.k, lambda k: k[keys]),
            v=on_bits(m.v, lambda v: v[keys]),
            cu_q=offsets(q_lens),
            cu_k=offsets(kv_lens),
            q_scale=of_seqs(m.q_scale),
            k_scale=of_seqs(m.k_scale),
            v_scale=of_seqs(m.v_scale),
        ),
        rows=side.rows[queries],
    )


def on_bits(x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """`move`, which only moves elements, of a tensor of any format: not every one can be indexed."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    return move(x.view(bits)).view(x.dtype)


def own(side: Side, text: str) -> Side:
    """`side`, named `text`, whose exact answer or bound is another than the base's."""
    return replace(side, text=text, own=True)


def values_shifted(side: Side) -> Side:
    """Every key has the value of the one before it and 8 more: another answer under any bound, of which much looks the same."""
    v = on_bits(side.material.v, lambda bits: bits.roll(1, 0))
    v = (v.float() + 8.0).to(v.dtype)
    return own(other(side, "", data={"v": v}), "with every value one key late, and 8 more")
