"""One kernel in a process of its own.

    process = KernelProcess("my_kernel.py:attention")
    description = process.describe()
    returned = process.call(call, timeout_s=60)

Nothing that the kernel does to its process reaches the parent: a crash, an endless loop, an exhausted memory or a forged
answer is a `Failure`, and the next call runs in a fresh process.  This is no sandbox: the kernel runs as the same user, with
the same files and the same network.
"""

from __future__ import annotations

import math
import mmap
import re
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from oracle.contract import Call, Record
from oracle.isolation.child import Child
from oracle.isolation.outcome import Description, Failure, FailureKind, Returned, one_line
from oracle.isolation.packing import Packing, pack
from oracle.isolation.record import RecordError, record_from_json
from oracle.isolation.sanitizer import TOOL, sanitizer
from oracle.isolation.shared import TensorSpec, dtype_name, rebuild

START_TIMEOUT_S = 600.0  # importing a kernel may build an extension


def patience_s(work: float, record: Record) -> float:
    """Seconds that one call may take: a hundred times what a slow honest kernel of its kind needs.

    `work` is query-key pairs x query heads x (head_dim + head_dim_v).
    """
    return 300.0 + work / 1e5 if record.interpreted else 60.0 + work / 1e7


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class KernelProcess:
    """A kernel that can be called without danger.  For use from one thread: the process ends with the thread that started it."""

    def __init__(
        self,
        target: str,
        *,
        device: str = "cpu",
        memory_limit_bytes: int = 8 << 30,
        threads: int = 2,
        environment: Mapping[str, str] | None = None,
        sanitize: bool = False,
        graph: bool = False,
    ) -> None:
        """Starts nothing yet.

        `target` is "module:function" or "file.py:function" (`locate` gives it).  `device` is "cpu" or "cuda".  On the CPU the
        kernel's module, the tensors of a call (sparse ones apart) and what the kernel allocates share `memory_limit_bytes` of
        address space.
        `threads` are torch's and OpenMP's; two, so that a race between threads can show.  `environment` is added to this
        process's own.  On "cuda", `sanitize` runs the process under compute-sanitizer, whose findings are failures, and `graph`
        answers from replays of CUDA graphs.
        """
        self.target = target
        self.restarts = 0  # processes started after the first
        self._device = device
        self._memory_limit_bytes = memory_limit_bytes
        self._threads = threads
        self._environment = dict(environment or {})
        self._sanitize, self._graph = sanitize, graph
        self._child: Child | None = None
        self._finalizer: weakref.finalize[[], KernelProcess] | None = None
        self._description: Description | None = None  # of the first process; every later one must agree
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """No process runs; the next call would start one."""
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None

    def describe(self) -> Description | Failure:
        """What the kernel's process found when it loaded the kernel; starts the process where none runs."""
        try:
            described = self._describe()
        except BaseException:
            self.close()
            raise
        if isinstance(described, Failure):
            self.close()
        return described

    def call(self, call: Call, timeout_s: float, want_lse: bool = False) -> Returned | Failure:
        """The result of one call with the keyword arguments that the kernel names, or why there is none after `timeout_s`.

        The start of a process does not count against `timeout_s`.  The tensors of `call` must be on the CPU; the kernel works
        on copies.  On the CPU the storage of each copy ends at a guard page: an access past it ends the kernel's process, and the
        failure says so.  Raises MemoryError where the machine lacks the memory for the copies.
        """
        described = self.describe()
        if isinstance(described, Failure):
            return described
        assert self._child is not None
        try:
            outcome = _call(self._child, described, call, timeout_s, want_lse)
        except BaseException:
            self.close()
            raise
        if isinstance(outcome, Failure):
            self.close()
        return outcome

    def _describe(self) -> Description | Failure:
        if self._child is not None and self._description is not None:
            return self._description
        if sys.platform != "linux":
            text = f"{self.target}: kernels run in a process with sealed shared memory, which {sys.platform} lacks; use Linux"
            return Failure(kind=FailureKind.UNAVAILABLE, text=text)
        tool = sanitizer() if self._sanitize else None
        if self._sanitize and tool is None:
            text = f"{self.target}: {TOOL} is not on the PATH; it comes with the CUDA toolkit"
            return Failure(kind=FailureKind.UNAVAILABLE, text=text)
        self.restarts = self._started
        self._started += 1
        self._child = child = Child(
            self.target,
            device=self._device,
            memory_limit_bytes=self._memory_limit_bytes,
            threads=self._threads,
            environment=self._environment,
            tool=tool,
            graph=self._graph,
        )
        self._finalizer = weakref.finalize(self, child.close)
        hello = child.hello(START_TIMEOUT_S)
        if isinstance(hello, Failure):
            return hello
        try:
            description = _description(self.target, hello)
        except RecordError as e:
            return child.failure(FailureKind.BAD_DECLARATION, str(e))
        except ValueError as e:
            return child.failure(FailureKind.TAMPERED, str(e))
        if self._description not in (None, description):
            return child.failure(FailureKind.TAMPERED, "its source or its record changed while it was judged; start again")
        self._description = description
        return description


