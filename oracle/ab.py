"""What a kernel changes end to end: the same model with the knob off and on, in turns, in one process: `oracle ab`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.ab_tests import Change, change
from oracle.bench import setting
from oracle.checkpoints.generation import Prompted, generate, generate_in_turns, prompted
from oracle.checkpoints.knob import KNOBS, OFF, turned
from oracle.checkpoints.variants import Variant
from oracle.errors import InputError
from oracle.memory import MEANING, peak_bytes, restart_peak
from oracle.roofline import profiled
from oracle.roofline_trace import Account

Progress = Callable[[int, int, str], None]
LEAST = 0.01  # of the prefill: smaller accounts are added up as one
TTFT, TPOT, PEAK, REST = "time to first token", "time per output token", "peak memory", "prefill: the rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    checkpoint: Path
    knob: str  # the kernel, or OFF for a comparison of the incumbent with itself
    kind: str  # layers that it is for: a key of KNOBS
    against: str  # what the knob says before: OFF is the incumbent
    decode: str = ""  # what it says on both sides once the prompt is read, "" = the same as before that
    texts: tuple[Path, ...]
    prompt_tokens: int
    new_tokens: int
    margin: float
    device: str = "cpu"
    layers: int | None = None  # of a random model
    repeats: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What a side of a repeat took while there was no other."""

    first_s: float
    peak: int | None  # bytes, None where it cannot be measured
    prefill: Mapping[Account, float]  # seconds, under the profiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One side of one repeat."""

    alone: Alone
    later_s: tuple[float, ...]  # of each token after the first, taken in turns with the other side
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the two sides produced."""

    before: int  # tokens of a repeat
    after: int
    same: int  # positions at which both have the same token, of the first repeat
    first_apart: int | None  # the first position where they do not
    steady: bool  # each side produced the same in every repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Ab:
    """Everything that the knob was held against."""

    about: str
    knob: str  # NAME=VALUE
    before: str  # NAME=VALUE
    changes: tuple[Change, ...]
    tokens: Tokens
    margin: float
    unmeasured: tuple[str, ...]
    environment: dict[str, Any]


def ab(asked: Asked, environment: Mapping[str, str], progress: Progress) -> Ab:
    """Repeats of both sides, the order changing every time, after one that is not kept.

    In a repeat each side by itself reads the prompt and produces two tokens, for the time to the first and the memory, and reads
    the prompt under the profiler, for the accounts; then both produce all tokens in turns, one by one, for the time of a later
    one, which the host would move by more than a kernel does if seconds lay between the sides.

    `environment` is what all else of the knobs is read from.  Raises InputError as `prompted` and `turned` do, and where both
    sides are the same kernel though the knob is not OFF.
    """
    name = KNOBS[asked.kind]
    one = prompted(asked.checkpoint, asked.texts, asked.prompt_tokens, asked.new_tokens, asked.device, asked.layers)
    sides = [turned(one.subject, dict(environment) | {name: word}) for word in (asked.against, asked.knob)]
    if asked.knob != asked.against and _targets(sides[0]) == _targets(sides[1]):
        raise InputError(
            f"{name}={asked.knob} and {name}={asked.against} are the same kernel; {OFF} twice compares it with itself"
        )
    later = turned(one.subject, dict(environment) | {name: asked.decode}) if asked.decode else None
    found: tuple[list[Sample], list[Sample]] = ([], [])
    for number in range(-1, asked.repeats):
        progress(max(number, 0), asked.repeats, "repeats")
        samples = _repeat(one, sides, (0, 1) if number % 2 == 0 else (1, 0), later, asked)
        for at, sample in samples.items() if number >= 0 else ():
            found[at].append(sample)
    changes, unmeasured = _changes(*found, asked.margin, asked.device)
    return Ab(
        about=one.about,
        knob=f"{name}={asked.knob}",
        before=f"{name}={asked.against}",
        changes=changes,
        tokens=_tokens(*found),
        margin=asked.margin,
        unmeasured=unmeasured,
        environment=setting(asked.device)
        | {"repeats": asked.repeats, "prompt_tokens": asked.prompt_tokens, "new_tokens": asked.new_tokens}
        | {"kernels": [sorted(_targets(side)) for side in sides], "decode": asked.decode, "peak_is": MEANING[asked.device]},
    )


def _targets(side: Variant) -> frozenset[tuple[int, str]]:
    return frozenset((layer, kernel.target) for layer, kernel in side.kernels.items())


def _repeat(
    one: Prompted, sides: Sequence[Variant], order: tuple[int, int], later: Variant | None, asked: Asked
) -> dict[int, Sample]:
    """A sample of each side, by its place in `sides`."""
    alone = [_alone(one, sides[at], later, asked.device) for at in order]
    turns = generate_in_turns(one, [sides[at] for at in order], asked.new_tokens, later=later)
    return {
        at: Sample(alone=own, later_s=made.later_s, tokens=made.tokens) for at, own, made in zip(order, alone, turns, strict=True)
    }


def _alone(one: Prompted, side: Variant, later: Variant | None, device: str) -> Alone:
    counted = restart_peak(device)
    first_s = generate(one, side, 2, later=later).first_s
    peak = peak_bytes(device) if counted else None
    return Alone(first_s=first_s, peak=peak, prefill=profiled(one, side).seconds)


def _changes(
    before: Sequence[Sample], after: Sequence[Sample], margin: float, device: str
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """(every quantity that could be measured, and why others could not)."""
    both = (before, after)
    pairs: dict[str, tuple[str, list[list[float]]]] = {TTFT: ("s", [[s.alone.first_s for s in side] for side in both])}
    pairs |= {name: ("s", values) for name, values in _accounts(both).items()}
    pairs[TPOT] = ("s", [[statistics.median(s.later_s) for s in side] for side in both])  # a pause of the host is no kernel's
    unmeasured = []
    if all(s.alone.peak for side in both for s in side):
        pairs[PEAK] = ("bytes", [[float(s.alone.peak or math.nan) for s in side] for side in both])
    else:
        unmeasured.append(f"{PEAK}: this machine does not let a process restart the count on {device}")
    logs = {TPOT: [_log_ratio(*repeat) for repeat in zip(before, after, strict=True)]}
    changes = tuple(change(name, unit, old, new, margin, logs.get(name)) for name, (unit, (old, new)) in pairs.items())
    return changes, tuple(unmeasured)


def _log_ratio(one: Sample, two: Sample) -> float:
    """ln of `two`'s time per token over `one`'s, of steps of one moment, which share the host's pace.

    Of each step and the next, which had the other order, the mean, since a pace that drifts leaves nothing in it; the median of
    all these.
    """
    logs = [math.log(late / early) for early, late in zip(one.later_s, two.later_s, strict=True)]
    return statistics.median([(x + y) / 2 for x, y in itertools.pairwise(logs)] or logs)


def _accounts(both: tuple[Sequence[Sample], Sequence[Sample]]) -> dict[str, list[list[float]]]:
    """Name of an account of the prefill -> seconds of each side; small ones, and such as are not always there, as one."""
    found: dict[str, list[list[float]]] = {}
    totals = [sum(s.alone.prefill.values()) for side in both for s in side]
    small: list[Account] = []
    for work, kind in dict.fromkeys(key for side in both for s in side for key in s.alone.prefill):
        values = [[max(0.0, s.alone.prefill.get((work, kind), 0.0)) for s in side] for side in both]
        shares = [seconds / total for seconds, total in zip(itertools.chain(*values), totals, strict=True)]
        if statistics.median(shares) > LEAST and min(shares) > 0:
            found[f"prefill: {work}{f' of {kind} layers' if kind else ''}"] = values
        else:
            small.append((work, kind))
    rest = [[sum(max(0.0, s.alone.prefill.get(key, 0.0)) for key in small) for s in side] for side in both]
    return found | ({REST: rest} if min(*rest[0], *rest[1]) > 0 else {})


def _tokens(before: Sequence[Sample], after: Sequence[Sample]) -> Tokens:
    one, two = before[0].tokens, after[0].tokens
    apart = [i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
    return Tokens(
        before=len(one),
        after=len(two),
        same=min(len(one), len(two)) - len(apart),
        first_apart=apart[0] if apart else None,
        steady=len({s.tokens for s in before}) == len({s.tokens for s in after}) == 1,
    )
