"""The peak of memory over a stretch of work."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
MEANING = {
    "cpu": "resident memory of the process, weights and interpreter included",
    "cuda": "bytes of tensors that torch had allocated on the device, weights included",
}


def restart_peak(device: str) -> bool:
    """The peak is counted from now on; False where this machine cannot do that."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: str) -> int:
    """Bytes at the peak since `restart_peak`, as MEANING says."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found else 0
