"""A kernel's process, as the parent holds it: how it starts, how it is asked, how it ends.

One process, one arena, one pipe for requests and one for replies, both of JSON lines.  Nothing that the process writes is
trusted: replies are bounded in size and checked field by field, and no object is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from oracle.isolation.faults import read_fault
from oracle.isolation.outcome import Failure, FailureKind, one_line, tail
from oracle.isolation.packing import Packing
from oracle.isolation.sanitizer import ENVIRONMENT as SANITIZED
from oracle.isolation.sanitizer import TOOL, faults, sanitized
from oracle.isolation.shared import Arena

_MAX_REPLY = 1 << 16  # bytes; a description with its record takes a few thousand
_POLL_MS = 50  # how soon an end is seen while a grandchild holds the pipes open; a reply itself is seen at once
_GRACE_S = 5.0  # for a process that closed its end of the pipe to end
_LAST_WORDS_S = 20.0  # for compute-sanitizer to print what it found
_LOG_LINES = 30


class Child:
    """A running process that has loaded, or is loading, one kernel.  After a Failure it is good for nothing but `close`."""

    def __init__(
        self,
        target: str,
        *,
        device: str,
        memory_limit_bytes: int,
        threads: int,
        environment: Mapping[str, str],
        tool: str | None = None,
        graph: bool = False,
    ) -> None:
        """Started, in a session of its own, and not yet waited for; under the compute-sanitizer at `tool`, where given."""
        self._target = target
        self._sanitized = tool is not None
        self._asked = 0  # requests sent; the process counts along
        self._packing: Packing | None = None  # of the latest request
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as its:
            self.arena = Arena.create()
            mine.callback(self.arena.close)
            request_fd, self._request_fd = _pipe(reader=its, writer=mine)
            self._reply_fd, reply_fd = _pipe(reader=mine, writer=its)
            os.set_blocking(self._request_fd, False)
            self._log = mine.enter_context(tempfile.TemporaryFile())
            _append(self._log.fileno())
            # The child finds the modules that are found here; what it starts gets the PYTHONPATH that was meant.
            here = {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": str(threads)}
            fds = [self.arena.fd, request_fd, reply_fd]
            config = {
                "target": target,
                "device": device,
                "threads": threads,
                "memory_limit_bytes": memory_limit_bytes,
                "parent": None if tool else os.getpid(),
                "fds": fds,
                "graph": graph,
                "python_path": environment.get("PYTHONPATH", os.environ.get("PYTHONPATH")),
            }
            command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "oracle.isolation.worker", json.dumps(config)]
            self._process = subprocess.Popen(
                sanitized(tool, command) if tool else command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=fds,
                start_new_session=True,
                env=os.environ | here | (SANITIZED if tool else {}) | dict(environment),
            )
            mine.callback(self._kill)
            self._resources = mine.pop_all()

    def close(self) -> None:
        """The process and all of its process group are gone, and so is its arena."""
        self._resources.close()

    def hello(self, timeout_s: float) -> dict[str, object] | Failure:
        """What the process says of the kernel once it has loaded it."""
        return self._receive("while it was loaded", timeout_s)

    def ask(self, request: dict[str, object], timeout_s: float, packing: Packing) -> dict[str, object] | Failure:
        """The reply to `request`, or why there is none within `timeout_s`; its tensors lie in the arena as `packing` says."""
        if self._ended():
            return self._ending("after the previous call")
        if os.fstat(self._log.fileno()).st_size:
            os.ftruncate(self._log.fileno(), 0)
        self._asked += 1
        self._packing = packing
        deadline = time.monotonic() + timeout_s
        data = json.dumps({"id": self._asked} | request).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self._request_fd, data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._request_fd, select.POLLOUT)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                    return self._late(timeout_s)
            except BrokenPipeError:
                return self._silent("after the previous call")
        return self._receive("during the call", timeout_s)

    def failure(self, kind: FailureKind, text: str, traceback: str = "") -> Failure:
        """A failure of this kernel, with what it has printed since the last request."""
        if self._sanitized and kind in (FailureKind.EXCEPTION, FailureKind.EXITED, FailureKind.SIGNAL):
            if self._process.returncode is None:
                self._finish()
            if found := faults(self._printed()):
                kind, text = FailureKind.SANITIZER, f"{found[0]} ({TOOL})"
        printed = self._printed()
        return Failure(
            kind=kind, text=one_line(f"{self._target}: {text}"), traceback=tail(traceback, 12), log=tail(printed, _LOG_LINES)
        )

    def _printed(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _MAX_REPLY, max(0, size - _MAX_REPLY)).decode(errors="replace")

    def _finish(self) -> None:
        """The process has been given a while to end by itself: what the tool has to say it says then."""
        with contextlib.suppress(OSError):
            os.write(self._request_fd, b"\n")  # no request: the process ends
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._ended() and time.monotonic() < deadline:
            time.sleep(_POLL_MS / 1e3)

    def _receive(self, when: str, timeout_s: float) -> dict[str, object] | Failure:
        deadline = time.monotonic() + timeout_s
        received = b""
        poll = select.poll()
        poll.register(self._reply_fd, select.POLLIN)
        while not received.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return self._late(timeout_s)
            # Asked before the pipe is read: a reply written before the end is then not missed.
            ended = self._ended()
            if not poll.poll(0 if ended else min(left_s * 1e3, _POLL_MS)):
                if ended:
                    return self._ending(when)
                continue
            chunk = os.read(self._reply_fd, _MAX_REPLY)
            if not chunk:
                return self._silent(when)
            received += chunk
            if len(received) > _MAX_REPLY:
                return self.failure(FailureKind.TAMPERED, f"more than {_MAX_REPLY} bytes on its control channel {when}")
        return self._parse(received, when)

    def _parse(self, received: bytes, when: str) -> dict[str, object] | Failure:
        try:
            reply = json.loads(received)
        except (ValueError, RecursionError) as e:
            return self.failure(FailureKind.TAMPERED, f"its control channel {when} carries no JSON line: {e}")
        if not isinstance(reply, dict) or type(reply.get("id")) is not int or reply["id"] != self._asked:
            return self.failure(FailureKind.TAMPERED, f"its control channel {when} carries {reply!r:.80}, no reply {self._asked}")
        if "failure" in reply:
            return self._reported(reply["failure"])
        return reply

    def _reported(self, failure: object) -> Failure:
        if isinstance(failure, dict) and all(isinstance(failure.get(name), str) for name in ("kind", "text", "traceback")):
            with contextlib.suppress(ValueError):
                return self.failure(FailureKind(failure["kind"]), failure["text"], failure["traceback"])
        return self.failure(FailureKind.TAMPERED, f"reported a failure of an unknown form: {failure!r:.80}")

    def _late(self, timeout_s: float) -> Failure:
        return self.failure(FailureKind.TIMEOUT, f"no answer within {timeout_s:g} s; the process was killed")

    def _silent(self, when: str) -> Failure:
        """The pipe is closed: because the process ended, which may take it a moment, or because it closed the pipe."""
        deadline = time.monotonic() + _GRACE_S
        while not self._ended():
            if time.monotonic() > deadline:
                return self.failure(FailureKind.TAMPERED, f"closed its control channel {when}")
            time.sleep(_POLL_MS / 1e3)
        return self._ending(when)

    def _ended(self) -> bool:
        # WNOWAIT: the process stays a zombie, so its number, which is that of its group, is not used again.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _ending(self, when: str) -> Failure:
        self._kill()
        status = self._process.returncode
        if status >= 0:
            return self.failure(FailureKind.EXITED, f"its process exited with status {status} {when}")
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        hint = " (by the system, for want of memory?)" if name == "SIGKILL" else ""
        if name == "SIGSEGV" and self._packing is not None and (fault := read_fault(self.arena.notes())):
            hint = f" {words}" if (words := self._packing.words(fault)) else ""
        return self.failure(FailureKind.SIGNAL, f"its process was ended by {name}{hint} {when}")

    def _kill(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            # A process inside a hung driver outlives SIGKILL; nothing more can be done about it from here.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)


def _append(fd: int) -> None:
    """Every write to `fd` goes to the end of its file, so that the file can be emptied between calls."""
    import fcntl  # here for the reason given in `Arena.create`

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd
