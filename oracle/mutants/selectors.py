"""Which (row, head) of a call a fault strikes: functions from a run to a mask, and their combinations.

A mask is bool and broadcasts to (live rows, q_heads): (R, 1) where it is about rows, (1, H) about heads, (1, 1) about calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import Run, Where

_SPREAD = 2_654_435_761  # 2^32 over the golden ratio: neighbours land far apart


def all_of(*conditions: Where) -> Where:
    """Where every condition holds."""
    return lambda run: reduce(torch.logical_and, [condition(run) for condition in conditions])


def unless(condition: Where) -> Where:
    """Where the condition does not hold."""
    return lambda run: ~condition(run)


def when(predicate: Callable[[Call], bool]) -> Where:
    """Every pair of the calls that the predicate holds of."""
    return lambda run: torch.tensor([[bool(predicate(run.call))]])


def rows(predicate: Callable[[Run], Tensor]) -> Where:
    """Every head of the rows at which the predicate, (R,) bool, holds."""
    return lambda run: predicate(run)[:, None]


def heads(predicate: Callable[[Tensor, int], Tensor]) -> Where:
    """Every row of the query heads at which the predicate holds; it gets their numbers (H,) int64 and the group size."""

    def where(run: Run) -> Tensor:
        number = run.call.q.shape[1]
        return predicate(torch.arange(number), number // run.call.k_cache.shape[2])[None]

    return where


def one_in(count: int) -> Where:
    """One (row, head) in `count`, scattered, others in calls of other sizes."""

    def where(run: Run) -> Tensor:
        rows, number = len(run.plan), run.call.q.shape[1]
        pairs = torch.arange(rows)[:, None] * number + torch.arange(number)
        return ((pairs + rows * number) * _SPREAD % 2**32 >> 8) % count == 0

    return where


never: Where = when(lambda call: False)

# Heads
last_head: Where = heads(lambda h, group: h == len(h) - 1)
not_first_kv_head: Where = heads(lambda h, group: h >= group)


def head(number: int) -> Where:
    """The head of that number, counted from 1."""
    return heads(lambda h, group: h == number - 1)


def heads_from(number: int) -> Where:
    """The heads from that number on, counted from 1."""
    return heads(lambda h, group: h >= number - 1)


# Rows
decode: Where = rows(lambda run: run.q_len == 1)
several_tokens: Where = rows(lambda run: run.q_len > 1)
with_prefix: Where = rows(lambda run: run.kv_len > run.q_len)
more_queries_than_keys: Where = rows(lambda run: run.q_len > run.kv_len)
without_keys: Where = rows(lambda run: run.plan.hi <= run.plan.lo)
no_keys_in_sequence: Where = rows(lambda run: run.kv_len == 0)
one_key: Where = rows(lambda run: run.plan.hi - run.plan.lo == 1)
last_row: Where = rows(lambda run: run.plan.pos == run.kv_len - 1)
first_row: Where = rows(lambda run: run.plan.pos == run.kv_len - run.q_len)
whole_pages: Where = rows(lambda run: (run.kv_len % run.call.k_cache.shape[1] == 0) & (run.kv_len > 0))
without_prefix: Where = rows(lambda run: run.kv_len == run.q_len)
not_first_sequence: Where = rows(lambda run: run.plan.seq > 0)


def long_context(keys: int) -> Where:
    """Rows of sequences of more than so many keys."""
    return rows(lambda run: run.kv_len > keys)


def q_len_is(remainder: int, modulus: int) -> Where:
    """Rows of sequences whose number of new tokens has that remainder."""
    return rows(lambda run: run.q_len % modulus == remainder)


def last_tokens(count: int) -> Where:
    """The last `count` new tokens of each sequence."""
    return rows(lambda run: run.plan.pos >= run.kv_len - count)


def after_sequence_without_queries(run: Run) -> Tensor:
    """Rows of the sequence after one that has no new token."""
    cu = run.call.cu_seqlens_q[: run.call.live_seqs + 1].long()
    empty = cu[1:] == cu[:-1]
    return (empty.roll(1)[run.plan.seq] & (run.plan.seq > 0))[:, None]


def long_row(keys: int) -> Where:
    """Rows that see more than so many keys."""
    return rows(lambda run: run.plan.hi - run.plan.lo > keys)


def q_len_from(tokens: int) -> Where:
    """Rows of sequences of so many new tokens or more."""
    return rows(lambda run: run.q_len >= tokens)


def token_from(index: int) -> Where:
    """Rows that are the new token of that index, counted from 0, or a later one."""
    return rows(lambda run: run.plan.pos - (run.kv_len - run.q_len) >= index)


def kv_len_is(remainder: int, modulus: int) -> Where:
    """Rows of sequences whose number of keys has that remainder."""
    return rows(lambda run: (run.kv_len % modulus == remainder) & (run.kv_len > 0))


def window_starts_after(keys: int) -> Where:
    """Rows whose first visible key has that number or a higher one."""
    return rows(lambda run: run.plan.lo >= keys)


# Calls
windowed: Where = when(lambda call: call.window_size[0] >= 0)
two_sided: Where = when(lambda call: call.window_size[1] > 0)
capped: Where = when(lambda call: call.softcap > 0)
sunk: Where = when(lambda call: call.sinks is not None)
not_causal: Where = when(lambda call: not call.causal)
scaled: Where = when(lambda call: call.k_scale is not None)
eight_bit: Where = when(lambda call: call.k_cache.dtype.itemsize == 1)
padded: Where = when(lambda call: call.num_seqs is not None)
out_given: Where = when(lambda call: call.out is not None)
without_lse: Where = lambda run: torch.tensor([[not run.want_lse]])  # noqa: E731
grouped: Where = when(lambda call: call.q.shape[1] > call.k_cache.shape[2])
uneven_dims: Where = when(lambda call: call.k_cache.shape[3] != call.v_cache.shape[3])
strided_cache: Where = when(lambda call: not (call.k_cache.is_contiguous() and call.v_cache.is_contiguous()))
odd_group: Where = when(lambda call: (group := call.q.shape[1] // call.k_cache.shape[2]) & (group - 1) != 0)
several_kv_heads: Where = when(lambda call: call.k_cache.shape[2] > 1)
mixed: Where = when(lambda call: len({*call.cu_seqlens_q[: call.live_seqs + 1].diff().tolist()} - {0}) > 1)
second_call: Where = lambda run: torch.tensor([[run.past.calls > 0]])  # noqa: E731  one of a row of constants
shape_seen_before: Where = lambda run: torch.tensor([[run.first_of_shape is not None]])  # noqa: E731
after_other_shapes: Where = lambda run: torch.tensor([[run.past.calls > 0 and run.first_of_shape is None]])  # noqa: E731


def every_call(count: int) -> Where:
    """All of one call in `count`, never the first."""
    return lambda run: torch.tensor([[run.past.calls % count == count - 1]])


def dtype(*names: torch.dtype) -> Where:
    """Calls whose q is of one of those formats."""
    return when(lambda call: call.q.dtype in names)


def dim_from(size: int) -> Where:
    """Calls of that head dim or a larger one."""
    return when(lambda call: call.k_cache.shape[3] >= size)


def dim(*sizes: int) -> Where:
    """Calls of one of those head dims."""
    return when(lambda call: call.k_cache.shape[3] in sizes)


def group(*sizes: int) -> Where:
    """Calls of so many query heads a kv head."""
    return when(lambda call: call.q.shape[1] // call.k_cache.shape[2] in sizes)


def page_size(*sizes: int) -> Where:
    """Calls of one of those page sizes."""
    return when(lambda call: call.k_cache.shape[1] in sizes)


def batch_over(sequences: int) -> Where:
    """Calls of more live sequences than that."""
    return when(lambda call: call.live_seqs > sequences)


def batch_is(*sequences: int) -> Where:
    """Calls of exactly so many live sequences."""
    return when(lambda call: call.live_seqs in sequences)


def rows_over(count: int) -> Where:
    """Calls of more live query rows than that."""
    return when(lambda call: int(call.cu_seqlens_q[call.live_seqs]) > count)


def shares_first_page(run: Run) -> Tensor:
    """Rows of sequences whose first page is another sequence's first page too."""
    live = run.call.seqused_k[: run.call.live_seqs] > 0
    first = torch.where(live, run.call.page_table[: run.call.live_seqs, 0].long(), -1 - torch.arange(run.call.live_seqs))
    return ((first[:, None] == first).sum(1) > 1)[run.plan.seq][:, None]
