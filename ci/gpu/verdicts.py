"""What the oracle says of kernels on this GPU beside those that it locks, all at the same time.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/verdicts.py OUT [NAME...]

writes OUT/verdicts.json: of each command its verdict, or how it ended.  Times of kernels mean nothing meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pairs import versions, write

Facts = dict[str, Any]

SHARED = "oracle.kernels.shared_kv"
ASKED = {  # what the page calls it -> what `oracle accept` is asked
    "shared_kv rebuilt_bf16": f"{SHARED}:rebuilt_bf16 --profile quick",
    "shared_kv rebuilt_fp32": f"{SHARED}:rebuilt_fp32 --profile quick",
    "shared_kv folded": f"{SHARED}:folded --profile quick",
    "split_tuned": "triton-split-tuned --against triton-split-64 --door bits --profile quick",
    "tilelang hd512, memcheck": "tilelang-hd512 --profile quick --sanitize",
}


def main() -> None:
    """Asks for all that are named, or all that there are, and writes the report when each has ended."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(ASKED)
    out.mkdir(parents=True, exist_ok=True)
    running = {name: _start(name, out) for name in names}
    report: Facts = {"versions": versions("python3 ci/gpu/verdicts.py OUT"), "verdicts": {}}
    while running:
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            process = running.pop(name)
            report["verdicts"][name] = _facts(name, out, process)
            print(name, {k: v for k, v in report["verdicts"][name].items() if k != "figures"}, flush=True)
            write(report, out / "verdicts.json")


def _file(name: str, out: Path) -> Path:
    return out / f"verdict-{''.join(c if c.isalnum() else '-' for c in name)}"


def _start(name: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "oracle", "accept", *ASKED[name].split(), "--device", "cuda"]
    with _file(name, out).with_suffix(".txt").open("wb") as said:
        return subprocess.Popen([*command, "--json", str(_file(name, out)) + ".json"], stdout=said, stderr=subprocess.STDOUT)


def _facts(name: str, out: Path, process: subprocess.Popen[bytes]) -> Facts:
    """What a finished process found."""
    facts: Facts = {"command": f"oracle accept {ASKED[name]} --device cuda", "status": process.returncode}
    file = _file(name, out).with_suffix(".json")
    if not file.exists():
        return facts | {"said": _file(name, out).with_suffix(".txt").read_text()[-1500:]}
    verdict = json.loads(file.read_text())
    kept = {key: verdict[key] for key in ("outcome", "door", "incumbent", "reasons")}
    kept["figures"] = {key: float(f"{verdict['figures'][key]:.4g}") for key in ("max_e", "max_e_det", "max_e_lse", "rms_e")}
    return (
        facts | kept | {"findings": [f["text"] for f in verdict.get("findings", [])[:3]], "seed": verdict["environment"]["seed"]}
    )


if __name__ == "__main__":
    main()
