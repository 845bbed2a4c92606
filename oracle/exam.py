"""The gate's own exam: every mutant must be rejected for a reason that names its fault, every correct kernel accepted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context

from torch import Tensor

from oracle.accept import Asked, accept, open_kernel, plan, textbook
from oracle.cases import Case
from oracle.isolation.outcome import Returned
from oracle.mutants.peers import RULES, Outputs
from oracle.mutants.table import MUTANTS
from oracle.preparation import shared_preparation
from oracle.references.dense import dense, dense_fp32
from oracle.trial import Prepare, Prepared, timeout_s
from oracle.verdict import Outcome, Verdict

TABLE = "oracle.mutants.table"
PROFILES = ("quick", "default")  # a mutant meets the next one only where the last has not understood it

Yardsticks = dict[Case, tuple[Tensor, Tensor, Tensor]]  # rows of a case: fp32, kept in the dtype of q, of a correct kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of a kernel before the gate, and what other projects' rules say of its outputs on the same calls."""

    name: str
    seed: int
    profile: str
    outcome: str
    reasons: tuple[str, ...]
    shares: dict[str, float]  # how near it came to each limit: 1 is the limit; of a slope, all four conditions must pass it
    ratio: float | None  # RMS e over the incumbent's, everywhere
    seconds: float
    peers: dict[str, tuple[bool, bool]]  # rule -> whether it rejects on some randn input, on some input; {} where not asked
    versions: str  # of torch and of the CPU's instructions

    @property
    def understood(self) -> bool:
        """Whether a mutant was rejected, for a reason that counts as having understood its fault."""
        return self.outcome == Outcome.REJECT and bool(set(self.reasons) & set(MUTANTS[self.name].reasons))


def judge(name: str, asked: Asked, make: Prepare) -> Judged:
    """What becomes of the kernel that is asked for with a seed and a profile; the peers are not asked."""
    start = time.perf_counter()
    verdict = accept(asked, make=make)
    return Judged(
        name=name,
        seed=asked.seed or 0,
        profile=asked.profile,
        outcome=str(verdict.outcome),
        reasons=tuple(map(str, verdict.reasons)),
        shares=shares(verdict),
        ratio=verdict.ratios[0].value if verdict.ratios else None,
        seconds=time.perf_counter() - start,
        peers={},
        versions=f"torch {verdict.environment['torch']}, {verdict.environment['cpu_capability']}",
    )


def judge_mutant(name: str, seed: int, make: Prepare) -> Judged:
    """What becomes of a mutant under the quick profile, and under the default one if the quick one has not understood it."""
    for profile in PROFILES:
        asked = Asked(candidate=f"{TABLE}:{name}", seed=seed, against=MUTANTS[name].against, profile=profile)
        judged = judge(name, asked, make)
        if judged.understood:
            break
    return judged


def judge_mutants(names: Iterable[str], seed: int, with_peers: bool) -> list[Judged]:
    """What becomes of mutants; with `with_peers`, what other projects' rules say as well."""
    prepare, known = shared_preparation(), Yardsticks()
    judged = [judge_mutant(name, seed, prepare) for name in names]
    return [told_by_peers(one, prepare, known) for one in judged] if with_peers else judged


def told_by_peers(mutant: Judged, prepare: Prepare, known: Yardsticks) -> Judged:
    """The same, with what the peers say on the cases of its verdict."""
    asked = Asked(candidate=f"{TABLE}:{mutant.name}", seed=mutant.seed, profile=mutant.profile)
    return replace(mutant, peers=asked_peers(asked, prepare, known))


def examine(names: Sequence[str], seed: int, *, with_peers: bool = True, workers: int = 2) -> list[Judged]:
    """`judge_mutants` of all names, in their order, on so many processes."""
    parts = [names[i :: 2 * workers] for i in range(2 * workers)]
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        judged = pool.map(judge_mutants, parts, repeat(seed), repeat(with_peers))
        by_name = {j.name: j for part in judged for j in part}
    return [by_name[name] for name in names]


def shares(verdict: Verdict) -> dict[str, float]:
    """How near a kernel came to each limit."""
    f = verdict.figures
    if f is None:
        return {}
    slopes = {name: f.slopes[name]["share_of_limit"] for name in sorted(f.slopes)}
    return {"max e": f.max_e, "beside the output's rounding": f.max_e_own, "max e_lse": f.max_e_lse or 0.0} | slopes


def only_by(judged: Sequence[Judged]) -> dict[str, list[str]]:
    """For each reason, the mutants that nothing else would have rejected."""
    found: dict[str, list[str]] = {}
    for one in judged:
        if len(set(one.reasons)) == 1:
            found.setdefault(one.reasons[0], []).append(one.name)
    return found


def asked_peers(asked: Asked, prepare: Prepare, known: Yardsticks) -> dict[str, tuple[bool, bool]]:
    """For each rule, whether it rejects the kernel on the 16-bit cases of its suite: with randn inputs, and with their own.

    Peers test on randn, so every case is run with randn inputs as well, but for those that are captures.
    """
    rejects = {name: [False, False] for name in RULES}
    candidate = open_kernel(asked.candidate, "cpu")
    try:
        own = [case for case in plan(asked, candidate).cases if case.dtype != "fp32"]
        normal = {replace(case, inputs="randn") for case in own if not case.captured}
        for case in [*own, *sorted(normal - {*own}, key=lambda c: c.name)]:
            prepared = prepare(case, candidate.record)
            returned = candidate.process.call(prepared.laid.call, timeout_s(case, candidate.record), want_lse=True)
            outputs = _outputs(prepared, returned, known) if isinstance(returned, Returned) else None
            for name, rule in RULES.items():
                if outputs is None or not rule.passes(outputs):
                    rejects[name][0] |= case in normal
                    rejects[name][1] = True
    finally:
        candidate.process.close()
    return {name: (on_randn, on_all) for name, (on_randn, on_all) in rejects.items()}


def _outputs(prepared: Prepared, returned: Returned, known: Yardsticks) -> Outputs:
    """What the rules look at, at the judged rows."""
    rows, call = prepared.truth.rows, prepared.laid.call
    if prepared.case not in known:
        kept = dense(call, call.q.dtype)[0][rows].double()
        known[prepared.case] = (dense_fp32(call)[0][rows].double(), kept, textbook(prepared)[0].double())
    fp32, twin, correct = known[prepared.case]
    got = returned.out[rows].double()
    return Outputs(got=got, exact=prepared.truth.exact.out, fp32=fp32, twin=twin, correct=correct, dtype=call.q.dtype)
