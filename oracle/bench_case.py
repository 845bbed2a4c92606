"""What a bench times: families by contexts by batch shapes as calls on one pool each, and the work that their answers need."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.cases import Case, case_seed
from oracle.contract import Call
from oracle.errors import InputError
from oracle.families import FAMILIES
from oracle.material import TORCH_DTYPES
from oracle.references.plan import live_rows, row_plan

SPARE = 3  # pages of the pool that belong to no sequence
FORM = "SEQUENCESxROWS[+SEQUENCESxROWS...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an answer needs, however it is found: no key that no row sees, and nothing read twice."""

    flops: float  # two products, of the live query-key pairs
    nbytes: float  # q, the keys and values that some row sees, the page ids of the plan, and the output


def batch_shape(text: str) -> tuple[int, ...]:
    """New tokens of each sequence, from a text such as "1x512" or "1x512+7x1".  Raises InputError."""
    rows: list[int] = []
    for part in text.split("+"):
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part)):
            raise InputError(f"shape {text!r}: got {part!r}; expected {FORM}, such as 1x512 or 1x512+7x1")
        rows += [int(match[2])] * int(match[1])
    return tuple(rows)


def grid(
    families: Sequence[str], contexts: Sequence[int], shapes: Sequence[str], *, dtype: str, page_size: int, seed: int
) -> Iterator[Case]:
    """A case for each family, batch shape and context, which every sequence of the batch has before its new tokens.

    The shortest context first.  Raises InputError for an unknown family.
    """
    for name, shape, context in itertools.product(families, shapes, sorted(contexts)):
        if name not in FAMILIES:
            raise InputError(f"family {name!r} is unknown; `oracle families` lists {', '.join(FAMILIES)}")
        rows, family = batch_shape(shape), FAMILIES[name]
        label = f"{name} {shape} after {context}"
        yield Case(
            name=label,
            family=family,
            dtype=dtype,
            q_lens=rows,
            kv_lens=tuple(context + n for n in rows),
            page_size=page_size,
            sinks="small" if family.sinks else "none",
            tail_rows=0,
            seed=case_seed(seed, label),
        )


def calls_of(case: Case, device: str, count: int) -> list[Call]:
    """`count` calls of the case with N(0, 1) inputs, each with tensors of its own: pages in random order in a pool of their own.

    Logits have a standard deviation of 1, whatever the family's scale; what lies past the plan is random as well.  `out` is NaN.
    Same case, same bits, on one kind of device.  Raises InputError where the device lacks the memory.
    """
    random = torch.Generator(device).manual_seed(case.seed)
    try:
        return [_call(case, device, random) for _ in range(count)]
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info()
        raise InputError(
            f"{case.name}: {count} pools of its size do not fit the device, {free / 2**30:.1f} GiB are free; "
            "ask for shorter --contexts or fewer sequences in --shapes"
        ) from None


def _call(case: Case, device: str, random: torch.Generator) -> Call:
    f, dtype = case.family, TORCH_DTYPES[case.dtype]
    pages = [-(-n // case.page_size) for n in case.kv_lens]
    total = sum(pages) + SPARE

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=random)

    def pool(dim: int) -> Tensor:
        return normal(total, case.page_size, f.kv_heads, dim)

    size = math.sqrt(1.0 / (abs(f.scale) * math.sqrt(f.head_dim)))
    ids = torch.randperm(total, device=device, generator=random).int()
    table = torch.full((len(pages), max(pages)), int(ids[-1]), device=device, dtype=torch.int32)
    for row, own in zip(table, torch.split(ids[: sum(pages)], pages), strict=True):
        row[: len(own)] = own
    return Call(
        q=normal(case.total_q, f.q_heads, f.head_dim).mul_(size),
        k_cache=pool(f.head_dim).mul_(size),
        v_cache=pool(f.head_dim_v),
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(case.q_lens)], device=device, dtype=torch.int32),
        seqused_k=torch.tensor(case.kv_lens, device=device, dtype=torch.int32),
        page_table=table,
        softmax_scale=f.scale,
        causal=f.causal,
        window_size=f.window,
        softcap=f.softcap,
        sinks=torch.randn(f.q_heads, device=device, generator=random) if f.sinks else None,
        out=torch.full((case.total_q, f.q_heads, f.head_dim_v), torch.nan, device=device, dtype=dtype),
    )


def check_random(name: str, call: Call) -> None:
    """Returns where q, k and v of every head hold different finite numbers.

    Raises InputError otherwise: a chip that multiplies zeros, or one number all the time, draws less power and runs faster.
    """
    for what, x, heads in (("q", call.q, 1), ("k_cache", call.k_cache, 2), ("v_cache", call.v_cache, 2)):
        across = [dim for dim in range(x.dim()) if dim != heads]
        low, high = x.amin(across), x.amax(across)
        if not bool(((low < high) & torch.isfinite(low) & torch.isfinite(high)).all()):
            head = int((~((low < high) & torch.isfinite(low) & torch.isfinite(high))).nonzero()[0])
            raise InputError(
                f"{name}: {what} of head {head} runs from {float(low[head]):g} to {float(high[head]):g}; expected random finite "
                "numbers: zeros and constants take less power, so that kernels run faster on them than in use"
            )


def work_of(call: Call) -> Work:
    """What the answer to `call` needs."""
    f, heads = call.q, call.k_cache.shape[2]
    plan = row_plan(call, live_rows(call))
    keys = plan.hi - plan.lo
    seen = 0
    for seq in range(call.live_seqs):
        mine = (plan.seq == seq) & (keys > 0)
        seen += int(plan.hi[mine].max() - plan.lo[mine].min()) if bool(mine.any()) else 0
    dims = call.q.shape[2] + call.v_cache.shape[3]
    pages = -(-call.seqused_k[: call.live_seqs].long() // call.k_cache.shape[1])
    return Work(
        flops=2.0 * float(keys.sum()) * f.shape[1] * dims,
        nbytes=float(len(plan) * f.shape[1] * dims * f.element_size() + seen * heads * dims * call.k_cache.element_size())
        + 4.0 * float(pages.sum()),
    )
