"""What comes back from a kernel's process: a result, a description of the kernel, or a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from oracle.contract import Record

if TYPE_CHECKING:
    from torch import Tensor


class FailureKind(StrEnum):
    """Why there is no result."""

    EXCEPTION = "exception"  # the kernel raised
    EXITED = "exited"  # its process ended by itself, with any status
    SIGNAL = "signal"  # its process was ended by a signal: SIGSEGV, SIGABRT, ...
    TIMEOUT = "timeout"  # no answer in time; the process was killed
    OUT_OF_MEMORY = "out_of_memory"  # it asked for more than its memory limit, or than the device has
    WRONG_RESULT = "wrong_result"  # what it returned has another type, dtype, shape or device than the contract says
    SANITIZER = "sanitizer"  # compute-sanitizer found a fault
    TAMPERED = "tampered"  # something wrote to the control channel, or the source changed between two processes
    NOT_FOUND = "not_found"  # wrong usage: no such file, module or function
    IMPORT_ERROR = "import_error"  # wrong usage: the kernel's module cannot be imported
    BAD_DECLARATION = "bad_declaration"  # wrong usage: a record or a signature that breaks the contract
    UNAVAILABLE = "unavailable"  # wrong usage: this machine lacks the device, or is not Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A kernel that gave no result.  All text is printable, whatever the kernel put into it."""

    kind: FailureKind
    text: str  # one line: which kernel, what happened, what was expected
    traceback: str = ""  # last lines of the traceback, where there is one
    log: str = ""  # last lines that the kernel wrote to stdout and stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A kernel as its process loaded it."""

    target: str  # "module:function" or "file.py:function"
    parameters: tuple[str, ...]  # keyword arguments that it names
    required: tuple[str, ...]  # those of them without a default
    has_var_keyword: bool  # takes **kwargs: wrong usage without a record
    record: Record | None
    source_sha256: str | None  # of the file that defines the function; None where there is no file
    doc: str  # first line of the docstring
    version: str | None  # __version__ of its module

    def takes(self, name: str) -> bool:
        """The kernel is given the keyword argument `name`."""
        return self.has_var_keyword or name in self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The result of one call, in private memory of this process, on the CPU."""

    out: Tensor  # (total_q, q_heads, head_dim_v); laid out as call.out where that was given and the kernel takes it
    out_storage: Tensor | None  # (nbytes,) uint8, the whole storage of call.out after the call; `out` is a view of it
    lse: Tensor | None  # (total_q, q_heads) float32; None where not wanted, or where the kernel has no return_lse
    seconds: float  # by the clock of the kernel's process: informative, no evidence
    changed_inputs: tuple[str, ...]  # arguments other than `out` whose storage was written


def one_line(text: str, width: int = 600) -> str:
    """`text` in one printable line of at most `width` characters."""
    return _printable(" ".join(text.split()), width)


def tail(text: str, lines: int, width: int = 200) -> str:
    """The last `lines` lines of `text`, printable, each of at most `width` characters."""
    return "\n".join(_printable(line.expandtabs(4), width) for line in text.rstrip().splitlines()[-lines:])


def _printable(line: str, width: int) -> str:
    # What a kernel prints ends up on somebody's terminal: its escape sequences must not.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:width])
