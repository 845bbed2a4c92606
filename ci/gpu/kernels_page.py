"""Makes docs/kernels.md of the reports in docs/gpu and the lock of sm_90: `python ci/gpu/kernels_page.py`.

The reports: kernels-run1.json and so on (`make gpu`, once each), shared_kv.json (the part of that name), verdicts.json,
sanitized.json, machine_code.json, eight_bit.json, fp8_tilelang.json, eight_bit_drift.json,
fuzzed.json, decode.json, and once.json of what was measured once.
"""

# ruff: noqa: E501
# Lines of the page are text.

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Sequence

from eight_bit_page import ceilings, cuts, decode, drift, eight_bit, fuzzed, kinds, paired, tilings
from reports import DATA, ROOT, Facts, bar_of, report, table

from oracle.kernels.table import KERNELS

PAGE, LOCK = ROOT / "docs" / "kernels.md", ROOT / "ci" / "thresholds" / "sm_90.toml"

LEAST_SHARE = 0.97  # of a prototype's rate, that the kernel was asked for


def runs() -> list[Facts]:
    """The reports of all runs."""
    return [json.loads(path.read_text()) for path in sorted(DATA.glob("kernels-run*.json"))]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median [least, largest]."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def rows_of(found: Sequence[Facts], kernel: str, **shape: int) -> list[Facts]:
    """What every run has of a kernel at the shape."""
    return [
        f for run in found for f in run["pairs"] if f["kernel"] == kernel and all(f["shape"][n] == v for n, v in shape.items())
    ]


def ratio(found: Sequence[Facts], kernel: str, **shape: int) -> float:
    """The median ratio over the runs."""
    return float(statistics.median(f["ratio"] for f in rows_of(found, kernel, **shape)))


def cut(found: Sequence[Facts]) -> str:
    """Which runs the end of the GPU's time cut, in one sentence."""
    short = [f"{len(run['pairs'])} of {len(found[0]['pairs'])} rows" for run in found if "from" in run["versions"]]
    return f"{len(found)} runs, {len(short)} of them cut short ({', '.join(short)})." if short else f"{len(found)} runs."


def pairs(found: Sequence[Facts]) -> str:
    """Every kernel at every shape: over all runs."""
    lines = []
    for first in found[0]["pairs"]:
        s, all_runs = first["shape"], rows_of(found, first["kernel"], **first["shape"])
        measured = [f for f in all_runs if "ratio" in f]
        heads = f"{s['q_heads']}:{s['kv_heads']} x {s['dim']}" + (f", window {s['left'] + 1}" if s["left"] >= 0 else "")
        where = (first["kernel"], heads, f"{s['context']:,}", s["page"], len(measured))
        if not measured:
            lines.append((*where, first["absent"], "", "", ""))
            continue
        ratios = [f["ratio"] for f in measured]
        errors = f"{first['mean_error']:.2e} / {first['mean_error_of_rounding']:.2e}"
        lines.append((*where, spread([f["ms"] for f in measured], 2), spread(ratios), bar_of(first["bar"], ratios), errors))
    columns = ("kernel", "heads x head dim", "context", "page", "runs", "ms", "ratio", "bar", "mean error / of rounding")
    return table(columns, lines)


def beside_flashinfer(found: Sequence[Facts]) -> str:
    """The rates at head dim 128 over FlashInfer's."""
    said = []
    for kernel in ("split_tuned", "tilelang"):
        shares = (
            ratio(found, kernel, dim=128, context=c) / ratio(found, "flashinfer fa2", dim=128, context=c) for c in (0, 16384)
        )
        said.append(f"{kernel} has {' and '.join(f'{share:.2f}' for share in shares)} times that")
    return ", ".join(said)


def first_calls(found: Sequence[Facts]) -> str:
    """Milliseconds of first and second calls, the largest of the runs that have them."""
    asked = [run for run in found if "first_calls" in run]
    names = asked[0]["first_calls"]
    lengths = next(f for f in names.values() if isinstance(f, dict))

    def cell(name: str, length: str) -> str:
        calls = [run["first_calls"][name][length] for run in asked]
        return f"{max(first for first, _ in calls):.1f}, then {max(second for _, second in calls):.1f}"

    return table(
        ("kernel", *lengths),
        [(name, *(cell(name, length) for length in lengths)) for name in names if isinstance(names[name], dict)],
    )


