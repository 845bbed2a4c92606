"""Where in memory a kernel's process broke, told by the process itself in its last moment.

A handler of SIGSEGV writes the address into memory shared with the parent and goes on to the handler that was there before.  It
is machine code: one in Python would need the interpreter, which the thread that broke may hold, or wait for for ever.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import struct
from dataclasses import dataclass

_SA_SIGINFO = 4  # <signal.h>
_WRITING = 2  # bit of the error code of an x86 page fault
_NOTE = struct.Struct("<QQQ")  # address, error code, and where the process has mapped the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A forbidden access, as the process tells it: words for a message, and no evidence."""

    offset: int  # of the byte that was accessed, from the start of the arena; negative below it
    writing: bool


class _Sigaction(ctypes.Structure):
    """struct sigaction of the C library on x86-64."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _code(note: int, then: int) -> bytes:
    """A signal handler (rdi number, rsi siginfo_t, rdx ucontext_t) that fills the note at an address, then jumps to `then`."""
    return b"".join(
        (
            b"\xf3\x0f\x1e\xfa",  # endbr64
            b"\x48\xb8" + note.to_bytes(8, "little"),  # mov rax, note
            b"\x48\x8b\x4e\x10",  # mov rcx, [rsi + 16]: si_addr
            b"\x48\x89\x08",  # mov [rax], rcx
            b"\x48\x8b\x8a\xc0\x00\x00\x00",  # mov rcx, [rdx + 192]: uc_mcontext.gregs[REG_ERR]
            b"\x48\x89\x48\x08",  # mov [rax + 8], rcx
            b"\x48\xb8" + then.to_bytes(8, "little"),  # mov rax, then
            b"\xff\xe0",  # jmp rax
        )
    )


def tell_faults(notes: mmap.mmap) -> mmap.mmap | None:
    """From now on a SIGSEGV of this process leaves a note in `notes`; what must be kept for that, or None where it cannot be.

    Needs x86-64 and a handler to go on to, such as faulthandler's: without, a SIGSEGV ends the process and says nothing.
    """
    if platform.machine() != "x86_64":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    action = _Sigaction()
    if libc.sigaction(signal.SIGSEGV, None, ctypes.byref(action)) or (action.handler or 0) <= int(signal.SIG_IGN):
        return None
    code = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    code.write(_code(address_of(notes), action.handler))
    start = address_of(code)
    if libc.mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    action.handler, action.flags = start, action.flags | _SA_SIGINFO
    return None if libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None) else code


def note_mapping(notes: mmap.mmap, address: int) -> None:
    """`notes` says that this process has mapped the arena at `address`."""
    notes[: _NOTE.size] = _NOTE.pack(0, 0, address)


def read_fault(notes: bytes) -> Fault | None:
    """The fault that `notes` tell of, if any."""
    address, code, base = _NOTE.unpack_from(notes)
    return Fault(offset=address - base, writing=bool(code & _WRITING)) if address else None


def address_of(memory: mmap.mmap) -> int:
    """The address of the first byte of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
