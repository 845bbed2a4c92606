"""Where a prefill's time goes: kind of work by layer type, beside the rate of the matrix product: `oracle roofline`."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from oracle.bench import setting
from oracle.checkpoints.clusters import Estimate
from oracle.checkpoints.generation import Prompted, generate, prompted
from oracle.checkpoints.knob import turned
from oracle.checkpoints.scopes import SCOPE, WHOLE, Kind, scoped, scoped_run
from oracle.checkpoints.variants import Variant
from oracle.rates import products
from oracle.roofline_flops import PRODUCTS, counted
from oracle.roofline_trace import Account, TraceError, account, split
from oracle.timing import block_s, median_of

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    checkpoint: Path
    texts: tuple[Path, ...]
    prompt_tokens: int
    device: str = "cpu"
    layers: int | None = None  # of a random model
    rounds: int = 6
    seconds: float = 0.5  # of a block of matrix products


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One account."""

    work: str
    kind: str  # of the layers, "" outside them
    layers: int
    seconds: Estimate
    share: Estimate  # of the time of all accounts, round by round
    flops: float  # counted by hand, 0 where none are counted
    of_products: Estimate  # its FLOP/s over those of the matrix product of its round


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A prefill, account by account."""

    about: str
    rows: tuple[Row, ...]  # the largest first
    worst: tuple[str, str]  # the account whose FLOPs at the product's rate would save the most, "other" apart
    products_flops: Estimate  # FLOP/s of the matrix product
    profiled_s: Estimate  # of a whole prefill, by the wall
    plain_s: Estimate  # of one without the profiler
    checked_flops: float  # of products with weights: what the profiler saw, and the count by hand says
    kernels: dict[str, str]  # kind of layer -> kernel
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """One prefill under the profiler."""

    wall_s: float
    seconds: Mapping[Account, float]
    product_flops: Mapping[Account, float]  # as the profiler counts them, of the products with weights


def roofline(asked: Asked, environment: Mapping[str, str], progress: Progress) -> Roofline:
    """Rounds of a block of matrix products, a prefill under the profiler and a plain one, after one of each that is not kept.

    `environment` may turn the knobs.  Raises InputError as `prompted` and `turned` do, and where the FLOPs that the profiler
    counts are not those that the configuration gives: then the architecture has products that are not counted here.
    """
    one = prompted(asked.checkpoint, asked.texts, asked.prompt_tokens, 1, asked.device, asked.layers)
    variant = turned(one.subject, environment)
    gemm = products(one.subject.model.dtype, asked.device)
    counts = counted(one.subject.model.config.get_text_config(), one.subject.kinds, asked.prompt_tokens)
    check_flops(profiled(one, variant, flops=True).product_flops, counts)
    generate(one, variant, 1)
    calls = max(3, int(asked.seconds / block_s(gemm.work, 3, asked.device)))
    taken: list[tuple[float, Profiled, float]] = []
    for number in range(asked.rounds):
        progress(number, asked.rounds, "rounds")
        rate = gemm.amount / block_s(gemm.work, calls, asked.device)
        taken.append((rate, profiled(one, variant), generate(one, variant, 1).first_s))
    return _made(one, variant, counts, taken, asked)


def profiled(one: Prompted, variant: Variant, *, flops: bool = False) -> Profiled:
    """One prefill of the prompt under torch's profiler; its own count of FLOPs only where `flops`."""
    device = one.prompt.device.type
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with scoped(one.subject), profile(activities=kinds, with_flops=flops) as prof, record_function(WHOLE):
        made = generate(one, variant, 1, partial(scoped_run, one.subject.kinds))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(file))
        seconds = split(json.loads(file.read_text())["traceEvents"], device)
    seen: dict[Account, float] = defaultdict(float)
    for event in prof.events() or [] if flops else []:
        if event.flops:
            own = account(_scope_of(event))
            if own[0] in PRODUCTS:
                seen[own] += event.flops
    return Profiled(wall_s=made.first_s, seconds=seconds, product_flops=dict(seen))


def _scope_of(event: Any) -> str:
    """The name of the innermost scope that an event of the profiler is in, "" where there is none."""
    while event is not None and not event.name.startswith(SCOPE):
        event = event.cpu_parent
    return "" if event is None else str(event.name)


def check_flops(seen: Mapping[Account, float], counts: Mapping[Account, float]) -> None:
    """Returns where the profiler saw exactly the FLOPs of products with weights that are counted by hand.

    Raises TraceError otherwise.
    """
    ours = {key: flops for key, flops in counts.items() if key[0] in PRODUCTS}
    for key in {*ours, *seen}:
        if not ours.get(key, 0.0) == seen.get(key, 0.0):
            raise TraceError(
                f"{' of '.join(filter(None, (key[0], key[1] and key[1] + ' layers')))}: {ours.get(key, 0.0):.6g} FLOPs counted "
                f"from the configuration, {seen.get(key, 0.0):.6g} by torch's profiler; expected the same: "
                "oracle/roofline_flops.py does not know this architecture"
            )


def _made(
    one: Prompted,
    variant: Variant,
    counts: Mapping[Account, float],
    taken: Sequence[tuple[float, Profiled, float]],
    asked: Asked,
) -> Roofline:
    """The report of the rounds: (FLOP/s of the product, profiled, seconds of a plain prefill)."""
    rows = []
    for key in dict.fromkeys(key for _, p, _ in taken for key in p.seconds):
        seconds = [max(0.0, p.seconds.get(key, 0.0)) for _, p, _ in taken]
        flops = counts.get(key, 0.0)
        rates = [flops / s / rate if s > 0 else 0.0 for s, (rate, _, _) in zip(seconds, taken, strict=True)]
        rows.append(
            Row(
                work=key[0],
                kind=key[1],
                layers=one.subject.kinds.count(key[1]) if key[1] else 1,
                seconds=median_of(seconds),
                share=median_of([s / sum(p.seconds.values()) for s, (_, p, _) in zip(seconds, taken, strict=True)]),
                flops=flops,
                of_products=median_of(rates),
            )
        )
    rows.sort(key=lambda row: row.seconds.value, reverse=True)
    worst = max((row for row in rows if row.work != Kind.OTHER), key=lambda r: r.share.value * (1 - r.of_products.value))
    return Roofline(
        about=one.about,
        rows=tuple(rows),
        worst=(worst.work, worst.kind),
        products_flops=median_of([rate for rate, _, _ in taken]),
        profiled_s=median_of([p.wall_s for _, p, _ in taken]),
        plain_s=median_of([plain for _, _, plain in taken]),
        checked_flops=sum(flops for key, flops in counts.items() if key[0] in PRODUCTS),
        kernels={one.subject.kinds[layer]: kernel.target for layer, kernel in variant.kernels.items()},
        environment=setting(asked.device) | {"rounds": asked.rounds, "prompt_tokens": asked.prompt_tokens},
    )
