"""The gate's own exam: `make exam` writes docs/correct.md and docs/exam.md.

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

DOCS = Path(__file__).resolve().parent.parent / "docs"
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


def judge_correct(only: str, workers: int) -> tuple[str, list[str]]:
    """The page on correct kernels, and those that were turned away."""
    batches = [[a for a in correct(seed) if only in a.candidate] for seed in range(MORE_SEEDS)]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        right = [j for batch in pool.map(judged_correct, [b for b in batches if b]) for j in batch]
    turned_away = [f"{j.name} seed {j.seed}" for j in right if j.verdict.outcome is not Outcome.ACCEPT]
    head = f"{len(right)} runs of correct kernels, {len(turned_away)} not accepted.\n"
    return "\n".join([head, *([correct_sheet(right).markdown()] if right else [])]), turned_away


def judge_wrong(only: str, workers: int) -> tuple[str, list[str]]:
    """The page on mutants, and those that were not rejected for an allowed reason."""
    judged = examine([name for name in MUTANTS if only in name], 0, workers=workers)
    slipped = [j.name for j in judged if not j.understood]
    head = f"{len(judged)} mutants, {len(slipped)} not rejected for an allowed reason.\n"
    sheets = [kinds(judged), checks(judged), peers(judged), faults(judged)] if judged else []
    share = held_out_share(0, 1000)
    last = f"## Faults that the suite has never seen\n\n`oracle mutants --held-out 0`: {share}\n"
    return "\n".join([head, *(sheet.markdown() for sheet in sheets), last]), slipped


PAGES = {  # part -> what judges it, its page, its title
    "correct": (judge_correct, "correct.md", "Correct kernels before the gate"),
    "mutants": (judge_wrong, "exam.md", "The gate's own exam"),
}


def main() -> int:
    """Writes the pages.  Returns 1 where a verdict is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PAGES, nargs="*", help="which of the two [default: both]")
    parser.add_argument("--only", default="", help="only kernels whose name holds this; the pages are then printed, not written")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    wrong: list[str] = []
    for part in options.part or PAGES:
        judge, name, title = PAGES[part]
        page, found = judge(options.only, options.workers)
        versions = f"oracle {oracle.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        text = f"# {title}\n\nMade by `python ci/exam.py {part}` ({versions}).\n\n{page}"
        if options.only:
            print(text)
        else:
            (DOCS / name).write_text(text)
        print(f"{part}: {len(found)} not as they must be: {', '.join(found) or 'none'}")
        wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
