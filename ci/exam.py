"""The gate's own exam: `make exam` writes docs/correct.md, docs/exam.md and docs/peers.md.

Every mutant must be rejected for a reason that names its fault, and every correct kernel accepted with every seed.  Hours on
two cores: what is finished stands in a journal, and a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import oracle
import oracle.isolation.worker  # what a kernel's process runs: the journal's digest covers it
from oracle.accept import Asked
from oracle.doors import looser_than_default
from oracle.exam import Judged, Yardsticks, asked_peers, judge, judge_mutant, told_by_peers
from oracle.exam_text import checks, faults, kinds, peers
from oracle.files import write_whole
from oracle.heldout import held_out_share
from oracle.kernels.emulated import VARIANTS
from oracle.kernels.emulated import __getattr__ as variant
from oracle.mutants.table import MUTANTS
from oracle.preparation import shared_preparation
from oracle.sheet import Sheet
from oracle.trial import Prepare
from oracle.verdict import Outcome

ROOT = Path(__file__).resolve().parent.parent
SEEDS, MORE_SEEDS = 5, 10
TABLES = ("oracle.kernels.table", "oracle.kernels.field.table")
Item = TypeVar("Item", Asked, str)
OFTEN = ("everything", "reversed", "sum_after")  # emulated kernels judged with more seeds
OTHERS = {"sdpa-flash": "", "sdpa-math": "", "triton-prefill-16": "quick"}  # kernel -> profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The finished verdicts of one state of the sources, a line of JSON each: an exam may take several sittings."""

    path: Path
    source: str = field(default_factory=lambda: source_sha256())

    def read(self) -> list[Judged]:
        """What is finished.  Raises SystemExit where another state of the package wrote it."""
        if not self.path.exists():
            return []
        first, *lines = self.path.read_text().splitlines()
        if first != self.source:
            raise SystemExit(f"{self.path}: its verdicts come from other sources than these: remove it, and run again")
        return [judged_from(json.loads(line)) for line in lines]

    def add(self, judged: Judged) -> None:
        """Keeps one more, whole or not at all."""
        text = self.path.read_text() if self.path.exists() else self.source + "\n"
        write_whole(self.path, text + json.dumps(asdict(judged)) + "\n", otherwise="choose another folder with --journals")


def source_sha256() -> str:
    """SHA-256 over the modules of the package that a verdict comes from: those that are imported by now, but for the tables of
    kernels, which only name them."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "oracle"}
    files = {name: module.__file__ for name, module in ours.items() if name not in TABLES}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if file is not None:
            digest.update(name.encode() + b"\0" + Path(file).read_bytes())
    return digest.hexdigest()


def judged_from(entry: dict[str, Any]) -> Judged:
    """A line of the journal, read back."""
    peers = {rule: (bool(said[0]), bool(said[1])) for rule, said in entry["peers"].items()}
    return Judged(**entry | {"reasons": tuple(entry["reasons"]), "peers": peers})


def correct() -> list[Asked]:
    """The correct kernels that are judged; those of a looser contract against themselves: their only door."""
    asked = []
    for seed in range(MORE_SEEDS):
        for name in VARIANTS:
            target = f"oracle.kernels.emulated:{name}"
            loose = looser_than_default(variant(name).record.precision)
            if seed < (MORE_SEEDS if name in OFTEN else SEEDS):
                asked.append(Asked(candidate=target, seed=seed, against=target if loose else "", profile="default"))
        asked += [Asked(candidate=name, seed=seed, profile=profile) for name, profile in OTHERS.items()]
    return asked


def named(asked: Asked) -> str:
    """A correct kernel's name in the journal and on the page."""
    return asked.candidate.removeprefix("oracle.kernels.emulated:")


@lru_cache(maxsize=1)
def preparation(seed: int) -> Prepare:
    """Of this process: equal cases are prepared once, and kept (some 3 GB) until another seed is asked for."""
    return shared_preparation()


@cache
def yardsticks() -> Yardsticks:
    """Of this process."""
    return {}


def judge_right(asked: Asked) -> Judged:
    """What becomes of a correct kernel."""
    return judge(named(asked), asked, preparation(asked.seed or 0))


def judge_wrong(name: str) -> Judged:
    """What becomes of a mutant, and what the peers' rules say."""
    return told_by_peers(judge_mutant(name, 0, preparation(0)), preparation(0), yardsticks())


def judge_right_with_peers(asked: Asked) -> Judged:
    """What becomes of a correct kernel, and what the peers' rules say."""
    return replace(judge_right(asked), peers=asked_peers(asked, preparation(asked.seed or 0), yardsticks()))


def finished(work: Callable[[Item], Judged], items: Sequence[Item], journal: Journal, workers: int) -> Iterator[Judged]:
    """The verdicts on the items, as they come; each is in the journal first."""
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, item) for item in items]):
            judged = future.result()
            journal.add(judged)
            print(f"{judged.name} seed {judged.seed}: {judged.outcome} {', '.join(judged.reasons)}", file=sys.stderr, flush=True)
            yield judged


