"""Makes docs/kernels.md of docs/gpu/triton.json and docs/gpu/tilelang.json: `python ci/gpu/kernels_page.py`."""

# ruff: noqa: E501
# Lines of the page are text.

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = ROOT / "docs" / "kernels.md", ROOT / "docs" / "gpu"


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = list(columns)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows])


def pair_row(kernel: str, f: Facts) -> tuple[object, ...]:
    """What sustained pairs gave for one kernel at one shape."""
    s = f["shape"]
    heads = f"{s['q_heads']}:{s['kv_heads']} x {s['dim']}" + (f", window {s['left'] + 1}" if s["left"] >= 0 else "")
    spread = f"{f['ratio']:.3f} [{f['ratio_least']:.3f}, {f['ratio_largest']:.3f}]"
    errors = f"{f['mean_error']:.2e} / {f['mean_error_of_rounding']:.2e}"
    return kernel, heads, f"{s['context']:,}", s["page"], f"{f['ms']:.2f}", spread, f.get("bar", ""), errors


def pairs(triton: Facts, tilelang: Facts) -> str:
    """Every kernel at every shape."""
    shipped = [(f["kernel"], f) for f in triton["pairs"]] + [(f"tilelang hd{f['shape']['dim']}", f) for f in tilelang["pairs"]]
    others = [(f["kernel"], f) for f in triton["flashinfer"]]
    columns = ("kernel", "heads x head dim", "context", "page", "ms", "ratio [least, largest]", "bar", "mean error / of rounding")
    return table(columns, [pair_row(*one) for one in shipped + others])


def beside(tilelang: Facts) -> str:
    """The kernel beside the study's prototypes, one process."""
    rows = [(name, f"{f['ms']:.2f}", f"{f['ratio']:.3f}") for name, f in tilelang["beside_the_prototypes"]["runs"].items()]
    return table(("kernel and context", "ms", "ratio"), rows)


def verdicts(tilelang: Facts) -> str:
    """What the oracle says of the TileLang kernels on the GPU."""
    rows = []
    for name, v in tilelang["verdicts"].items():
        f = v["figures"]
        rows.append((f"tilelang {name}", v["outcome"], v["door"], f["max_e"], f["max_e_lse"], f["rms_e"]))
    return table(("kernel", "verdict", "door", "max e", "max e_lse", "RMS e"), rows)


def page() -> str:
    """The text of docs/kernels.md."""
    triton, tilelang = (json.loads((DATA / f"{name}.json").read_text()) for name in ("triton", "tilelang"))
    v, twin, start = tilelang["versions"], tilelang["twin"], tilelang["start"]
    slowest = max(seconds for f in start.values() for seconds in f["load_and_first_run_s"])
    plain, new = triton["plain_16_to_32_rows"], triton["new_length_first_and_second_call_ms"]
    calls = ", ".join(f"{what}: {first:g} and {second:g}" for what, (first, second) in new.items())
    return f"""# Kernels on an H200

Made by `python ci/gpu/kernels_page.py` of [gpu/triton.json](gpu/triton.json) (`{triton["versions"]["command"]}`) and
[gpu/tilelang.json](gpu/tilelang.json) (`{v["command"]}`), which say how each number was found. {v["device"]}, driver
{v["driver"]}, torch {v["torch"]}, Triton {v["triton"]}, TileLang {v["tilelang"]}, nvcc {v["nvcc"]}. One run of each.

## Speed

8,192 new rows, causal, bf16, one sequence. {v["protocol"][0].upper()}{v["protocol"][1:]}. The bars are those that the kernels were
written for.

{pairs(triton, tilelang)}

The plain Triton kernel with 16 and with 32 rows of a tile, 32:4 x 512 at context 0: {plain["prefill_16_ms"]} and
{plain["prefill_32_ms"]} ms, {plain["less_time"]:.0%} less. First and second call of `split_tuned` at lengths that it has not seen, ms ({calls}):
only the very first compiles.

Beside the prototypes of the study that the TileLang kernel grew from (E64 and EM64, pages of 64; E16, pages of 16), one process:

{beside(tilelang)}

## Right

{verdicts(tilelang)}

(`oracle accept --device cuda --profile quick`.) Hostile batches against fp64, each run 400 times with the same bits, and with other
fills and page ids: {len(tilelang["cases"])}. compute-sanitizer, memcheck: {tilelang["memcheck"]["errors"]} errors.

## Ahead of time

`oracle build-kernels` on a machine with TileLang and nvcc; `ATTENTION_ORACLE_LIBRARIES` names the folder where they run. Bits the same
as just in time: {"all" if twin["all_same"] else "not all"} of {twin["batches"]} batches. Compiling just in time takes
{min(twin["compile_s"].values()):.0f} to {max(twin["compile_s"].values()):.0f} s a kernel; loading a library and its first run, CUDA being up, {slowest:.3f} s at most. NVRTC, another way to
compile, gives other bits in {tilelang["nvrtc"]["as TileLang calls it"]["elements_that_differ"]:.1e} of the elements: TileLang does not hand it `--use_fast_math`, and division and
exp2 then round otherwise; that this is all of it is not proved.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
