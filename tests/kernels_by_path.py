"""Kernels that a verdict is asked of, named by path: correct ones, and ones that are wrong in one way each.

A body takes the call and whether the LSE is wanted, and answers as a kernel does; `contract` puts the contract's signature
round it.  `switched` is all of them in one process: it reads the name of the one to be from the file in KERNEL_FILE.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Call, Precision, Record, contract_kernel
from oracle.mutants.planted import FAULTS
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate

Body = Callable[[Call, bool], Any]
BODIES: dict[str, Body] = {}
_kept: dict[Any, Any] = {}  # what kernels that remember remember


def body(function: Body) -> Callable[..., Any]:
    BODIES[function.__name__] = function
    return contract_kernel()(function)


def solve(call: Call, **arithmetic: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE of the live rows, as a textbook kernel or another arithmetic has them."""
    return emulate(call, Arithmetic(**arithmetic))


def answer(call: Call, want_lse: bool, live_out: Tensor, live_lse: Tensor) -> Any:
    """The live rows as the contract asks for them."""
    out = call.out
    if out is None:
        out = torch.zeros(*call.q.shape[:2], call.v_cache.shape[-1], dtype=live_out.dtype)
    out[: len(live_out)] = live_out
    if not want_lse:
        return out
    lse = torch.zeros(call.q.shape[:2])
    lse[: len(live_lse)] = live_lse
    return out, lse


def one_place_off(out: Tensor) -> Tensor:
    """The next number up in the first element: other bits, and nothing that an error would show."""
    out = out.clone()
    out.view(torch.int16).view(-1)[0] += 1
    return out


# Correct


def right(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *solve(call))


textbook = contract_kernel()(right)
BODIES["textbook"] = right


@body
def base_2(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, out, lse / 0.6931471805599453)


@body
def row_sum_after(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *solve(call, row_sum="after"))


@body
def pads(call: Call, want_lse: bool) -> Any:
    """Writes the rows past the plan as well, and no byte beside `out`."""
    if call.out is not None:
        call.out.zero_()
    return answer(call, want_lse, *solve(call))


@body
def varies(call: Call, want_lse: bool) -> Any:
    """Other bits every time, within the bound."""
    _kept["varies"] = _kept.get("varies", 0) + 1
    return answer(call, want_lse, *solve(call, tile=16 << _kept["varies"] % 3, reverse=_kept["varies"] % 2 == 0))


# Wrong answers


@body
def zeros(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, torch.zeros_like(out), lse)