def correct_sheet(judged: list[Judged]) -> Sheet:
    """One line a kernel: verdicts, and how near it comes to the limits."""
    rows = []
    for name in dict.fromkeys(j.name for j in judged):
        those = [j for j in judged if j.name == name]
        outcomes = ", ".join(sorted({j.outcome for j in those}))
        nearest = {what: max(j.shares[what] for j in those) for what in those[0].shares}
        ratios = [j.ratio for j in those if j.ratio is not None]
        ratio = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
        took = max(j.seconds for j in those)
        rows.append((f"`{name}`", str(len(those)), outcomes, *(f"{v:.3f}" for v in nearest.values()), ratio, f"{took:.0f}"))
    columns = ("kernel", "runs", "verdict", *judged[0].shares, "RMS e ratio", "s at most")
    return Sheet(title="Correct kernels, nearest to their limits", columns=columns, rows=tuple(rows))


def correct_page(only: str, journal: Journal, workers: int) -> tuple[str, list[str]]:
    """The page on correct kernels, and those that were turned away."""
    asked = [a for a in correct() if only in a.candidate]
    known = {(j.name, j.seed): j for j in journal.read()}
    missing = [a for a in asked if (named(a), a.seed) not in known]
    known |= {(j.name, j.seed): j for j in finished(judge_right, missing, journal, workers)}
    right = [known[named(a), a.seed or 0] for a in asked]
    turned_away = [f"{j.name} seed {j.seed}" for j in right if j.outcome != Outcome.ACCEPT]
    head = f"{len(right)} runs of correct kernels, {len(turned_away)} not accepted.\n"
    return "\n".join([head, *([correct_sheet(right).markdown()] if right else [])]), turned_away


def mutants_page(only: str, journal: Journal, workers: int) -> tuple[str, list[str]]:
    """The page on mutants, and those that were not rejected for an allowed reason."""
    names = [name for name in MUTANTS if only in name]
    known = {j.name: j for j in journal.read()}
    missing = [name for name in names if name not in known]
    known |= {j.name: j for j in finished(judge_wrong, missing, journal, workers)}
    judged = [known[name] for name in names]
    slipped = [j.name for j in judged if not j.understood]
    quick = sum(j.profile == "quick" for j in judged)
    head = f"""{len(judged)} mutants, {len(slipped)} not rejected for an allowed reason.

Each met the quick profile first: {quick} were understood by it, the other {len(judged) - quick} met the default one.  All but a
few of the quick profile's cases stand in the default one as well, with more judged rows.
"""
    sheets = [kinds(judged), checks(judged), peers(judged), faults(judged)] if judged else []
    share = held_out_share(0, 1000)
    last = f"## Faults that the suite has never seen\n\n`oracle mutants --held-out 0`: {share}\n"
    return "\n".join([head, *(sheet.markdown() for sheet in sheets), last]), slipped


def peers_page(only: str, journal: Journal, workers: int) -> tuple[str, list[str]]:
    """The page on what the peers' rules say of correct kernels, and those that the oracle itself turned away."""
    asked = [replace(a, profile="quick") for a in correct() if only in a.candidate and a.seed == 0 and not a.against]
    known = {j.name: j for j in journal.read()}
    missing = [a for a in asked if named(a) not in known]
    known |= {j.name: j for j in finished(judge_right_with_peers, missing, journal, workers)}
    right = [known[named(a)] for a in asked]
    head = f"""A rule that rejects much may only be strict.  These are {len(right)} correct kernels of [correct.md](correct.md),
on the quick profile with seed 0; what the rules say of faulty ones is in [exam.md](exam.md).
"""
    turned_away = [j.name for j in right if j.outcome != Outcome.ACCEPT]
    return "\n".join([head, *([peers(right).markdown()] if right else [])]), turned_away


PAGES = {  # part -> what makes its page, the page, its title
    "correct": (correct_page, "correct.md", "Correct kernels before the gate"),
    "mutants": (mutants_page, "exam.md", "The gate's own exam"),
    "peers": (peers_page, "peers.md", "Other projects' rules before correct kernels"),
}


def main() -> int:
    """Writes the pages.  Returns 1 where a verdict is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PAGES, nargs="*", help="which of them [default: all]")
    parser.add_argument("--only", default="", help="only kernels whose name holds this; the pages are then printed, not written")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--journals", type=Path, default=ROOT / "ci" / "exam", help="folder of the journals [default: ci/exam/]")
    options = parser.parse_args()
    options.journals.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for part in options.part or PAGES:
        make, name, title = PAGES[part]
        journal = Journal(path=options.journals / f"{part}.jsonl")
        page, found = make(options.only, journal, options.workers)
        ran_on = "; ".join(sorted({judged.versions for judged in journal.read()}))
        versions = f"oracle {oracle.__version__}, sources {journal.source[:12]}; {ran_on}"
        text = f"# {title}\n\nMade by `python ci/exam.py {part}` ({versions}).\n\n{page}"
        if options.only:
            print(text)
        else:
            (ROOT / "docs" / name).write_text(text)
        print(f"{part}: {len(found)} not as they must be: {', '.join(found) or 'none'}")
        wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
