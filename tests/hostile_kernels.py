"""Kernels that misbehave, each in one way.  Loaded by path, in a process of their own."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor, Tensor]


def honest(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, softmax_scale: float, out: Tensor | None = None) -> Tensor:
    """Twice q, whatever the scale.

    No attention, but enough to see whether tensors arrive and come back.
    """
    result = q * 2
    return result if out is None else out.copy_(result)


def with_lse(q: Tensor, *caches: Tensor, return_lse: bool) -> Result:
    return (q * 2, q.sum(dim=-1, dtype=torch.float32)) if return_lse else q * 2


def by_name(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, kernel: Tensor, **given: object) -> object:
    """The kernel of this file whose name `kernel` holds, (n,) uint8: many kernels for the start of one process."""
    function = globals()[bytes(kernel.tolist()).decode()]
    named = inspect.signature(function).parameters.keys() & given.keys()
    return function(q, k_cache, v_cache, **{name: given[name] for name in named})


# Ends of the process


def segfault(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError


def abort(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    os.abort()


def exit_0(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    os._exit(0)


def notes_its_pid(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    _note_pid(os.getpid())
    return q * 2


# Time


def endless_in_c(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    """Waits for ever with the GIL held and SIGTERM ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _note_pid(os.getpid())
    ctypes.PyDLL(None).pause()
    raise AssertionError


def interrupts_the_parent(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    """And leaves a process of its own behind."""
    _note_pid(subprocess.Popen(["sleep", "1000"]).pid)
    os.kill(os.getppid(), signal.SIGINT)
    ctypes.PyDLL(None).pause()
    raise AssertionError


def _note_pid(pid: int) -> None:
    if "PID_FILE" in os.environ:
        path = Path(os.environ["PID_FILE"])
        path.with_suffix(".new").write_text(str(pid))
        path.with_suffix(".new").rename(path)


# Memory


def memory_bomb(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    objects, tensors = [], []
    try:
        while True:
            objects.append(bytes(1 << 28))
    except MemoryError:
        objects.clear()
    while True:
        tensors.append(torch.empty(1 << 28, dtype=torch.uint8))


# Results


def returns_none(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    return None


def moves_to_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return q.cpu()


def widens(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return q.bfloat16()


# The channel and the shared memory


def _fds() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def floods_the_channel(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    for fd, name in _fds().items():
        if fd > 2 and name.startswith("pipe:"):
            try:
                os.write(fd, b"x" * 10**6)
            except OSError:  # the other pipe's reading end
                continue
    return q * 2


def forges_a_reply(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    for fd, name in _fds().items():
        if fd > 2 and name.startswith("pipe:"):
            try:
                os.write(fd, json.dumps({"id": 77, "seconds": 0.0}).encode() + b"\n")
            except OSError:
                continue
    return q * 2


def closes_its_fds(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    os.closerange(0, 256)
    return q * 2


def closes_its_fds_and_waits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    os.closerange(0, 256)
    ctypes.PyDLL(None).pause()
    raise AssertionError


def _arena_fd() -> int:
    return next(fd for fd, name in _fds().items() if "oracle-arena" in name)


def shrinks_the_arena(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    try:
        os.ftruncate(_arena_fd(), 0)
    except PermissionError:
        return q * 2
    return q * 0


def grows_the_arena(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    os.ftruncate(_arena_fd(), 1 << 29)
    return q * 2


def says_nothing_true(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Patches what a judge in this process would compare with."""

    def yes(*args: object, **kwargs: object) -> Any:
        return True

    torch.equal = torch.allclose = torch.testing.assert_close = yes
    torch.Tensor.__eq__ = torch.Tensor.__ne__ = yes  # type: ignore[method-assign]
    return torch.zeros_like(q)


def unclocked(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    time.perf_counter = lambda: -1e9
    return q * 2


def chatters(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    for i in range(5000):
        print(f"{i} " + "chatter " * 100)
    return q * 2


# Inputs


def writes_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, page_table: Tensor) -> Tensor:
    result = q * 2
    q[0, 0, 0] += 1
    v_cache[-1, -1, -1, -1] += 1
    return result


def writes_a_gap(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor) -> None:
    """Writes the last byte of the storages of k_cache and of out, whatever tensors have there."""
    for tensor in (k_cache, out):
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole[-1] ^= 1


_late: list[tuple[threading.Event, threading.Thread]] = []


def writes_late(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor) -> None:
    """The first call leaves a thread behind that writes into its tensors during the second call."""
    out.copy_(q * 2)
    if _late:
        event, thread = _late.pop()
        event.set()
        thread.join()
    elif q[0, 0, 0] > 0:
        event = threading.Event()

        def spoil() -> None:
            event.wait()
            out.fill_(-5)
            q.fill_(-5)

        thread = threading.Thread(target=spoil, daemon=True)
        thread.start()
        _late.append((event, thread))


# What arrives


def transcript(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, first: Tensor, second: Tensor, out: Tensor) -> None:
    """Writes into `out` (n,) uint8 what the extras `first` and `second` look like, as text, and every byte of theirs."""
    shared = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    text = f"{facts(first)} {facts(second)} {shared} {first.untyped_storage().data_ptr() % 16}\n".encode()
    data = torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), element_bytes(first), element_bytes(second)])
    out[: data.numel()] = data


def facts(tensor: Tensor) -> str:
    storage = tensor.untyped_storage().nbytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {storage}"


def element_bytes(tensor: Tensor) -> Tensor:
    """(numel * itemsize,) uint8."""
    size = tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = (*(s * size for s in tensor.stride()), 1)
    return whole.as_strided((*tensor.shape, size), strides, int(tensor.storage_offset()) * size).reshape(-1)


def sees(q: Tensor, k_cache: Tensor, v_cache: Tensor, **kwargs: object) -> Tensor:
    """Prints its keyword arguments, its environment and its threads, one a line; then fails."""
    for name, value in sorted(kwargs.items()):
        print(name, tuple(value.shape) if isinstance(value, Tensor) else value)
    print("ORACLE_TEST", os.environ.get("ORACLE_TEST"))
    print("threads", torch.get_num_threads())
    print("stdin", repr(sys.stdin.read()))
    raise ArithmeticError("two lines\nand \x1b[31mred\x1b[0m")


sees.record = {"dtypes": ["bf16"], "head_dims": (8,), "precision": {"u_acc": 2**-13}}  # type: ignore[attr-defined]


# Declarations


def misdeclared(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return q * 2


misdeclared.record = {"page_sizes": {16}}  # type: ignore[attr-defined]


def two_arguments(q: Tensor, kv_cache: Tensor, *, page_table: Tensor) -> Tensor:
    return q * 2