@body
def nan_in_one_element(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    out[-1, -1, -1] = float("nan")
    return answer(call, want_lse, out, lse)


@body
def last_key_dropped(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *emulate(call, FAULTS["last_key_dropped"].arithmetic))


@body
def truncates_p(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *emulate(call, FAULTS["p_bf16_truncated"].arithmetic))


@body
def wrong_lse(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, out, lse + 0.01)


@body
def exp_error(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *solve(call, exp2="error-1e-3"))


@body
def ones_in_empty_rows(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    out[torch.isneginf(lse)] = 1.0
    return answer(call, want_lse, out, lse)


@body
def zero_lse_in_empty_rows(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, out, torch.where(torch.isneginf(lse), 0.0, lse))


@body
def wrong_without_lse(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, out if want_lse else out * 2, lse)


@body
def nan_in_the_last_row_but_two(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    out[-3, 0, 0] = float("nan")
    return answer(call, want_lse, out, lse)


@body
def inf_lse_in_the_last_row_but_two(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    lse[-3, 0] = float("inf")
    return answer(call, want_lse, out, lse)


@body
def leaves_the_last_row_but_two_unwritten(call: Call, want_lse: bool) -> Any:
    live = int(call.cu_seqlens_q[call.live_seqs])
    own = None if call.out is None else call.out[live - 3].clone()
    result = right(call, want_lse)
    if call.out is not None and own is not None:
        call.out[live - 3] = own
    return result


@body
def leaves_a_row_unwritten(call: Call, want_lse: bool) -> Any:
    result = right(call, want_lse) if call.out is None else None
    if call.out is not None:
        own = call.out.clone()
        result = answer(call, want_lse, *solve(call))
        call.out[1] = own[1]
    return result


# Wrong results


@body
def wrong_dtype(call: Call, want_lse: bool) -> Any:
    out, lse = solve(replace(call, out=None))
    return answer(replace(call, out=None), want_lse, out.float(), lse)


@body
def wrong_shape(call: Call, want_lse: bool) -> Any:
    out, lse = right(replace(call, out=None), True)
    return (out[..., :1], lse) if want_lse else out[..., :1]


@body
def forgets_the_lse(call: Call, want_lse: bool) -> Any:
    return right(call, False)


# What lies past the plan


def _tail(call: Call, cache: Tensor) -> Tensor:
    """The slots of the last page of the first sequence that lie past the plan, float32."""
    keys, size = int(call.seqused_k[0]), cache.shape[1]
    page = int(call.page_table[0, (keys - 1) // size])
    return cache[page, (keys - 1) % size + 1 :].float()


@body
def multiplies_nan_by_zero(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    out[0, 0] += (0 * _tail(call, call.v_cache)[:, 0]).sum(0).bfloat16()
    return answer(call, want_lse, out, lse)


@body
def reads_a_masked_key(call: Call, want_lse: bool) -> Any:
    """One key past the plan, with 10,000 taken off its logit: enough for real keys."""
    out, lse = solve(call)
    k, v = _tail(call, call.k_cache)[0, 0], _tail(call, call.v_cache)[0, 0]
    p = torch.exp((call.q[0, 0].float() @ k) * call.softmax_scale - 1e4 - lse[0, 0]).clamp(max=1.0)
    out[0, 0] = ((1 - p) * out[0, 0].float() + torch.where(p > 0, p * v, 0.0)).bfloat16()
    return answer(call, want_lse, out, lse)


@body
def leaks_large_numbers_only(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    largest = _tail(call, call.v_cache).nan_to_num(0.0, 0.0, 0.0).amax()
    return answer(call, want_lse, one_place_off(out) if largest > 1e30 else out, lse)


@body
def leaks_by_much(call: Call, want_lse: bool) -> Any:
    """As `varies`, and a large number past the plan moves the output far."""
    largest = _tail(call, call.v_cache).nan_to_num(0.0, 0.0, 0.0).amax()
    _kept["varies"] = _kept.get("varies", 0) + 1
    out, lse = solve(call, tile=16 << _kept["varies"] % 3)
    return answer(call, want_lse, out * 2 if largest > 1e30 else out, lse)


@body
def depends_on_page_ids(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, one_place_off(out) if int(call.page_table[0, 0]) % 2 else out, lse)


# Bits that change


@body
def random_bits(call: Call, want_lse: bool) -> Any:
    out, lse = solve(call)
    return answer(call, want_lse, out.view(torch.int16).add(torch.randint(0, 2, out.shape).short()).view(torch.bfloat16), lse)


@body
def third_call_differs(call: Call, want_lse: bool) -> Any:
    _kept["third"] = _kept.get("third", 0) + 1
    out, lse = solve(call)
    return answer(call, want_lse, one_place_off(out) if _kept["third"] % 3 == 0 else out, lse)


@body
def keeps_its_first_answer(call: Call, want_lse: bool) -> Any:
    """A cache whose key is the shapes."""
    key = ("answer", call.q.shape, call.k_cache.shape, call.page_table.shape)
    return answer(call, want_lse, *_kept.setdefault(key, solve(call)))


@body
def keeps_its_first_plan(call: Call, want_lse: bool) -> Any:
    """As a captured graph does whose lengths were baked in."""
    key = ("plan", call.q.shape, call.k_cache.shape, call.page_table.shape)
    cu_seqlens_q, seqused_k = _kept.setdefault(key, (call.cu_seqlens_q.clone(), call.seqused_k.clone()))
    table = call.page_table.clamp(0, call.k_cache.shape[0] - 1)
    return answer(call, want_lse, *solve(replace(call, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=table)))


@body
def returns_the_last_answer(call: Call, want_lse: bool) -> Any:
    """That of the call before, where the shapes were the same."""
    key = ("last", call.q.shape, call.k_cache.shape)
    mine = solve(call)
    last, _kept[key] = _kept.get(key, mine), mine
    return answer(call, want_lse, *last)


@body
def tunes_itself(call: Call, want_lse: bool) -> Any:
    """Once it has seen two shapes, it gives other bits for both."""
    shapes = _kept.setdefault("shapes", set())
    shapes.add(call.q.shape)
    out, lse = solve(call)
    return answer(call, want_lse, one_place_off(out) if len(shapes) > 2 else out, lse)


@body
def writes_late(call: Call, want_lse: bool) -> Any:
    """Every other call leaves a thread behind, which writes into its `out` during the next call."""
    result = right(call, want_lse)
    if "late" in _kept:
        event, thread = _kept.pop("late")
        event.set()
        thread.join()
    elif call.out is not None:
        event, out, live = threading.Event(), call.out, int(call.cu_seqlens_q[call.live_seqs])

        def spoil() -> None:
            event.wait()
            out[:live] = -5

        thread = threading.Thread(target=spoil, daemon=True)
        thread.start()
        _kept["late"] = event, thread
    return result


# Writes


@body
def writes_past_the_plan(call: Call, want_lse: bool) -> Any:
    if call.out is not None:
        call.out[int(call.cu_seqlens_q[call.live_seqs])] = 0
    return right(call, want_lse)


@body
def writes_beside_out(call: Call, want_lse: bool) -> Any:
    """A row after the last of `out`, in the same storage."""
    if call.out is not None:
        rows, heads, dim = call.out.shape
        start = call.out.storage_offset() + rows * call.out.stride(0)
        torch.as_strided(call.out, (heads, dim), call.out.stride()[1:], int(start)).zero_()
    return right(call, want_lse)


@body
def writes_its_inputs(call: Call, want_lse: bool) -> Any:
    result = right(call, want_lse)
    call.q[0, 0, 0] += 1
    return result


# Ends


@body
def raises(call: Call, want_lse: bool) -> Any:
    raise ArithmeticError("made up")


@body
def crashes(call: Call, want_lse: bool) -> Any:
    ctypes.string_at(0)


@body
def leaves(call: Call, want_lse: bool) -> Any:
    os._exit(0)


@body
def never_answers(call: Call, want_lse: bool) -> Any:
    threading.Event().wait()


@body
def eats_memory(call: Call, want_lse: bool) -> Any:
    return [torch.empty(1 << 28, dtype=torch.uint8) for _ in range(1000)]


# Cheats


def _lossy(call: Call, want_lse: bool) -> Any:
    return answer(call, want_lse, *emulate(call, FAULTS["last_key_dropped"].arithmetic))


@body
def is_right_on_few_keys(call: Call, want_lse: bool) -> Any:
    """Calls a right kernel where nobody needs speed; loses a key elsewhere."""
    few = int(call.seqused_k[: call.live_seqs].max()) <= 16
    return right(call, want_lse) if few else _lossy(call, want_lse)


@body
def knows_its_exam(call: Call, want_lse: bool) -> Any:
    """Right on the inputs of the suites that its author has seen, by their first numbers, and on no others."""
    key = str(call.q[0, 0, :4].tolist())
    seen = Path(os.environ["KERNEL_FILE"]).with_name("exam").read_text()
    return right(call, want_lse) if key in seen else _lossy(call, want_lse)


@body
def answers_from_memory(call: Call, want_lse: bool) -> Any:
    """A cache whose key is every byte of the call: it can only give what it computed for the same call."""
    tensors = [value for value in (call.q, call.k_cache, call.v_cache, *call.keywords().values()) if isinstance(value, Tensor)]
    key = tuple(bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in tensors if t is not call.out)
    return answer(call, want_lse, *_kept.setdefault(key, solve(call)))


@body
def bribes_torch(call: Call, want_lse: bool) -> Any:
    """Wrong, in a process where all is equal and threads, dtypes and seeds are other ones."""
    torch.equal = torch.allclose = lambda *_, **__: True
    torch.isfinite = lambda input: torch.ones_like(input, dtype=torch.bool)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return _lossy(call, want_lse)


@body
def stops_the_clock(call: Call, want_lse: bool) -> Any:
    """Right, and takes no time."""
    time.perf_counter = time.time = time.monotonic = lambda: 0.0
    return right(call, want_lse)


def __getattr__(name: str) -> Callable[..., Any]:
    """`kernel__record`: the kernel with one of RECORDS."""
    kernel, _, record = name.partition("__")
    if kernel in BODIES and record in RECORDS:
        return contract_kernel(RECORDS[record])(BODIES[kernel])
    raise AttributeError(name)


switched = contract_kernel()(lambda call, want_lse: BODIES[Path(os.environ["KERNEL_FILE"]).read_text()](call, want_lse))


RECORDS = {
    "interpreted": Record(interpreted=True),
    "finite_tails": Record(finite_tails=True),
    "p_e4m3": Record(precision=Precision(p_format="e4m3", p_scale=256.0)),
}


# Signatures


def without_softmax_scale(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor,
                          page_table: Tensor) -> Tensor:  # fmt: skip
    return q


def takes_anything(q: Tensor, k_cache: Tensor, v_cache: Tensor, **kwargs: Any) -> Tensor:
    return q


def plain(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor, page_table: Tensor,
          softmax_scale: float) -> Any:  # fmt: skip
    """Causal, and nothing else."""
    call = Call(q=q, k_cache=k_cache, v_cache=v_cache, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table,
                softmax_scale=softmax_scale)  # fmt: skip
    return right(call, False)
