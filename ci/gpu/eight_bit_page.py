"""The parts of docs/kernels.md on 8 bits and on decode, made of the reports of that name and the lock."""

from __future__ import annotations

import statistics

from reports import Facts, bar_of, table


def paired(found: Facts, tilelang: Facts) -> list[Facts]:
    """What was timed beside the BF16 TileLang kernel: the Triton kernels, and the fastest cut of the TileLang one."""
    shape = next(f["shape"] for f in found["pairs"] if f["shape"]["dim"] == 512)
    own = [f for f in tilelang["pairs"] if f["kernel"] != "tilelang bf16"]
    named = [
        f | {"kernel": f["kernel"].replace(tilelang["best"], "tilelang_fp8"), "shape": shape | {"context": f["context"]}}
        for f in own
    ]
    return [*found["pairs"], *named]


def cuts(tilelang: Facts) -> str:
    """The cuts of the TileLang kernel that were tried."""
    rows = []
    for f in tilelang["cuts"]:
        name = f["kernel"].partition(",")[0]
        if name not in tilelang["checked"]:
            continue
        checked = {case: c for case, c in tilelang["checked"][name].items() if case != "right"}
        most = max(c["share"] for c in checked.values())
        rows.append((f"`{name}`", f["ratio"], f["over_tilelang"], most))
    return table(("cut", "ratio", "over tilelang's", "largest difference from the CPU's, of what 8 bits cost"), rows)


def eight_bit(found: list[Facts]) -> str:
    """Every 8-bit kernel beside the BF16 one."""
    lines = []
    for f in found:
        s = f["shape"]
        where = (f["kernel"], f"{s['q_heads']}:{s['kv_heads']} x {s['dim']}", f"{s['context']:,}")
        if "ratio" not in f:
            lines.append((*where, f["absent"], "", "", "", ""))
            continue
        over, errors = f["over_tilelang"], f"{f['mean_error']:.2e} / {f['mean_error_of_rounding']:.2e}"
        lines.append((*where, f["ms"], f["ratio"], over or "", bar_of(f["bar"], [over or 0.0]), errors))
    columns = ("kernel", "heads x head dim", "context", "ms", "ratio", "over tilelang's", "bar", "mean error / of rounding")
    return table(columns, lines)


def ceilings(found: Facts) -> str:
    """The rates of products, and what an attention made of them can gain."""
    products = table(
        ("products", "over bf16's", "TFLOP/s"),
        [(name, f["ratio"], f"{statistics.median(f['kernel_tflops']):.0f}") for name, f in found["rates"].items()],
    )
    gains = table(
        ("attention", "tensor cores alone", "float32 work, as a share of that time", "if nothing overlaps"),
        [(name, *f.values()) for name, f in found["ceiling"].items() if isinstance(f, dict)],
    )
    return f"{products}\n\n{gains}"


def decode(found: Facts) -> str:
    """The decode kernel at every shape beside a copy."""
    lines = []
    for f in found["table"]:
        s = f["shape"]
        others = ", ".join(f"{n.removesuffix('_ms')} {f[n]}" for n in ("split_tuned_ms", "prefill_16_ms") if n in f)
        lines.append(
            (
                f"{s['q_heads']}:{s['kv_heads']} x {s['dim']}",
                f"{s['batch']} x {s['keys']:,}",
                s["tokens"],
                s["cache"],
                s["page"],
                f["ms"],
                f["tb_s"],
                f["ratio"],
                bar_of(f["bar"], [f["ratio"]]),
                "yes" if f["same_bits_alone"] else "**no**",
                f"{f['mean_error']:.2e} / {f['mean_error_of_rounding']:.2e}",
                others,
            )
        )
    columns = ("heads x head dim", "batch x keys", "new tokens", "cache", "page", "ms", "TB/s", "of a copy's", "bar")
    return table((*columns, "same bits alone", "mean error / of rounding", "others, ms"), lines)


KINDS = {  # a name of `oracle kernels` -> its configuration of `oracle drift`, and its name among the pairs
    "triton-fp8": ("bf16+triton-fp8", "fp8"),
    "triton-fp8-hadamard": ("bf16+triton-fp8-hadamard", "fp8_hadamard"),
    "triton-int8": ("bf16+triton-int8", "int8"),
    "triton-int8-v8": ("bf16+triton-int8-v8", "int8_v8"),
    "tilelang-fp8-hd512": ("bf16+tilelang-fp8-hd512@global", "tilelang_fp8"),
    "triton-fp8-lazy": ("", ""),
    "triton-fp8-narrow": ("", ""),
    "triton-fp8-unscaled": ("", ""),
}
FIGURES = ("max_e", "rms_e")
LAYERS = 6  # that are named, of a checkpoint with many
BESIDE = ("bf16+other-attention", "fp8-weights", "fp8")  # what stands beside them: the floor, and FP8 weights
RUNS = {"gemma4-mini": "small Gemma 4", "long": "the same, blocks of 32,768", "smollm2": "SmolLM2"}


