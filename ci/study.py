"""The study that calibrates the error bound: `make study` writes docs/study.md.

Correct kernels and planted faults, all in emulated arithmetic, on eighteen input distributions: what the bound, the LSE's bound
and the slopes say of each.  Five minutes on two cores.  Same seed, same tables.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Precision, Record
from oracle.doors import NEGLIGIBLE, slope_findings
from oracle.families import Family
from oracle.kernels.emulated import VARIANTS
from oracle.measure import Measured, Truth, measure, tell
from oracle.mutants.distributions import DIM, DISTRIBUTIONS, HEADS, HUGE, KEYS, KV_HEADS, ROWS, draw_call
from oracle.mutants.planted import FAULTS
from oracle.references.arithmetic import Arithmetic, precision_of
from oracle.references.emulator import emulate
from oracle.references.operations import exp2
from oracle.references.rounding import DTYPES
from oracle.references.roundoff import TRUNCATIONS, roundoff
from oracle.trial import Seen

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "study.md"
SOURCES = (
    "references/*.py",
    "oracle/mutants/planted.py",
    "oracle/mutants/distributions.py",
    "kernels/emulated.py",
    "oracle/measure.py",
    "oracle/doors.py",
    "ci/study.py",
)
SEEDS = (1, 2, 3, 4, 5)  # of the terms that are validated by themselves
LOOSE = 0.05  # RMS e under which the bound of a correct kernel is called loose
PLAIN = Precision()
E4M3_P = Precision(p_format="e4m3", p_scale=256.0)


def source_sha256() -> str:
    """SHA-256 over the names and bytes of everything that the tables depend on: docs/study.md states it, a test compares it."""
    total = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            total.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return total.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the rules say of one kernel on one input."""

    e: float
    e_det: float
    e_lse: float
    e_lse_averaged: float  # with 3 eps_exp P2g in B_lse, as if exp's errors were independent
    rms: float
    z: float  # largest |z| of the three slopes
    slopes: tuple[str, ...]  # those that fire
    gain: float

    @property
    def caught(self) -> bool:
        """Whether any rule rejects."""
        return not (self.e <= 1 and self.e_lse <= 1) or bool(self.slopes)

    @property
    def caught_averaged(self) -> bool:
        """The same with `e_lse_averaged` in the place of `e_lse`."""
        return not (self.e <= 1 and self.e_lse_averaged <= 1) or bool(self.slopes)


@dataclass(slots=True)
class Bench:
    """One input, and its exact answer under each contract that is asked for."""

    name: str
    call: Call
    rows: Tensor
    truths: dict[Precision, Truth] = field(default_factory=dict)

    def truth(self, precision: Precision) -> Truth:
        """The exact answer, bounded by `precision`."""
        if precision not in self.truths:
            dtype = next(name for name, d in DTYPES.items() if d == self.call.q.dtype)
            constants = roundoff(precision, dtype=dtype, out_dtype=dtype, scaled=False)
            self.truths[precision] = tell(self.call, self.rows, constants)
        return self.truths[precision]

    def judge(self, result: tuple[Tensor, Tensor], precision: Precision) -> Judged:
        """What the rules of `oracle accept` say of a result (out, lse), this input being all that there is."""
        truth = self.truth(precision)
        m = measure(truth, self.call, *result)
        findings, slopes = slope_findings([_seen(self.name, self.call, m)], Record(precision=precision))
        b, x, r = truth.bound, truth.exact, truth.roundoff
        averaged = b.b_lse + 1.05 * r.eps_exp * (3 * x.p2g - 1)
        error = torch.where(torch.isfinite(result[1]), (result[1].double() - x.lse).abs(), math.inf)
        return Judged(
            e=math.inf if m.not_finite else m.worst.units,
            e_det=m.worst_det,
            e_lse=m.worst_lse.units if m.worst_lse else math.inf,
            e_lse_averaged=float((error / averaged)[~x.empty].max()),
            rms=m.rms,
            z=max(abs(s["z"]) for s in slopes.values()),
            slopes=tuple(str(f.reason) for f in findings),
            gain=slopes["gain"]["beta"],
        )


def _seen(name: str, call: Call, measured: Measured) -> Seen:
    """The measure as one case of a trial, for the rules of the slopes."""
    family = Family(
        name=name,
        q_heads=call.q.shape[1],
        kv_heads=call.k_cache.shape[2],
        head_dim=call.q.shape[2],
        head_dim_v=call.v_cache.shape[3],
        scale=call.softmax_scale,
        softcap=call.softcap,
    )
    case = Case(name=name, family=family, q_lens=(call.q.shape[0],), kv_lens=(int(call.seqused_k[0]),), inputs=name)
    return Seen(
        case=case,
        candidate=measured,
        incumbent=None,
        same_bits=None,
        findings=(),
        fills=(),
        calls=1,
        seconds=0.0,
        far_from_fp32=0.0,
    )