def verdicts(locked: Facts, others: Facts) -> str:
    """What the oracle says: of locked kernels by the lock, of the others by their verdicts."""
    lines = []
    for name, kernel in locked.items():
        whole = kernel.get("family", {}).get("all", {})
        numbers = [f"{whole[n]:.3g}" if n in whole else "" for n in ("max_e", "max_e_lse", "rms_e")]
        lines.append(
            (name, kernel["profile"], kernel["against"], kernel["verdict"], kernel["door"] or kernel["reason"], *numbers)
        )
    for name, v in others.items():
        if "outcome" not in v:
            continue
        numbers = [f"{v['figures'][n]:.3g}" if n in v["figures"] else "" for n in ("max_e", "max_e_lse", "rms_e")]
        said = v["door"] or ", ".join(v["reasons"])
        lines.append((name, "quick", _incumbent(v["incumbent"]), v["outcome"], said, *numbers))
    return table(("kernel", "profile", "against", "verdict", "door or reasons", "max e", "max e_lse", "RMS e"), lines)


def missing(locked: Facts) -> str:
    """Which kernels for a GPU the lock has not, in one sentence."""
    wanted = [name for name, row in KERNELS.items() if row.expect and ("triton" in name or "cpu" not in row.devices)]
    absent = [name for name in wanted if name not in locked]
    return f" Not in the lock: {', '.join(absent)}." if absent else ""


def _incumbent(name: str) -> str:
    return "" if name.startswith("emulator") else name


def shared(found: Facts) -> str:
    """Errors of the ways to rebuild K, beside each exact answer."""
    lines = [
        (inputs, what, kernel, f["rms_e"], f["ratio"], f["max_e"], f["max_e_lse"])
        for inputs, answers in found.items()
        for what, kernels in answers.items()
        for kernel, f in kernels.items()
    ]
    return table(("inputs", "beside attention over", "kernel", "RMS e", "over split_tuned's", "max e", "max e_lse"), lines)


def sanitized(found: Facts) -> str:
    """What compute-sanitizer said."""
    return table(("tool", "kernel", "calls", "summary"), [(*n.split(), f["calls"], f["summary"]) for n, f in found.items()])


def machine_code(found: Facts) -> str:
    """What each compiler makes of the arithmetic."""
    rows = []
    for name, f in found.items():
        other = f["other_than_nvcc_fast"]
        said = ", ".join(f"{n} {count:+d}" for n, count in sorted(other.items(), key=lambda o: -abs(o[1]))[:4])
        rows.append((name, f["floating_point"], f"{said} and {len(other) - 4} more" if other else "nothing"))
    return table(("compiler", "floating-point instructions", "other than nvcc with fast arithmetic"), rows)


def beside(once: Facts) -> str:
    """The TileLang kernel beside the study's prototypes, one process."""
    runs = once["beside_the_prototypes"]["runs"]
    lines = []
    for name, theirs in runs.items():
        prototype, context = name.split()
        if prototype.startswith("ours"):
            continue
        ours = runs[f"ours{prototype[-2:]} {context}"]
        share = ours["ratio"] / theirs["ratio"]
        said = f"{share:.3f}" + (f": **{LEAST_SHARE} missed by {LEAST_SHARE - share:.3f}**" if share < LEAST_SHARE else "")
        lines.append(
            (prototype, f"{int(context):,}", theirs["ms"], f"{theirs['ratio']:.3f}", ours["ms"], f"{ours['ratio']:.3f}", said)
        )
    return table(("prototype", "context", "its ms", "its ratio", "ms", "ratio", "over the prototype's"), lines)


