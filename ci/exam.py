"""The gate's own exam: `make exam` writes docs/exam.md.

Every mutant must be rejected for a reason that names its fault, and every correct kernel accepted with every seed.  Two hours
on two cores.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import oracle
from oracle.accept import Asked
from oracle.doors import looser_than_default
from oracle.exam import Judged, examine, shares, timed
from oracle.exam_text import Sheet, checks, faults, kinds, peers
from oracle.heldout import held_out_share
from oracle.kernels.emulated import VARIANTS
from oracle.kernels.emulated import __getattr__ as variant
from oracle.mutants.table import MUTANTS
from oracle.preparation import shared_preparation
from oracle.verdict import Outcome

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "exam.md"
SEEDS, MORE_SEEDS = 5, 10
OFTEN = ("everything", "reversed", "sum_after")  # emulated kernels judged with more seeds
OTHERS = {"sdpa-flash": "", "sdpa-math": "", "triton-prefill-16": "quick"}  # kernel -> profile
MARGIN = 0.9  # of a limit: what a correct kernel may come to


def correct(seed: int) -> list[Asked]:
    """The correct kernels that are judged with `seed`; of a looser contract once, against themselves: their only door."""
    asked = []
    for name in VARIANTS:
        target = f"oracle.kernels.emulated:{name}"
        loose = looser_than_default(variant(name).record.precision)  # type: ignore[attr-defined]
        if seed < (1 if loose else MORE_SEEDS if name in OFTEN else SEEDS):
            asked.append(Asked(candidate=target, seed=seed, against=target if loose else ""))
    return asked + [Asked(candidate=name, seed=seed, profile=profile) for name, profile in OTHERS.items()]


def judged_correct(asked: list[Asked]) -> list[Judged]:
    """The verdicts on correct kernels with one seed; equal cases are prepared once."""
    prepare, results = shared_preparation(), []
    for one in asked:
        verdict, seconds = timed(one, prepare)
        name = one.candidate.removeprefix("oracle.kernels.emulated:")
        results.append(Judged(name=name, seed=one.seed or 0, verdict=verdict, seconds=seconds, peers={}))
        print(f"{name} seed {one.seed}: {verdict.outcome} {', '.join(verdict.reasons)}", file=sys.stderr, flush=True)
    return results


def correct_sheet(judged: list[Judged]) -> Sheet:
    """One line a kernel: verdicts, and how near it comes to the limits."""
    rows = []
    for name in dict.fromkeys(j.name for j in judged):
        those = [j for j in judged if j.name == name]
        outcomes = ", ".join(sorted({str(j.verdict.outcome) for j in those}))
        nearest = {what: max(shares(j.verdict)[what] for j in those) for what in shares(those[0].verdict)}
        ratios = [j.verdict.ratios[0].value for j in those if j.verdict.ratios]
        ratio = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
        took = max(j.seconds for j in those)
        rows.append((f"`{name}`", str(len(those)), outcomes, *(f"{v:.3f}" for v in nearest.values()), ratio, f"{took:.0f}"))
    columns = ("kernel", "runs", "verdict", *shares(judged[0].verdict), "RMS e ratio", "s at most")
    return Sheet(title="Correct kernels, nearest to their limits", columns=columns, rows=tuple(rows))


def main() -> int:
    """Prints and writes the tables.  Returns 1 where a verdict is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only kernels whose name holds this; docs/exam.md is then left alone")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in MUTANTS if options.only in name]
    batches = [[a for a in correct(seed) if options.only in a.candidate] for seed in range(MORE_SEEDS)]
    mutants = examine(names, 0, workers=options.workers)
    with ProcessPoolExecutor(max_workers=options.workers) as pool:
        right = [j for batch in pool.map(judged_correct, [b for b in batches if b]) for j in batch]
    slipped = [j.name for j in mutants if not j.understood]
    turned_away = [f"{j.name} seed {j.seed}" for j in right if j.verdict.outcome is not Outcome.ACCEPT]
    sheets = [kinds(mutants), checks(mutants), peers(mutants), faults(mutants)] if mutants else []
    if right:
        sheets.insert(1 if mutants else 0, correct_sheet(right))
    share = held_out_share(0, 1000)
    versions = f"oracle {oracle.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    text = "\n".join([f"# The gate's own exam\n\nMade by `make exam` ({versions}).\n", *(sheet.markdown() for sheet in sheets)])
    text += f"\n## Faults that the suite has never seen\n\n`oracle mutants --held-out 0`: {share}\n"
    print(text)
    print(f"{len(mutants)} mutants, not rejected for an allowed reason: {slipped or 'none'}")
    print(f"{len(right)} runs of correct kernels, not accepted: {turned_away or 'none'}")
    if not options.only:
        DOCUMENT.write_text(text)
    return 1 if slipped or turned_away else 0


if __name__ == "__main__":
    sys.exit(main())