def kinds(locked: Facts, others: Facts, drifted: Facts, found: list[Facts]) -> str:
    """Verdict, error, drift and speed of each, and the drift of FP8 weights, in one table."""
    runs = {run: about for run, about in RUNS.items() if run in drifted["runs"]}
    columns = ("kernel", "verdict", "door or reason", "max e", "RMS e", *(f"KL in {about}, nats" for about in runs.values()))
    lines = []
    for name, (configuration, timed) in KINDS.items():
        drifts = (_kl(drifted["runs"][run], configuration) for run in runs)
        speeds = (_speed(found, f"{timed}, {codes}") for codes in ("quantising timed", "codes ready"))
        lines.append((f"`{name}`", *_verdict(locked.get(name), others.get(name)), *drifts, *speeds))
    for configuration in BESIDE:
        drifts = (_kl(drifted["runs"][run], configuration) for run in runs)
        lines.append((f"beside: `{configuration}`", "", "", "", "", *drifts, "", ""))
    return table((*columns, "of TileLang's bf16 rate at 16,384 keys, quantising timed", "codes ready"), lines)


def _verdict(locked: Facts | None, told: Facts | None) -> tuple[str, str, str, str]:
    """Verdict, door or reason, max e and RMS e: by the lock, or else by a verdict that is no part of it."""
    if locked:
        return locked["verdict"], locked["door"] or locked["reason"], *_numbers(locked.get("family", {}).get("all", {}))
    if told:
        return told["outcome"], told["door"] or ", ".join(told["reasons"]), *_numbers(told["figures"])
    return "not judged", "", "", ""


def _numbers(figures: Facts) -> tuple[str, str]:
    e, rms = (f"{figures[name]:.3g}" if name in figures else "" for name in FIGURES)
    return e, rms


def _kl(run: Facts, configuration: str) -> str:
    """Mean KL with its 95 % interval, or "" where it was not measured."""
    for c in run.get("configurations", []):
        if c["configuration"] == configuration:
            return f"{c['kl']['value']:.6f} ± {(c['kl']['high'] - c['kl']['low']) / 2:.6f}"
    return ""


def _speed(found: list[Facts], kernel: str) -> str:
    """The rate beside the bf16 TileLang kernel's at the shape with a bar, and by how much it misses that."""
    for f in found:
        if f["kernel"] == kernel and f.get("bar"):
            over, bar = f["over_tilelang"], f["bar"]
            return f"{over}" if over >= bar else f"{over} (**{bar} missed by {bar - over:.3f}**)"
    return ""


def drift(drifted: Facts) -> str:
    """Which layers carry the drift of a kernel, each swapped alone into the reference: of many, the LAYERS largest by name."""
    lines = []
    for run, facts in drifted["runs"].items():
        for a in facts.get("attributions", []):
            swaps = sorted(a["swaps"], key=lambda swap: -swap["kl"]["value"])
            named, rest = swaps[:LAYERS], swaps[LAYERS:]
            said = [f"{swap['layer']}: {_kl_of(swap['kl'])}" for swap in named]
            if rest:
                mean = statistics.fmean(swap["kl"]["value"] for swap in rest)
                said.append(f"{len(rest)} others: {mean:.5f} on average, {rest[-1]['kl']['value']:.5f} at least")
            lines.append((RUNS[run], f"`{a['configuration']}`", "; ".join(said)))
    return table(("checkpoint", "configuration", "layer: KL of it alone, nats"), lines)


def _kl_of(kl: Facts) -> str:
    return f"{kl['value']:.5f} ± {(kl['high'] - kl['low']) / 2:.5f}"


def fuzzed(found: Facts) -> str:
    """What was searched for a call that a kernel gets wrong, and what came of it."""
    return table(
        ("command", "exit status", "its last line"), [(f"`{f['command']}`", f["status"], f["said"]) for f in found.values()]
    )


def tilings(found: Facts) -> str:
    """Tilings of the decode kernel that are not shipped."""
    rows = []
    for f in found["tilings"]:
        s, t = f["shape"], f["tiling"]
        where = (f"{s['q_heads']}:{s['kv_heads']} x {s['dim']}", s["tokens"], s["cache"])
        rows.append((*where, *(t[n] for n in ("rows", "keys", "parts", "warps", "stages")), f.get("ratio", f.get("refused"))))
    heads = ("heads x head dim", "new tokens", "cache", "rows", "keys", "parts", "warps", "stages", "of a copy's")
    return table(heads, rows)
