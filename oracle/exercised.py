"""Which options of the contract a set of cases exercised, and which pairs of them: counts, zeros included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

from oracle.cases import Case
from oracle.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something that a case may have or not."""

    holds: Callable[[Case], bool]
    needs: str = ""  # the keyword argument without which no case of a kernel has it


OPTIONS: dict[str, Option] = {
    "not causal": Option(holds=lambda c: not c.family.causal, needs="causal"),
    "window": Option(holds=lambda c: c.family.window != (-1, -1), needs="window_size"),
    "softcap": Option(holds=lambda c: c.family.softcap > 0, needs="softcap"),
    "sinks": Option(holds=lambda c: c.sinks != "none", needs="sinks"),
    "scales": Option(holds=lambda c: c.scales != "none", needs="k_scale"),
    "8-bit cache": Option(holds=lambda c: bool(c.cache_dtype), needs="k_scale"),
    "d_v not d": Option(holds=lambda c: c.family.head_dim != c.family.head_dim_v),
    "group": Option(holds=lambda c: c.family.group > 1),
    "kv heads": Option(holds=lambda c: c.family.kv_heads > 1),
    "layout": Option(holds=lambda c: c.layout != "plain"),
    "shared": Option(holds=lambda c: c.shared_prefix > 0),
    "num_seqs": Option(holds=lambda c: c.padded_seqs > 0, needs="num_seqs"),
    "out given": Option(holds=lambda c: c.give_out, needs="out"),
    "rows past": Option(holds=lambda c: c.tail_rows > 0),
    "no query": Option(holds=lambda c: 0 in c.q_lens),
    "no key": Option(holds=lambda c: 0 in c.kv_lens),
    "q > kv": Option(holds=lambda c: any(q > k for q, k in zip(c.q_lens, c.kv_lens, strict=True))),
    "prefix": Option(holds=lambda c: any(1 < q < k for q, k in zip(c.q_lens, c.kv_lens, strict=True))),
    "full pages": Option(holds=lambda c: any(k and k % c.page_size == 0 for k in c.kv_lens)),
}


def pair_counts(scope: Scope, cases: Iterable[Case]) -> dict[tuple[str, str], int]:
    """(option, option) -> cases that have both, over the options that a kernel of this scope can be given; (o, o) counts one.

    Pairs in the order of OPTIONS, the earlier option first.
    """
    names = [name for name, option in OPTIONS.items() if _possible(name, option, scope)]
    pairs = [*((name, name) for name in names), *combinations(names, 2)]
    counts = dict.fromkeys(sorted(pairs, key=lambda pair: (names.index(pair[0]), names.index(pair[1]))), 0)
    for case in cases:
        held = [name for name in names if OPTIONS[name].holds(case)]
        for pair in (*((name, name) for name in held), *combinations(held, 2)):
            counts[pair] += 1
    return counts


def _possible(name: str, option: Option, scope: Scope) -> bool:
    if name == "8-bit cache":
        return bool(scope.cache_dtypes)
    if name == "d_v not d":
        return bool(scope.record.uneven_head_dims)
    if name == "group":
        return scope.record.groups != (1,)
    return not option.needs or option.needs in scope.parameters