def _description(target: str, message: dict[str, object]) -> Description:
    """Raises RecordError for a malformed record, ValueError for anything else that is malformed."""
    hello = message.get("hello")
    if not isinstance(hello, dict):
        raise ValueError(f"described itself as {hello!r:.80}, expected an object")
    sha256, version, doc = hello.get("source_sha256"), hello.get("version"), hello.get("doc")
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise ValueError(f"source_sha256: got {sha256!r:.80}, expected 64 hexadecimal digits")
    if not isinstance(doc, str) or not isinstance(version, str | None) or type(hello.get("has_var_keyword")) is not bool:
        raise ValueError("doc, version or has_var_keyword: got another type than str, str and bool")
    return Description(
        target=target,
        parameters=_names(hello, "parameters"),
        required=_names(hello, "required"),
        has_var_keyword=hello["has_var_keyword"],
        record=None if hello.get("record") is None else record_from_json(hello["record"]),
        source_sha256=sha256,
        doc=one_line(doc),
        version=None if version is None else one_line(version),
    )


def _names(hello: dict[str, object], field: str) -> tuple[str, ...]:
    names = hello.get(field)
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ValueError(f"{field}: got {names!r:.80}, expected a list of names")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class _Request:
    """A call as it lies in the arena."""

    packing: Packing
    results: dict[str, TensorSpec]  # "out" where the kernel is given none, "lse" where it is wanted
    nbytes: int
    message: dict[str, object]


def _request(kernel: Description, call: Call, want_lse: bool) -> _Request:
    keywords = {name: value for name, value in call.keywords().items() if kernel.takes(name)}
    positional = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache}
    packing = pack({name: value for name, value in (positional | keywords).items() if isinstance(value, Tensor)})
    wants_lse = want_lse and kernel.takes("return_lse")
    if kernel.takes("return_lse"):
        keywords["return_lse"] = want_lse
    results: dict[str, TensorSpec] = {}
    end = packing.end
    rows, heads = call.q.shape[:2]
    if "out" not in packing.specs:
        dtype = torch.bfloat16 if call.q.dtype in _FP8 else call.q.dtype
        results["out"] = _contiguous(end, dtype, (rows, heads, call.v_cache.shape[-1]))
        end += _whole_pages(results["out"].nbytes)
    if wants_lse:
        results["lse"] = _contiguous(end, torch.float32, (rows, heads))
        end += _whole_pages(results["lse"].nbytes)

    def encoded(name: str, value: object) -> object:
        return {"tensor": packing.specs[name].as_json()} if isinstance(value, Tensor) else value

    message: dict[str, object] = {
        "positional": [encoded(name, value) for name, value in positional.items()],
        "keywords": {name: encoded(name, value) for name, value in keywords.items()},
        "results": {name: spec.as_json() for name, spec in results.items()},
        "want_lse": wants_lse,
        "guards": packing.guards,
        "sparse": [(at, len(packing.storages[at])) for at in packing.sparse],
    }
    return _Request(packing, results, end, message)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _contiguous(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorSpec(at=at, nbytes=nbytes, dtype=dtype_name(dtype), shape=shape, strides=strides, offset=0)


def _call(child: Child, kernel: Description, call: Call, timeout_s: float, want_lse: bool) -> Returned | Failure:
    request = _request(kernel, call, want_lse)
    arena = child.arena
    packing = request.packing
    arena.reserve(request.nbytes, (*packing.backing, (packing.end, request.nbytes)))
    packing.write(arena)
    for spec in request.results.values():
        arena.blank(spec.at, spec.nbytes)  # a result that is not written must not be that of an earlier call
    reply = child.ask(request.message | {"arena_nbytes": arena.nbytes}, timeout_s, packing)
    if isinstance(reply, Failure):
        return reply
    # Private copies before anything is looked at: the kernel's threads may still be writing.
    own = {name: arena.copy(spec.at, spec.nbytes) for name, spec in request.results.items()}
    if given := packing.specs.get("out"):
        own["out"] = arena.copy(given.at, given.nbytes)
    changed = packing.changed(arena, "out")
    if packing.sparse:
        arena.release(min(packing.sparse))
    seconds = reply.get("seconds")
    if type(seconds) is not float or not (math.isfinite(seconds) and seconds >= 0):
        return child.failure(FailureKind.TAMPERED, f"its reply has seconds = {seconds!r:.80}, expected a time")
    return Returned(
        out=rebuild(own["out"], given or request.results["out"]),
        out_storage=own["out"] if given else None,
        lse=rebuild(own["lse"], request.results["lse"]) if "lse" in request.results else None,
        seconds=seconds,
        changed_inputs=changed,
    )
