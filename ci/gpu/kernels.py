"""One run of everything that docs/kernels.md says of speed and bits, on a GPU of compute capability 9.0: `make gpu OUT=FOLDER`.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/kernels.py OUT [PART...]

writes OUT/kernels.json.  Parts: `pairs` (sustained pairs), `plain`, `first_calls`, `bits` (against fp64, 400 reruns, other
fills), `twin` (the bits of the libraries against those of the kernels that TileLang compiles there), `shared_kv` (errors);
without a PART, all of them.  Needs torch, Triton and what Attention Oracle imports, of any versions that it supports; what
else is missing (FlashInfer, TileLang, built libraries) is said in the report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bits
import first_calls
import shared_errors
import timed
from pairs import PROTOCOL, versions, write

PARTS: dict[str, Callable[[], Any]] = {
    "pairs": timed.pairs,
    "plain": timed.plain,
    "first_calls": first_calls.found,
    "bits": bits.against_fp64,
    "twin": bits.twin,
    "shared_kv": shared_errors.found,
}


def main() -> None:
    """Writes the report as it grows, so that a part that fails leaves those before it."""
    out, names = Path(sys.argv[1]) / "kernels.json", sys.argv[2:] or list(PARTS)
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = f" PARTS='{' '.join(names)}'" if sys.argv[2:] else ""
    report: dict[str, Any] = {"versions": versions(f"make gpu OUT=FOLDER{parts}") | {"protocol": PROTOCOL}}
    for name in names:
        begin = time.perf_counter()
        made = PARTS[name]()
        for facts in made if isinstance(made, Iterator) else (made,):
            report[name] = facts
            write(report, out)
        print(name, round(time.perf_counter() - begin, 1), "s", flush=True)


if __name__ == "__main__":
    main()
