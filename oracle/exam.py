"""The gate's own exam: every mutant must be rejected for a reason that names its fault, every correct kernel accepted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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

Yardsticks = dict[Case, tuple[Tensor, Tensor, Tensor]]  # rows of a case: fp32, kept in the dtype of q, of a correct kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A kernel's verdict, and what other projects' rules say of its outputs on the same cases."""

    name: str
    seed: int
    verdict: Verdict
    seconds: float
    peers: dict[str, tuple[bool, bool]]  # rule -> whether it rejects on some randn input, on some input; {} where not asked

    @property
    def understood(self) -> bool:
        """Whether a mutant was rejected, for a reason that counts as having understood its fault."""
        return self.verdict.outcome is Outcome.REJECT and bool(set(self.verdict.reasons) & set(MUTANTS[self.name].reasons))


def judge_mutants(names: Iterable[str], seed: int, with_peers: bool) -> list[Judged]:
    """The verdicts on mutants by the default profile; with `with_peers`, what other projects' rules say as well."""
    prepare, known = shared_preparation(), Yardsticks()
    judged = []
    for name in names:
        target = f"{TABLE}:{name}"
        asked = Asked(candidate=target, seed=seed, against=MUTANTS[name].against)
        verdict, seconds = timed(asked, prepare)
        peers = _peers(asked, prepare, known) if with_peers else {}
        judged.append(Judged(name=name, seed=seed, verdict=verdict, seconds=seconds, peers=peers))
    return judged


def examine(names: Sequence[str], seed: int, *, with_peers: bool = True, workers: int = 2) -> list[Judged]:
    """`judge_mutants` of all names, in their order, on so many processes."""
    parts = [names[i :: 2 * workers] for i in range(2 * workers)]
    with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("spawn")) as pool:
        judged = pool.map(judge_mutants, parts, repeat(seed), repeat(with_peers))
        by_name = {j.name: j for part in judged for j in part}
    return [by_name[name] for name in names]


def timed(asked: Asked, make: Prepare) -> tuple[Verdict, float]:
    """The verdict, and the seconds that it took."""
    start = time.perf_counter()
    verdict = accept(asked, make=make)
    return verdict, time.perf_counter() - start


def shares(verdict: Verdict) -> dict[str, float]:
    """How near a kernel came to each limit: 1 is the limit.  Of a slope, all four conditions must pass it."""
    f = verdict.figures
    if f is None:
        return {}
    slopes = {name: f.slopes[name]["share_of_limit"] for name in sorted(f.slopes)}
    return {"max e": f.max_e, "beside the output's rounding": f.max_e_own, "max e_lse": f.max_e_lse or 0.0} | slopes


def only_by(judged: Sequence[Judged]) -> dict[str, list[str]]:
    """For each reason, the mutants that nothing else would have rejected."""
    found: dict[str, list[str]] = {}
    for one in judged:
        if len(reasons := set(one.verdict.reasons)) == 1:
            found.setdefault(str(reasons.pop()), []).append(one.name)
    return found


def _peers(asked: Asked, prepare: Prepare, known: Yardsticks) -> dict[str, tuple[bool, bool]]:
    """For each rule, whether it rejects the kernel on some case of randn inputs, and of all inputs.  16-bit cases only."""
    rejects = {name: [False, False] for name in RULES}
    candidate = open_kernel(asked.candidate, "cpu")
    try:
        for case in plan(asked, candidate).cases:
            if case.dtype == "fp32":
                continue
            prepared = prepare(case, candidate.record)
            returned = candidate.process.call(prepared.laid.call, timeout_s(case, candidate.record), want_lse=True)
            outputs = _outputs(prepared, returned, known) if isinstance(returned, Returned) else None
            for name, rule in RULES.items():
                if outputs is None or not rule.passes(outputs):
                    rejects[name][1] = True
                    rejects[name][0] |= case.inputs == "randn"
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
