"""Proof of the gate: `make proof` writes docs/proof.md.

Every correct variant of the emulator over five seeds must be accepted, and every planted fault rejected.  An hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import oracle
from oracle.accept import Asked
from oracle.doors import looser_than_default
from oracle.exam import timed
from oracle.kernels.emulated import VARIANTS
from oracle.kernels.emulated import __getattr__ as variant
from oracle.mutants.planted import FAULTS
from oracle.preparation import shared_preparation
from oracle.verdict import Outcome, Verdict

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "proof.md"


@dataclass(frozen=True, slots=True)
class Run:
    """One kernel judged with one seed."""

    target: str
    seed: int
    against: str  # "" = the emulator


def judged(runs: list[Run]) -> list[tuple[Run, Verdict, float]]:
    """The verdict of each run and the seconds it took; equal cases are prepared once."""
    prepare, results = shared_preparation(), []
    for run in runs:
        verdict, seconds = timed(Asked(candidate=run.target, seed=run.seed, against=run.against), prepare)
        results.append((run, verdict, seconds))
        print(f"{run.target} seed {run.seed}: {verdict.outcome} {', '.join(verdict.reasons)}", file=sys.stderr, flush=True)
        for finding in verdict.findings[:2] if "emulated" in run.target else []:
            print(f"    {finding.reason} {finding.case} {finding.text}", file=sys.stderr, flush=True)
    return results


def batches(seeds: int, only: str) -> list[list[Run]]:
    """The runs of each seed, so that they share their preparation; the faults, which end early, apart.

    A kernel of a looser contract is judged once, against itself: the only door open to it.
    """
    found = [[Run(f"oracle.mutants.planted:{name}", 0, fault.against) for name, fault in FAULTS.items()]]
    for seed in range(seeds):
        runs = []
        for name in VARIANTS:
            target = f"oracle.kernels.emulated:{name}"
            loose = looser_than_default(variant(name).record.precision)  # type: ignore[attr-defined]
            if seed == 0 or not loose:
                runs.append(Run(target, seed, target if loose else ""))
        found.append(runs)
    return [batch for runs in found if (batch := [run for run in runs if only in run.target])]


def row(target: str, runs: list[tuple[int, Verdict, float]]) -> str:
    """One line of the table: the runs of one kernel."""
    outcomes = ", ".join(sorted({str(v.outcome) for _, v, _ in runs}))
    reasons = ", ".join(dict.fromkeys(str(r) for _, v, _ in runs for r in v.reasons)) or "-"
    figures = [v.figures for _, v, _ in runs if v.figures]
    e = max((f.max_e for f in figures), default=float("nan"))
    lse = max((f.max_e_lse or 0.0 for f in figures), default=float("nan"))
    ratios = [v.ratios[0].value for _, v, _ in runs if v.ratios]
    ratio = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
    took = max(t for _, _, t in runs)
    return f"| `{target.split(':')[1]}` | {len(runs)} | {outcomes} | {reasons} | {e:.3g} | {lse:.3g} | {ratio} | {took:.0f} |"


def main() -> int:
    """Prints and writes the tables.  Returns 1 where a verdict is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="only kernels whose name holds this; docs/proof.md is then left alone")
    options = parser.parse_args()
    results: dict[str, list[tuple[int, Verdict, float]]] = {}
    with ProcessPoolExecutor(max_workers=2) as pool:
        for batch in pool.map(judged, batches(options.seeds, options.only)):
            for run, verdict, took in batch:
                results.setdefault(run.target, []).append((run.seed, verdict, took))
    wrong = [
        target
        for target, runs in results.items()
        for _, verdict, _ in runs
        if verdict.outcome is not (Outcome.REJECT if "planted" in target else Outcome.ACCEPT)
    ]
    columns = ("kernel", "runs", "verdict", "reasons", "max e", "max e_lse", "RMS e ratio", "seconds at most")
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    sections = []
    for title, part in (("Correct variants", "emulated"), ("Planted faults", "planted")):
        rows = [row(t, runs) for t, runs in results.items() if part in t]
        sections.append(f"## {title}\n\n{head}\n" + "\n".join(rows))
    versions = f"oracle {oracle.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    text = f"# Proof of the gate\n\nMade by `make proof` ({versions}).\n\n" + "\n\n".join(sections)
    print(text)
    print(f"\n{sum(map(len, results.values()))} runs, {len(wrong)} not as they must be: {sorted(set(wrong))}")
    if not options.only:
        DOCUMENT.write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
