"""The kernel's process: loads one kernel, then answers one call after the other until its parent is gone.

Run as `python -m oracle.isolation.worker CONFIG`, CONFIG a JSON object that `oracle.isolation.child` writes.  The kernel may do
what it likes in here: everything that this process says is checked by the parent, and nothing that it says is evidence.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import inspect
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from oracle.isolation.faults import note_mapping, tell_faults
from oracle.isolation.graphs import Graphed
from oracle.isolation.locate import KernelImportError, KernelNotFound, load
from oracle.isolation.outcome import FailureKind
from oracle.isolation.shared import Arena, TensorSpec, dtype_name, rebuild, spec_from_json
from oracle.isolation.sparse import Extents, touched

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_MAX_FILE = 1 << 30  # bytes: a kernel that prints without end must not fill the disk
_MAX_TEXT = 3000  # characters of one text in a reply; JSON takes up to six bytes for each, and a reply has 64 KiB
_POSITIONAL = ("q", "k_cache", "v_cache")

Message = dict[str, Any]


class Refusal(Exception):
    """A failure that this module finds; its text is one line."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def main() -> None:
    """Answers until the parent closes the pipe or dies."""
    config: Message = json.loads(sys.argv[1])
    arena_fd, request_fd, reply_fd = config["fds"]
    _die_with(config["parent"])
    _limit(config)
    try:
        kernel, module = load_kernel(config["target"], config["device"])
        hello = describe(kernel, module)
    except BaseException as e:
        _send(reply_fd, {"id": 0, "failure": failure_message(e)})
        return
    _send(reply_fd, {"id": 0, "hello": hello})
    if config["graph"]:
        kernel = Graphed(kernel)
    arena, notes = Arena(arena_fd), mmap.mmap(arena_fd, mmap.PAGESIZE)
    handler = tell_faults(notes)  # kept, for it is code that a signal jumps to
    room, sparse = resource.getrlimit(resource.RLIMIT_AS)[0], 0
    with os.fdopen(request_fd, "rb") as requests:
        for line in requests:
            if not line.strip():
                return
            request: Message = json.loads(line)
            try:
                if (wanted := sum(nbytes for _, nbytes in request["sparse"])) > sparse:
                    sparse = wanted
                    _make_room(room, 2 * sparse)  # for the arena, and for an older mapping of it that the kernel may have kept
                arena.nbytes = request["arena_nbytes"]
                if handler is not None:
                    note_mapping(notes, arena.address())
                if config["device"] == "cpu":
                    arena.guard(tuple(request["guards"]))
                reply: Message = {"seconds": _answer(kernel, arena, config["device"], request)}
            except BaseException as e:
                reply = {"failure": failure_message(e)}
            _send(reply_fd, {"id": request["id"]} | reply)


