"""NVIDIA's compute-sanitizer round a kernel's process: accesses outside what it was given, on the device.

Formats and options: "Compute Sanitizer", NVIDIA's manual, section "Memcheck Tool".
"""

from __future__ import annotations

import re
import shutil

TOOL = "compute-sanitizer"
_PATH = "/usr/local/cuda/bin:/opt/cuda/bin"  # where CUDA's own installers put it
_OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--show-backtrace", "no", "--print-limit", "10")
_MARK = "========="
_NO_FAULT = re.compile(r"COMPUTE-SANITIZER|(ERROR|LEAK) SUMMARY|Error:|Warning:|Internal|Target application")

# One allocation for every tensor, so that one element past it is past what the kernel was given.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitizer() -> str | None:
    """The tool's path, None where this machine has none."""
    return shutil.which(TOOL) or shutil.which(TOOL, path=_PATH)


def sanitized(tool: str, command: list[str]) -> list[str]:
    """The command line that runs `command` under the tool at that path."""
    return [tool, *_OPTIONS, *command]


def faults(printed: str) -> tuple[str, ...]:
    """Each distinct fault in what the tool printed, in one line: what, where, by how much.  Not its own troubles."""
    found: list[list[str]] = []
    for line in printed.splitlines():
        if not line.startswith(_MARK):
            continue
        text = line.removeprefix(_MARK)
        if text[:2] == "  ":  # further lines of a fault
            if found:
                found[-1].append(text.strip())
        elif text.strip():
            found.append([text.strip()])
    texts = [", ".join(part for part in lines if not part.startswith("by thread")) for lines in found]
    return tuple(dict.fromkeys(text for text in texts if not _NO_FAULT.match(text)))