def decisions(found: Sequence[Facts]) -> str:
    """What the projects that this one grew from decided or reported, and what was measured here."""
    less = [run["plain"]["less_time"] for run in found if "plain" in run]
    not_compiled = [run["first_calls"]["split_tuned, nothing compiled"] for run in found if "first_calls" in run]
    cold = [calls["8192 rows after 0"][0] / 1000 for calls in not_compiled]
    new = [calls["8191 rows after 0"][0] for calls in not_compiled]
    at = [{"dim": 512, "page": 64, "context": c} for c in (0, 16384, 57344)]
    tilelang = " / ".join(f"{ratio(found, 'tilelang', **s):.2f}" for s in at)
    split = " / ".join(f"{ratio(found, 'split_tuned', **s):.2f}" for s in at)
    errors = {i: answers["the pool's K"]["rebuilt_bf16"]["ratio"] for i, answers in report("shared_kv")["shared_kv"].items()}
    k_bf16 = " and ".join(f"{times:.2f} ({inputs})" for inputs, times in errors.items())
    folded = ratio(found, "shared_kv folded", dim=512, page=64, context=57344)
    lines = [
        ("32 query rows a tile in place of 16 (the plain Triton kernel)", "41 % less time", f"{100 * statistics.median(less):.0f} % less"),
        ("FlashInfer FA2 at head dim 512 (ratio at contexts 0 / 16k / 57k)", "0.27 / 0.28 / 0.28", f"split_tuned {split}"),
        ("FlashAttention 4 at head dim 512", "0.44 to 0.49, as reported", f"tilelang {tilelang}"),
        ("a TileLang kernel of one's own", "0.64 to 0.65, as reported; the other one, measured: 0.59 / 0.63 / 0.61", f"tilelang {tilelang}"),
        ("cuDNN dropped for what a call at a new length costs", "0.8 to 2.8 s", f"Triton {max(cold):.1f} s once, then {max(new):.0f} ms at a new length"),
        ("K rebuilt from V in bf16", "1.6 to 1.8 times the error", f"{k_bf16} times"),
        ("the folded pool, at context 57k", "5/8 of the bytes", f"ratio {folded:.2f} beside split_tuned's {ratio(found, 'split_tuned', **at[2]):.2f}"),
    ]  # fmt: skip
    return table(("decision", "theirs", "here"), lines)


