"""Kernels that are right but in rare calls, named by path: what a search must find and make small.

Each is a correct emulated kernel with one fault round it; `FAULTS` lists them with the reasons that understand them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kernels_by_path import answer
from torch import Tensor

from oracle.contract import Call, contract_kernel
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import emulate, record_of

Solution = tuple[Tensor, Tensor]  # out and LSE of the live rows
RECORD = record_of(Arithmetic())
FAULTS: dict[str, tuple[str, ...]] = {}


def solve(call: Call, **planted: Any) -> Solution:
    return emulate(call, Arithmetic(planted=Planted(**planted)))


def fault(*reasons: str) -> Callable[[Callable[[Call], Solution]], Callable[..., Any]]:
    """A kernel that gives the live rows as the function does."""

    def wrap(function: Callable[[Call], Solution]) -> Callable[..., Any]:
        FAULTS[function.__name__] = reasons
        return contract_kernel(RECORD)(lambda call, want_lse: answer(call, want_lse, *function(call)))

    return wrap


def lengths(call: Call) -> tuple[Tensor, Tensor]:
    """q_len and kv_len of the live sequences."""
    return call.cu_seqlens_q[: call.live_seqs + 1].diff().long(), call.seqused_k[: call.live_seqs].long()


def where(call: Call, sequences: Tensor, wrong: Solution) -> Solution:
    """The rows of these sequences (bool) as in `wrong`, the others right."""
    rows = torch.repeat_interleave(sequences, lengths(call)[0])
    right = solve(call)
    return torch.where(rows[:, None, None], wrong[0], right[0]), torch.where(rows[:, None], wrong[1], right[1])


textbook = contract_kernel(RECORD)(lambda call, want_lse: answer(call, want_lse, *solve(call)))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def last_key_lost_where_pages_are_full(call: Call) -> Solution:
    kv = lengths(call)[1]
    return where(call, kv % call.k_cache.shape[1] == 0, solve(call, drop_last_key=True))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def window_off_by_one_behind_a_prefix(call: Call) -> Solution:
    q, kv = lengths(call)
    return where(call, (kv > q) & (q > 1), solve(call, window_shift=1))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def k_scale_of_head_0_only(call: Call) -> Solution:
    if not isinstance(call.k_scale, Tensor) or call.k_scale.shape[-1] < 2:
        return solve(call)
    scale = call.k_scale.clone()
    scale[..., 1:] = 1.0
    return solve(replace(call, k_scale=scale))


@fault("not-finite", "past-the-plan")
def tail_of_the_last_page_times_zero(call: Call) -> Solution:
    """Softcapped calls add the slot after the last key, times 0."""
    out, lse = solve(call)
    q, kv = lengths(call)
    size = call.k_cache.shape[1]
    if call.softcap:
        for b, start in enumerate(call.cu_seqlens_q[: call.live_seqs].tolist()):
            page, slot = divmod(int(kv[b]), size)
            if slot:
                value = call.v_cache[int(call.page_table[b, page]), slot, 0].float()
                out[start : start + int(q[b]), 0] += (value * 0.0).to(out.dtype)
    return out, lse


@fault("error-exceeds-bound", "lse-exceeds-bound")
def sink_of_head_0_for_all(call: Call) -> Solution:
    return solve(call if call.sinks is None else replace(call, sinks=call.sinks[:1].expand_as(call.sinks)))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def third_page_is_that_before(call: Call) -> Solution:
    table = call.page_table.clone()
    for b, kv in enumerate(lengths(call)[1].tolist()):
        if kv > 2 * call.k_cache.shape[1]:
            table[b, 2] = table[b, 1]
    return solve(replace(call, page_table=table))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def causal_from_the_top_left(call: Call) -> Solution:
    """Chunks of a prompt, where queries are fewer than keys, see as many keys as without what came before."""
    q, kv = lengths(call)
    chunk = (q > 1) & (q < kv)
    if not call.causal:
        return solve(call)
    shorter = call.seqused_k.clone()
    shorter[: call.live_seqs] = torch.where(chunk, q, kv).int()
    return where(call, chunk, solve(replace(call, seqused_k=shorter)))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def softcap_before_the_scale(call: Call) -> Solution:
    return solve(replace(call, softcap=call.softcap * call.softmax_scale))


@fault("error-exceeds-bound", "lse-exceeds-bound")
def heads_modulo_and_not_divided(call: Call) -> Solution:
    """Query head h reads kv head h % kv_heads."""
    heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
    order = torch.argsort(torch.arange(heads) % kv_heads, stable=True)
    out, lse = solve(replace(call, q=call.q[:, order], sinks=None if call.sinks is None else call.sinks[order]))
    back = torch.argsort(order)
    return out[:, back], lse[:, back]


@fault("not-finite", "empty-row")
def rows_without_keys_are_nan(call: Call) -> Solution:
    out, lse = solve(call)
    return torch.where((lse == -math.inf)[..., None], math.nan, out.float()).to(out.dtype), lse


def _crashing(call: Call, want_lse: bool) -> Any:
    if call.softcap and call.q.shape[0] > 2:
        os.abort()
    return answer(call, want_lse, *solve(call))


crashes_on_softcap = contract_kernel(RECORD)(_crashing)
