"""Every way to round, measured on two checkpoints: `make drift` writes docs/drift_measured.md.

    python ci/drift_study.py                                the small Gemma 4 that comes with the oracle
    python ci/drift_study.py SmolLM2-135M-Instruct=FILE.gguf    and another checkpoint beside it

Each configuration is measured from the bf16 model, and decided against fp8 weights.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from oracle.checkpoints.drift import Asked, measure
from oracle.checkpoints.drifted import Drift
from oracle.checkpoints.ranks import Ranks
from oracle.drift_markdown import drift_markdown

ROOT = Path(__file__).resolve().parent.parent
MINI = ROOT / "checkpoints" / "gemma4-mini"
ACCEPTED = "fp8"
CONFIGURATIONS = (
    ACCEPTED,
    "fp8-weights",
    "bf16+kv-fp8",
    "bf16+int8-token-attention",
    "bf16+int8-attention",
    "bf16+fp8-attention",
    "bf16+fp8-head-attention",
    "bf16+fp8-block-attention",
    "bf16+fp8-hadamard-attention",
    "fp8+int8-attention",
    "fp8+fp8-block-attention",
)
BLOCKS = {"gemma4-mini": "64x512,4x4096"}  # of another checkpoint OTHER_BLOCKS
OTHER_BLOCKS = "64x512"


def study(name: str, checkpoint: Path, *, more: bool) -> Drift:
    """The report on a checkpoint; with `more`, where fp8 weights with int8 attention drift, and the waypoints."""
    asked = Asked(
        checkpoint=checkpoint,
        configurations=CONFIGURATIONS,
        texts=(MINI / "text",),
        blocks=BLOCKS.get(name, OTHER_BLOCKS),
        decisions=tuple((c, ACCEPTED) for c in CONFIGURATIONS if c != ACCEPTED),
    )
    if more:
        asked = replace(asked, attribute=("fp8+int8-attention",), waypoints=("fp8", "fp8+int8-attention", "bf16+fp8-attention"))
    found = measure(
        asked, Ranks(), lambda what, done, total: print(f"{name}: {what} {done}/{total}", file=sys.stderr, flush=True)
    )
    return replace(found, environment=dict(found.environment) | {"command": f"make drift  # {name}"})


def main() -> None:
    """Writes the page, checkpoint by checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="*", metavar="NAME=CHECKPOINT")
    options = parser.parse_args()
    places = {MINI.name: MINI} | {name: Path(place) for name, _, place in (one.partition("=") for one in options.other)}
    parts = ["# Drift, measured\n\nMade by `make drift`; what the figures mean is in [drift.md](drift.md).\n"]
    for name, checkpoint in places.items():
        drift = study(name, checkpoint, more=checkpoint == MINI)
        parts.append(f"# {name}\n\n{drift_markdown(drift)}")
        (ROOT / "docs" / "drift_measured.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