def _die_with(parent: int | None) -> None:
    """The kernel of the system ends this process with the thread that started it; None = whoever that is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _limit(config: Message) -> None:
    """Memory, file size and threads are bounded; where memory runs out all the same, the system takes this process first."""
    # Some containers mount /proc read-only; the limits below hold without it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_FSIZE, _MAX_FILE)
    # CUDA reserves address space for all memory of host and devices, far above any useful limit.
    if config["device"] == "cpu":
        with open("/proc/self/statm") as f:
            size = int(f.read().split()[0]) * resource.getpagesize()
        _make_room(size + config["memory_limit_bytes"], 0)
    torch.set_num_threads(config["threads"])
    os.environ.pop("PYTHONPATH", None)
    if config["python_path"] is not None:
        os.environ["PYTHONPATH"] = config["python_path"]


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    if hard == resource.RLIM_INFINITY or hard > value:
        resource.setrlimit(limit, (value, value))


def _make_room(nbytes: int, sparse: int) -> None:
    """This process may have `nbytes` of address space and `sparse` more of which it will touch little; all, where it had all."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if nbytes != resource.RLIM_INFINITY:
        soft = nbytes + sparse if hard == resource.RLIM_INFINITY else min(nbytes + sparse, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load_kernel(target: str, device: str) -> tuple[Callable[..., object], ModuleType]:
    """The kernel and its module, where this machine has the device.  Raises Refusal."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise Refusal(FailureKind.UNAVAILABLE, "device cuda: torch finds none on this machine")
        try:
            torch.zeros(1, device=device)
        except RuntimeError as e:
            raise Refusal(FailureKind.UNAVAILABLE, f"device cuda: cannot be used: {e}") from None
    try:
        return load(target)
    except KernelNotFound as e:
        raise Refusal(FailureKind.NOT_FOUND, str(e)) from None
    except KernelImportError as e:
        raise Refusal(FailureKind.IMPORT_ERROR, str(e)) from e.__cause__


def describe(kernel: Callable[..., object], module: ModuleType) -> Message:
    """The fields of a Description, but for the target.  Raises Refusal for a signature or a record that breaks the contract."""
    try:
        parameters = list(inspect.signature(kernel).parameters.values())
    except (TypeError, ValueError) as e:
        raise Refusal(FailureKind.BAD_DECLARATION, f"its signature cannot be read: {e}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(_POSITIONAL) and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise Refusal(
            FailureKind.BAD_DECLARATION,
            f"takes {len(positional)} positional arguments, expected {len(_POSITIONAL)}: {', '.join(_POSITIONAL)}",
        )
    named = [p for p in parameters if p not in positional[:3] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    doc, version = inspect.getdoc(kernel), getattr(module, "__version__", None)
    return {
        "parameters": [p.name for p in named],
        "required": [p.name for p in named if p.default is p.empty],
        "has_var_keyword": any(p.kind == p.VAR_KEYWORD for p in parameters),
        "record": _record(kernel),
        "source_sha256": _source_sha256(kernel, module),
        "doc": (doc or "").partition("\n")[0][:_MAX_TEXT],
        "version": None if version is None else str(version)[:_MAX_TEXT],
    }


def _record(kernel: Callable[..., object]) -> object:
    record = getattr(kernel, "record", None)
    if is_dataclass(record) and not isinstance(record, type):
        record = asdict(record)
    if record is not None and not isinstance(record, Mapping):
        raise Refusal(FailureKind.BAD_DECLARATION, f"its record is of type {type(record).__name__}, expected a Record or a dict")
    # What JSON does not know becomes a text that no field of a record accepts.
    return None if record is None else json.loads(json.dumps({str(k): v for k, v in record.items()}, default=repr))


def _source_sha256(kernel: Callable[..., object], module: ModuleType) -> str | None:
    try:
        path = inspect.getsourcefile(inspect.unwrap(kernel))
    except TypeError:  # an instance, a partial or compiled code
        path = getattr(module, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _answer(kernel: Callable[..., object], arena: Arena, device: str, request: Message) -> float:
    """The kernel has been called once, its results and all that it wrote are in the arena.  Seconds that the call took."""
    shared: dict[tuple[int, int], Tensor] = {}
    storages: dict[tuple[int, int], Tensor] = {}
    parts: dict[tuple[int, int], Extents] = {(at, nbytes): _parts(arena, at, nbytes) for at, nbytes in request["sparse"]}

    def argument(value: Any) -> object:
        if not isinstance(value, dict):
            return tuple(value) if isinstance(value, list) else value
        spec = spec_from_json(value["tensor"])
        key = spec.at, spec.nbytes
        if key not in shared:
            shared[key] = arena.span(*key)
            storages[key] = shared[key]
            if device != "cpu":
                storages[key] = torch.zeros(spec.nbytes, dtype=torch.uint8, device=device)
                _copy(storages[key], shared[key], parts.get(key))
        return rebuild(storages[key], spec)

    positional = [argument(value) for value in request["positional"]]
    keywords = {name: argument(value) for name, value in request["keywords"].items()}
    _synchronize(device)
    start = time.perf_counter()
    result = kernel(*positional, **keywords)
    _synchronize(device)
    seconds = time.perf_counter() - start
    for name, tensor in results(result, request).items():
        spec = spec_from_json(request["results"][name])
        check_result(name, tensor, spec, device)
        rebuild(arena.span(spec.at, spec.nbytes), spec).copy_(tensor.detach())
    for key, storage in storages.items():
        if storage is not shared[key]:
            _copy(shared[key], storage, parts.get(key))
    return seconds


def _parts(arena: Arena, at: int, nbytes: int) -> Extents:
    """What the parent has put into a sparse storage, in bytes of that storage."""
    found = touched(arena.fd, at, at + nbytes)
    return tuple((start - at, stop - at) for start, stop in found)


def _copy(to: Tensor, of: Tensor, parts: Extents | None) -> None:
    """`to` holds what `of` holds, both (nbytes,) uint8: all of it, or the given parts."""
    for start, stop in parts if parts is not None else ((0, of.numel()),):
        to[start:stop].copy_(of[start:stop])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def results(result: object, request: Message) -> dict[str, Any]:
    """What is to be sent back, by name; `out` is absent where the kernel was given one."""
    if not request["want_lse"]:
        return {"out": result} if "out" in request["results"] else {}
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise Refusal(FailureKind.WRONG_RESULT, f"return_lse=True returned {_kind(result)}, expected (out, lse)")
    return {name: value for name, value in zip(("out", "lse"), result, strict=True) if name in request["results"]}


def check_result(name: str, value: object, spec: TensorSpec, device: str) -> None:
    """Raises Refusal where `value` is not what `spec` says, on `device`."""
    expected = f"a {spec.dtype} tensor of shape {tuple(spec.shape)} on {device}"
    if not isinstance(value, Tensor):
        raise Refusal(FailureKind.WRONG_RESULT, f"{name}: returned {_kind(value)}, expected {expected}")
    got = f"a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)} on {value.device.type}"
    if got != expected:
        raise Refusal(FailureKind.WRONG_RESULT, f"{name}: returned {got}, expected {expected}")


def _kind(value: object) -> str:
    items = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a value of type {type(value).__name__}{items}"


def failure_message(error: BaseException) -> Message:
    """The kind, text and traceback of a Failure, none longer than a reply may carry."""
    if isinstance(error, Refusal):
        cause = error.__cause__
        return {"kind": error.kind, "text": str(error)[:_MAX_TEXT], "traceback": _traceback(cause) if cause else ""}
    # The tensors of the frames go first: there may be no memory left to write the text in.
    traceback.clear_frames(error.__traceback__)
    text = "".join(traceback.format_exception_only(error)).strip()
    kind = FailureKind.OUT_OF_MEMORY if _is_out_of_memory(error, text) else FailureKind.EXCEPTION
    return {"kind": kind, "text": f"raised {text}"[:_MAX_TEXT], "traceback": _traceback(error)}


def _traceback(error: BaseException) -> str:
    """From the first frame that is the kernel's."""
    frame, own = error.__traceback__, (os.path.dirname(__file__), "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(own):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))[-_MAX_TEXT:]


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's CPU allocator and C++ raise RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(s in text for s in ("can't allocate memory", "std::bad_alloc"))
    )


def _send(fd: int, message: Message) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as e:
        # The kernel closed the pipe, or the parent is gone: nobody is left to tell.
        try:
            print(f"no reply: {e}", file=sys.stderr)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
