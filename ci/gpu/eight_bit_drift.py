"""What the 8-bit GPU kernels do to whole checkpoints, beside FP8 weights: a summary of `oracle drift` on a GPU.

    PYTHONPATH=. python3 ci/gpu/eight_bit_drift.py OUT [RUN...]

writes OUT/eight_bit_drift.json, and the whole reports as OUT/drift-RUN.json.  Runs: `gemma4-mini`, `long` (the same weights in
blocks of 32,768 tokens, their context said to be that long) and, where SMOLLM2 names its .gguf file, `smollm2`; without a
RUN, all that there are, at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairs import versions, write

Facts = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "checkpoints" / "gemma4-mini"
LONG = 32768  # tokens of a block of the long run
KERNELS = ("triton-fp8", "triton-fp8-hadamard", "triton-int8", "triton-int8-v8")
CONFIGURATIONS = ("fp8", "fp8-weights", *(f"bf16+{kernel}" for kernel in KERNELS), "fp8+triton-fp8", "fp8+triton-int8")
GLOBAL = "bf16+tilelang-fp8-hd512@global"  # of Gemma 4, whose global layers have the head dim that it is made for


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One report."""

    asked: Callable[[Path], list[str]]  # a folder for its inputs -> arguments of `oracle drift`
    attribute: tuple[str, ...]
    more: tuple[str, ...] = ()  # configurations beside CONFIGURATIONS


def _long(folder: Path) -> list[str]:
    """The small Gemma 4 with a longer context, and its held-out documents as one text."""
    checkpoint, text = folder / "gemma4-mini-long", folder / "text"
    shutil.copytree(MINI, checkpoint, ignore=shutil.ignore_patterns("text"), dirs_exist_ok=True)
    config = json.loads((MINI / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    text.mkdir(parents=True, exist_ok=True)
    (text / "all.txt").write_text("\n".join(file.read_text() for file in sorted((MINI / "text").glob("*.txt"))))
    return [str(checkpoint), "--text", str(text), "--blocks", f"4x{LONG}"]


def _smollm2(folder: Path) -> list[str]:
    """SmolLM2 on the same documents."""
    return [os.environ["SMOLLM2"], "--text", str(MINI / "text"), "--blocks", "64x512,4x4096"]


RUNS: dict[str, Run] = {
    "gemma4-mini": Run(asked=lambda folder: [], attribute=("bf16+triton-fp8", "bf16+triton-int8"), more=(GLOBAL,)),
    "long": Run(asked=_long, attribute=("bf16+triton-fp8",), more=(GLOBAL,)),
    "smollm2": Run(asked=_smollm2, attribute=("bf16+triton-fp8",)),
}


def command(name: str, out: Path) -> list[str]:
    """The arguments of the run's `oracle drift`."""
    run = RUNS[name]
    chosen = ["--device", "cuda", "--configs", ",".join((*CONFIGURATIONS, *run.more))]
    chosen += [word for each in run.attribute for word in ("--attribute", each)]
    return ["drift", *run.asked(out / name), *chosen, "--json", str(out / f"drift-{name}.json")]


def summary(report: Facts, out: Path) -> Facts:
    """What the page shows of a report written into `out`."""
    environment = report["environment"]
    words = environment["command"].replace(str(out), "OUT")
    if file := os.environ.get("SMOLLM2"):
        words = words.replace(file, "$SMOLLM2")
    return {
        "tokens": report["tokens"],
        "blocks": report["blocks"],
        "environment": environment | {"command": words.replace(f"{ROOT}/", "")},
        "configurations": [
            {
                "configuration": c["configuration"],
                "kl": c["figures"]["kl"],
                "agree1": c["figures"]["agree1"],
                "times_floor": c["times_floor"],
            }
            for c in report["configurations"]
        ],
        "attributions": report["attributions"],
        "layers": report["layers"],
    }


def main() -> None:
    """Runs all that are named, and writes the summary as each one ends."""
    out = Path(sys.argv[1])
    names = sys.argv[2:] or [name for name in RUNS if name != "smollm2" or "SMOLLM2" in os.environ]
    out.mkdir(parents=True, exist_ok=True)
    report: Facts = {"versions": versions("python3 ci/gpu/eight_bit_drift.py OUT"), "runs": {}}
    begin, running = time.perf_counter(), {}
    for name in names:
        with (out / f"drift-{name}.txt").open("wb") as said:
            words = command(name, out)
            running[name] = subprocess.Popen([sys.executable, "-m", "oracle", *words], stdout=said, stderr=subprocess.STDOUT)
    while running:
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            status = running.pop(name).returncode
            facts: Facts = {"status": status, "seconds": round(time.perf_counter() - begin, 1)}
            made = out / f"drift-{name}.json"
            if made.exists():
                facts |= summary(json.loads(made.read_text()), out)
            else:
                facts["said"] = (out / f"drift-{name}.txt").read_text()[-2000:]
            report["runs"][name] = facts
            write(report, out / "eight_bit_drift.json")
            shown = [(c["configuration"], round(c["kl"]["value"], 6)) for c in facts.get("configurations", [])]
            print(name, status, shown, facts.get("said", ""), flush=True)


if __name__ == "__main__":
    main()