def bench(name: str, seed: int, dtype: str = "bf16", every: int = 1) -> Bench:
    """The input called `name`, judged at every `every`-th row."""
    call = draw_call(name, seed, dtype)
    return Bench(name, call, torch.arange(every - 1, call.q.shape[0], every))


CORRECT = {n: a for n, a in VARIANTS.items() if a.qk_format is None and a.v_format is None and a.p_format != "e4m3"}
PLANTED = {n: f.arithmetic for n, f in FAULTS.items() if f.claims.p_format != "e4m3"}  # of kernels with 16-bit P
EIGHT_BIT = {
    "scaled by 256": VARIANTS["p_e4m3"],
    "unscaled": FAULTS["p_e4m3_unscaled"].arithmetic,
    "P in bf16": VARIANTS["textbook"],
    "saturated": FAULTS["p_e4m3_saturated"].arithmetic,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All that is measured on one input."""

    name: str
    shape: tuple[float, ...]  # median |o|, median share of the logits in B, median B_det / B, largest |s|, V2g / V2
    promised: dict[str, Judged]  # correct kernels under the default contract
    own: dict[str, Judged]  # the same under the tightest contract that each keeps
    faults: dict[str, Judged]  # those that change a bit
    eight_bit: dict[str, Judged]  # under the contract of P in E4M3, scaled by 256


def _fitted(name: str, arithmetic: Arithmetic, fault: str = "") -> Arithmetic:
    """The arithmetic, subtracting first where nothing else gets through; the fault of not doing so is left alone."""
    return replace(arithmetic, subtract_first=True) if name == HUGE and fault != "ffma_overflow" else arithmetic


def study(name: str, seed: int = 0) -> Study:
    """The input called `name` put to every correct kernel and every fault."""
    b = bench(name, seed)
    base = emulate(b.call, _fitted(name, Arithmetic()), b.rows)
    promised, own, faults = {}, {}, {}
    for kernel, arithmetic in CORRECT.items():
        arithmetic = _fitted(name, arithmetic)
        result = emulate(b.call, arithmetic, b.rows)
        promised[kernel] = b.judge(result, Precision(row_sum=arithmetic.row_sum))
        own[kernel] = b.judge(result, precision_of(arithmetic))
    for fault, arithmetic in PLANTED.items():
        result = emulate(b.call, _fitted(name, arithmetic, fault), b.rows)
        if not all(torch.equal(*pair) for pair in zip(result, base, strict=True)):
            faults[fault] = b.judge(result, PLAIN)
    eight_bit = {k: b.judge(emulate(b.call, _fitted(name, a), b.rows), E4M3_P) for k, a in EIGHT_BIT.items()}
    t = b.truth(PLAIN)
    x, ratios = t.exact, (t.bound.logit_share, t.bound.b_det / t.bound.b, t.exact.v2g / t.exact.v2.clamp(min=1e-300))
    share, det, grouped = (float(r[~x.empty].median()) for r in ratios)
    shape = (float(x.out.abs().median()), share, det, float(x.s_max.max()), grouped)
    return Study(name=name, shape=shape, promised=promised, own=own, faults=faults, eight_bit=eight_bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the bound that is validated by itself: correct kernels that use it, each under its own contract."""

    what: str
    kernels: tuple[Arithmetic, ...]
    inputs: tuple[str, ...]
    dtype: str = "bf16"
    sink: float | None = None  # nats above the largest LSE of each head


_ALL = tuple(n for n in DISTRIBUTIONS if n != HUGE)
_MORE = (*_ALL, "k-channels")
_TYPICAL = tuple(VARIANTS[n] for n in ("textbook", "splits_4", "lazy_8", "rz16", "everything"))
_FP32 = tuple(VARIANTS[n] for n in ("textbook", "tile_16", "reversed", "splits_4", "lazy_8", "sum_after", "subtract_first"))
TERMS = (
    Term(what="int8 q and k, a scale a token", kernels=(Arithmetic(qk_format="int8"),), inputs=_MORE),
    Term(what="int8 q and k, blocks of 64", kernels=(Arithmetic(qk_format="int8", qk_block=64),), inputs=_MORE),
    Term(what="int8, blocks of 64, K smoothed", kernels=(VARIANTS["int8_qk"],), inputs=_MORE),
    Term(what="e4m3 q and k, blocks of 64", kernels=(Arithmetic(qk_format="e4m3", qk_block=64),), inputs=_MORE),
    Term(what="e4m3 v", kernels=(Arithmetic(v_format="e4m3"),), inputs=_ALL),
    Term(what="e4m3 q, k, v and P, FP22 sums", kernels=(VARIANTS["e4m3"],), inputs=_MORE),
    Term(what="e4m3 P, row sum after", kernels=(replace(VARIANTS["p_e4m3"], row_sum="after"),), inputs=_ALL),
    Term(what="sink 60 below the LSE", kernels=_TYPICAL, inputs=_ALL, sink=-60.0),
    Term(what="sink 5 below the LSE", kernels=_TYPICAL, inputs=_ALL, sink=-5.0),
    Term(what="sink at the LSE", kernels=_TYPICAL, inputs=_ALL, sink=0.0),
    Term(what="sink 12 above the LSE", kernels=_TYPICAL, inputs=_ALL, sink=12.0),
    Term(what="sink 25 above the LSE", kernels=_TYPICAL, inputs=_ALL, sink=25.0),
    Term(what="q, k, v in fp32", kernels=_FP32, inputs=_ALL, dtype="fp32"),
    Term(what="q, k, v in fp16", kernels=_TYPICAL, inputs=tuple(n for n in _ALL if n != "logits-3e3"), dtype="fp16"),
)


def validated(job: tuple[int, str]) -> tuple[int, str, list[Judged]]:
    """Every kernel of TERMS[i] on one input, over SEEDS, at a row in eight."""
    index, name = job
    term, found = TERMS[index], []
    for seed in SEEDS:
        b = bench(name, seed, term.dtype, every=8)
        if term.sink is not None:
            b.call = replace(b.call, sinks=(b.truth(PLAIN).exact.lse.amax(0) + term.sink).float())
            b.truths.clear()
        found += [b.judge(emulate(b.call, a, b.rows), precision_of(a)) for a in term.kernels]
    return index, name, found


SUMS = {
    "to nearest": Arithmetic(),
    "16 products a truncation": VARIANTS["rz16"],
    "each of 8 truncated": VARIANTS["aligned"],
    "each of 16 truncated, 2 guard bits": VARIANTS["wgmma"],
}
HARD = ("positive-V", "positive-32k", "sink", "one-hot", "adversary")


def hard(name: str) -> list[tuple[str, Judged, float]]:
    """Correct kernels of other sums on an input that is hard for them, or for the bound, under the default contract; and the
    largest e if 16 products cost one place of a sum (numerics.md 2.2)."""
    b = bench(name, 0)
    narrow = tell(b.call, b.rows, replace(b.truth(PLAIN).roundoff, truncations=1.0))
    results = {kernel: emulate(b.call, a, b.rows) for kernel, a in SUMS.items()}
    return [(kernel, b.judge(r, PLAIN), measure(narrow, b.call, *r).worst.units) for kernel, r in results.items()]


def polynomial() -> tuple[float, float]:
    """The largest relative error of FlashAttention-4's exp2, and its largest change per nat of the argument."""
    x = torch.linspace(-1.0, 0.0, 1025, dtype=torch.float64)[:-1]
    error = exp2(x, "poly3").double() / torch.exp2(x) - 1
    return float(error.abs().max()), float(error.diff().abs().max()) * 1024 / math.log(2)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _short(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.0f}" if x < 1e5 else f"{x:.0e}"


def _inputs_table(studies: Sequence[Study]) -> str:
    rows = []
    for s in studies:
        size, share, det, largest, grouped = s.shape
        rows.append(
            (s.name, DISTRIBUTIONS[s.name][0], f"{size:.1e}", f"{share:.2f}", _short(det), f"{largest:.1e}", f"{grouped:.2f}")
        )
    return _table(("input", "what", "median o", "logits' share of B", "B_det / B", "largest s", "V2g / V2"), rows)


def _false(judged: Iterable[Judged]) -> int:
    return sum(j.caught for j in judged)


def _correct_row(label: str, promised: Sequence[Judged], own: Sequence[Judged]) -> tuple[str, ...]:
    figures = [max(getattr(j, name) for j in promised) for name in ("e", "e_det", "e_lse", "e_lse_averaged", "z")]
    tight = [max(getattr(j, name) for j in own) for name in ("e", "e_lse")]
    return (label, *(f"{f:.2f}" for f in figures), *(f"{f:.2f}" for f in tight), f"{_false(promised)} + {_false(own)}")


def _correct_tables(studies: Sequence[Study]) -> list[str]:
    figures = ("max e", "e_det", "e_lse", "e_lse, averaged form", "largest z", "own: max e", "own: e_lse", "rejected")
    by_input = [_correct_row(s.name, [*s.promised.values()], [*s.own.values()]) for s in studies]
    by_kernel = []
    for k in CORRECT:
        pairs = [(s.promised[k].rms, s.promised["textbook"].rms) for s in studies]
        rms = [a / b for a, b in pairs if max(a, b) >= NEGLIGIBLE and b > 0]
        row = _correct_row(k, [s.promised[k] for s in studies], [s.own[k] for s in studies])
        by_kernel.append((*row, f"{min(rms):.2f} to {max(rms):.2f}" if rms else "-"))
    return [_table(("input", *figures), by_input), _table(("kernel", *figures, "RMS e over the textbook's"), by_kernel)]


def _fault_tables(studies: Sequence[Study]) -> list[str]:
    """Counts by fault and rule with a line of totals, and e by fault and input."""
    rules: dict[str, Callable[[Judged], bool]] = {
        "e": lambda j: not j.e <= 1,
        "e_lse": lambda j: not j.e_lse <= 1,
        "slopes": lambda j: bool(j.slopes),
        "any": lambda j: j.caught,
        "e_lse, averaged form": lambda j: not j.e_lse_averaged <= 1,
        "any, averaged form": lambda j: j.caught_averaged,
    }
    found, cells = [], []
    for fault in PLANTED:
        active = {s.name: s.faults[fault] for s in studies if fault in s.faults}
        if active:
            least = min(active, key=lambda n: active[n].e)
            counts = [len(active), *(sum(map(rule, active.values())) for rule in rules.values())]
            found.append((fault, counts, f"{least}: {_short(active[least].e)}"))
        cells.append((fault, *(_cell(s.faults.get(fault)) for s in studies)))
    total = [sum(counts) for counts in zip(*(r[1] for r in found), strict=True)]
    heads = ("fault", "active", *rules, "least visible: e")
    rows = [(name, *counts, least) for name, counts, least in [*found, ("**total**", total, "")]]
    return [_table(heads, rows), _table(("fault", *(s.name for s in studies)), cells)]


def _cell(j: Judged | None) -> str:
    """Max e, marked where only another rule rejects, or none."""
    if j is None:
        return "."
    return _short(j.e) + ("" if not j.e <= 1 else "L" if not j.e_lse <= 1 else "s" if j.slopes else "*")


def _eight_bit_table(studies: Sequence[Study]) -> str:
    heads = ["input"]
    for kernel in EIGHT_BIT:
        heads += [f"{kernel}: max e", "RMS e", "e_lse"]
    rows = []
    for s in studies:
        figures = [text for j in s.eight_bit.values() for text in (_short(j.e), f"{j.rms:.3f}", f"{j.e_lse:.2f}")]
        rows.append((s.name, *figures, f"{s.eight_bit['saturated'].gain:+.1e}"))
    return _table([*heads, "saturated: gain"], rows)


def _terms_table(found: dict[int, dict[str, list[Judged]]]) -> str:
    rows = []
    for index, by_input in sorted(found.items()):
        rms = {n: math.sqrt(sum(j.rms**2 for j in js) / len(js)) for n, js in by_input.items()}
        rms = {n: v for n, v in rms.items() if v > 0}
        low, high = min(rms, key=lambda n: rms[n]), max(rms, key=lambda n: rms[n])
        every = [(j, n) for n, js in by_input.items() for j in js]
        e, of_e = max((j.e, n) for j, n in every)
        lse, of_lse = max((j.e_lse, n) for j, n in every)
        loose = sum(v < LOOSE for v in rms.values())
        rows.append(
            (
                TERMS[index].what,
                len(every),
                f"{e:.2f} ({of_e})",
                f"{lse:.2f} ({of_lse})",
                f"{rms[low]:.3f} ({low}) to {rms[high]:.3f} ({high})",
                f"{loose} of {len(by_input)}",
                _false(j for j, _ in every),
            )
        )
    heads = ("correct kernels", "runs", "max e", "max e_lse", "RMS e by input", f"inputs with RMS e under {LOOSE}", "rejected")
    return _table(heads, rows)


TEXT = """# The study behind the error bound

Made by `make study` (`python ci/study.py`) with Python {python} and torch {torch}. Everything is emulated arithmetic; nothing
here ran on a GPU. The same sources give the same tables. What the columns mean and where the bound comes from:
[numerics.md](numerics.md).

sources {sha256}

## Inputs

{heads} query heads on {kv_heads}, {rows} rows, {keys} keys, head dim {dim}, bf16, causal, unless said.

{inputs}

## Correct kernels

{runs} runs under the default contract, {rejected} rejected: the worst of all kernels on each input, then of each kernel on all
inputs. *Averaged form*: B_lse with 3 eps_exp P2g in the place of eps_exp, as if exp's errors were independent. *Own*: under the
tightest contract that the kernel keeps. *Rejected*: under the default contract, and under its own. The last column leaves out
inputs on which RMS e is under {negligible}.

{by_input}

{by_kernel}

## Planted faults

Inputs on which a fault changes at least one bit, and on how many of them a rule rejects.

{counts}

Largest e. `.` no bit changes; `L` only the LSE rejects, `s` only a slope, `*` nothing does.

{cells}

## P in E4M3 under its own contract

u_p = 2^-4, P scaled by 256. *Saturated* is FlashAttention-4's issue 2577.

{eight_bit}

## Terms validated by themselves

Seeds {first} to {last}, every eighth row, each kernel under its own contract. An RMS e of 0.1 to 0.2 is what a sharp bound
gives; far less means that the bound is loose there.

{terms}

## Hard inputs

Correct kernels under the default contract where sums lose most (V = |N|, or one key outweighs the rest), and on an input that is
built against B: its weights all round in the direction of their v, which no natural input does. *With t = 1*: max e if 16
products cost a sum one place, as was assumed before a GPU was measured, and not {places}.

{hard}

FlashAttention-4's polynomial for exp2: relative error at most {poly:.2e}, changing by up to {steep:.1e} of the result a nat.
"""


def report(
    studies: Sequence[Study],
    found: dict[int, dict[str, list[Judged]]],
    hardest: dict[str, list[tuple[str, Judged, float]]],
    sources: str,
) -> str:
    """The text of docs/study.md, `sources` being their hash when the run began."""
    poly, steep = polynomial()
    rows = [
        (name, kernel, f"{j.e:.3f}", f"{e:.3f}", f"{j.e_det:.2f}", f"{j.rms:.3f}", f"{j.gain:+.1e}", ", ".join(j.slopes) or "-")
        for name, judged in hardest.items()
        for kernel, j, e in judged
    ]
    (by_input, by_kernel), (counts, cells) = _correct_tables(studies), _fault_tables(studies)
    runs = [j for s in studies for j in s.promised.values()]
    return TEXT.format(
        python=platform.python_version(),
        torch=torch.__version__,
        sha256=sources,
        heads=HEADS,
        kv_heads=KV_HEADS,
        rows=ROWS,
        keys=KEYS,
        dim=DIM,
        inputs=_inputs_table(studies),
        runs=len(runs),
        rejected=_false(runs),
        negligible=NEGLIGIBLE,
        places=TRUNCATIONS,
        by_input=by_input,
        by_kernel=by_kernel,
        counts=counts,
        cells=cells,
        eight_bit=_eight_bit_table(studies),
        first=SEEDS[0],
        last=SEEDS[-1],
        terms=_terms_table(found),
        hard=_table(("input", "sums", "max e", "with t = 1", "e_det", "RMS e", "gain", "slopes that fire"), rows),
        poly=poly,
        steep=steep,
    )


def main() -> int:
    """Prints and writes the tables.  Returns 1 where a correct kernel is rejected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="inputs, by commas; docs/study.md is then left alone")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*DISTRIBUTIONS]
    jobs = [(i, n) for i, term in enumerate(TERMS) for n in term.inputs if not options.only or n in names]
    start, sources = time.perf_counter(), source_sha256()
    found: dict[int, dict[str, list[Judged]]] = {}
    with ProcessPoolExecutor(max_workers=2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = [pool.submit(validated, job) for job in jobs]
        hardest = {} if options.only else {n: pool.submit(hard, n) for n in HARD}
        studies = list(pool.map(study, names))
        for future in waiting:
            index, name, judged = future.result()
            found.setdefault(index, {})[name] = judged
    text = report(studies, found, {n: future.result() for n, future in hardest.items()}, sources)
    print(text)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if not options.only:
        DOCUMENT.write_text(text)
    kept = [j for s in studies for js in (s.promised, s.own) for j in js.values()]
    return 1 if _false([*kept, *(j for by_input in found.values() for js in by_input.values() for j in js)]) else 0


if __name__ == "__main__":
    sys.exit(main())
