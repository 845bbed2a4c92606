"""What `oracle fuzz` finds in the kernels of this GPU, all at the same time.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/fuzzed.py OUT MINUTES [NAME...]

writes OUT/fuzzed.json: of each kernel the command, how it ended (0: nothing found, 1: found) and its last line; and all it said,
OUT/fuzz-NAME.txt.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from pairs import versions, write

NAMES = (
    "triton-decode",
    "triton-fp8",
    "triton-fp8-hadamard",
    "triton-int8",
    "triton-int8-v8",
    "tilelang-fp8-hd512",
    "triton-fp8-narrow",
)


def main() -> None:
    """Searches all that are named, or NAMES, for MINUTES each."""
    out, minutes, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(NAMES)
    out.mkdir(parents=True, exist_ok=True)
    running = {name: _start(name, minutes, out) for name in names}
    report: dict[str, Any] = {
        "versions": versions(" ".join(["python3 ci/gpu/fuzzed.py OUT", minutes, *sys.argv[3:]])),
        "fuzzed": {},
    }
    for name, process in running.items():
        status = process.wait()
        said = _said(name, out).read_text().strip().rpartition("\n")[2]
        command = f"oracle fuzz {name} --device cuda --minutes {minutes}"
        report["fuzzed"][name] = {"command": command, "status": status, "said": said}
        print(name, report["fuzzed"][name], flush=True)
        write(report, out / "fuzzed.json")


def _said(name: str, out: Path) -> Path:
    return out / f"fuzz-{name}.txt"


def _start(name: str, minutes: str, out: Path) -> subprocess.Popen[bytes]:
    words = ["fuzz", name, "--device", "cuda", "--minutes", minutes, "-o", str(out)]
    with _said(name, out).open("wb") as said:
        return subprocess.Popen([sys.executable, "-m", "oracle", *words], stdout=said, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main()