def page() -> str:
    """The text of docs/kernels.md."""
    found, once, lock = runs(), report("once"), tomllib.loads(LOCK.read_text())
    said, tools = report("verdicts"), report("sanitized")
    first = found[0]
    eight, drifted, decoded = report("eight_bit"), report("eight_bit_drift"), report("decode")
    tilelang, searched = report("fp8_tilelang"), report("fuzzed")
    timed = paired(eight, tilelang)
    v, bits, twin, code = first["versions"], first["bits"], once["twin"], report("machine_code")
    return f"""# Kernels on an H200

{v["device"]}, driver {v["driver"]}, Python {v["python"]}, torch {v["torch"]}, Triton {v["triton"]}; libraries built by TileLang {once["tilelang"]} and
nvcc {once["nvcc"]}. Made by `python ci/gpu/kernels_page.py` of the reports in [gpu](gpu), each with the command that wrote it, and of the lock
`ci/thresholds/sm_90.toml`.

## Speed

`make gpu OUT=FOLDER`, one process a run: median [least, largest] of the runs. {cut(found)} 8,192 new rows, causal, bf16, one sequence.
{v["protocol"][0].upper()}{v["protocol"][1:]}. The bars are those that the kernels were written for.

{pairs(found)}

`tilelang` is the kernel of the head dim, hd512, hd256 or hd128. At head dim 128 the bar is FlashInfer's rate: at contexts 0 and 16,384
{beside_flashinfer(found)}.

First and second call at lengths that a process has not seen, ms, CUDA being up, the largest of the runs. For TileLang's libraries the
first call includes loading them (500 ms were allowed), and no compiler is there:

{first_calls(found)}

Beside the prototypes of the study that the TileLang kernel grew from (E64 and EM64, pages of 64; E16, pages of 16; single sequence, no
window, no LSE), one process, one run; the prototypes are not part of this repository:

{beside(once)}

## 8 bits

Verdict and errors by the lock, drift by `{drifted["versions"]["command"]}`: mean KL from the checkpoint in bf16 with its 95 % interval, beside
that of FP8 weights; speed by the tables below. `tilelang-fp8-hd512` stands in the global layers alone, the others in all layers.
`triton-fp8-lazy`, `-narrow` and `-unscaled` are known failures, planted: P that saturates behind a maximum that is too low (FlashAttention
issue 2577), P.V added up in the tensor core's FP22 from the first key to the last, P that underflows behind a sink. FP22 shows in long
contexts alone, so `-narrow` is judged by the default profile; two minutes of `oracle fuzz` did not meet it.

{kinds(lock["kernel"], said["verdicts"], drifted, timed)}

Layers that carry the drift:

{drift(drifted)}

`{eight["versions"]["command"]}`. {eight["versions"]["protocol"][0].upper()}{eight["versions"]["protocol"][1:]}. What the card's products allow,
computed for head dims of 512, 256 and 128 (`ceiling` in the script says how):

{ceilings(eight)}

8,192 new rows, beside the BF16 TileLang kernel in the same process. *Quantising timed*: q, and all keys and values, are quantised in every
call; *codes ready*: before it. `tilelang_fp8` is `oracle/kernels/tilelang_fp8.py`, the others are of `oracle/kernels/triton_eight_bit.py`.

{eight_bit(timed)}

Cuts of the TileLang kernel that were tried, codes ready, after 16,384 keys (`{tilelang["versions"]["command"]}`, one sustained pair each); the
fastest is shipped, and timed above. Each was checked on ragged, windowed and empty batches beside the CPU's kernel of the same codes:

{cuts(tilelang)}

## Decode

`{decoded["versions"]["command"]}`. {decoded["versions"]["protocol"][0].upper()}{decoded["versions"]["protocol"][1:]}.

{decode(decoded)}

Not shipped:

{tilings(decoded)}

## Decisions

{decisions(found)}

## Right

`oracle lock NAME --device cuda`, with the profile named (rows with a name of `oracle kernels`), and `python3 ci/gpu/verdicts.py OUT`.{missing(lock["kernel"])}

{verdicts(lock["kernel"], said["verdicts"])}

Searched for a call that they get wrong (`{searched["versions"]["command"]}`, all at once; 1 is the limit of e):

{fuzzed(searched["fuzzed"])}

Hostile batches of every TileLang family and page size against fp64, each run {bits["reruns"]} times with the same bits, and with other fills and page
ids: {sum(all(x for x in b.values() if isinstance(x, bool)) for b in bits["batches"].values())} of {len(bits["batches"])} (`make gpu PARTS=bits`).

`python3 ci/gpu/sanitized.py OUT`, compute-sanitizer:

{sanitized(tools["found"])}

## K and V of one projection

Three ways to read 640 elements of a key in place of 1024 (`oracle/kernels/shared_kv.py`), beside split_tuned, which reads K
(`make gpu PARTS=shared_kv`). *Drawn*: the real model's shape and scale, K's norm weight 1 + 0.3 N(0, 1). *Captured*: a global layer of
the small Gemma 4 of this repository, columns put in the order that the kernels take.

{shared(report("shared_kv")["shared_kv"])}

The contract asks for attention over the K in the pool, which was rounded to bf16. V times the weight is another K: what lies between
the two is the rounding of K, and at these logits it moves the LSE by thirty times its bound and more. So **all three are rejected**.
rebuilt_fp32 is not for its arithmetic: beside attention over V times the weight, not rounded, it is as exact as a kernel that reads K
is beside the pool's K. rebuilt_bf16, which rounds K again, and folded, which rounds q times the weight, exceed the bound of the LSE
beside that answer too. A contract for such a pool would have to name V and the weight as what the kernel is given.
None of the three is faster than split_tuned here, although they read five eighths of the bytes: that products and registers are
short where these kernels run, and not the cache's bytes, is a reading, and no profile was taken.

## Ahead of time

`oracle build-kernels` on a machine with TileLang and nvcc; `ATTENTION_ORACLE_LIBRARIES` names the folder where they run. Bits the same as
just in time: {"all" if twin["all_same"] else "not all"} of {twin["batches"]} batches (`make gpu PARTS=twin`, where TileLang is installed; one run). Compiling just in time takes
{min(twin["compile_s"].values()):.0f} to {max(twin["compile_s"].values()):.0f} s a kernel.

NVRTC, TileLang's other compiler, gives other bits in {once["nvrtc"]["elements_that_differ"]:.1e} of the elements: TileLang hands `--use_fast_math` to nvcc
alone. `{code["versions"]["command"]}` counts the floating-point instructions of hd512's machine code by name:

{machine_code(code["found"])}

With the option both compilers take the same ones, and without it too. That the bits are then the same was not run.

TileLang's own launcher lets a kernel start while the one before it in the stream still runs, although its kernels never wait for that
one. The libraries launch in plain stream order (`oracle/kernels/ahead_of_time.py`).
"""


if __name__ == "__main__":
    PAGE.write_text(page())
