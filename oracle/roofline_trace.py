"""Where the time of a profiled pass went: a trace of torch's profiler, read scope by scope.

On the CPU the time of a scope is its own, that of the scopes inside it taken off.  On CUDA it is what the device did for it: each
kernel, copy and fill belongs to the innermost scope that was open when the CPU launched it, or, where the trace has no launch of
it, to the innermost of the ranges that the profiler puts on the device's side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oracle.checkpoints.scopes import SCOPE, WHOLE
from oracle.errors import OracleError

Account = tuple[str, str]  # kind of work, kind of layer ("" outside the layers)
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]


class TraceError(OracleError):
    """A trace does not show what was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A scope."""

    name: str
    start: float  # microseconds
    stop: float


def split(events: Iterable[Event], device: str) -> dict[Account, float]:
    """Account -> seconds, of the pass in the scope WHOLE; `events` are those of a Chrome trace.

    Raises TraceError where the trace has no such scope, no work of the device in it, or work that no scope has asked for.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    scopes = _scopes(complete, "user_annotation")
    if not any(scope.name == WHOLE for scope in scopes):
        raise TraceError(f"the profile has no scope {WHOLE!r} among {len(complete)} events")
    if device == "cpu":
        return _own_times(scopes)
    found = _launched(scopes, _scopes(complete, "gpu_user_annotation"), complete)
    if not found:
        raise TraceError(f"the profile has no work of {device} in the scope {WHOLE!r}")
    return found


def _scopes(events: Iterable[Event], category: str) -> list[Span]:
    """Our scopes among the events, those that begin first and, of these, the outermost first."""
    found = [
        Span(name=e["name"], start=float(e["ts"]), stop=float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == category and e["name"].startswith(SCOPE)
    ]
    return sorted(found, key=lambda s: (s.start, -s.stop))


def _own_times(scopes: Sequence[Span]) -> dict[Account, float]:
    """Account -> seconds of its scopes without those inside them."""
    found: dict[Account, float] = defaultdict(float)
    open_ones: list[Span] = []
    for scope in scopes:
        open_ones = [outer for outer in open_ones if outer.stop > scope.start]
        if not open_ones and scope.name != WHOLE:
            continue  # before or after the pass
        seconds = (scope.stop - scope.start) / 1e6
        if open_ones:
            found[account(open_ones[-1].name)] -= seconds
        open_ones.append(scope)
        found[account(scope.name)] += seconds
    return dict(found)


def _launched(scopes: Sequence[Span], ranges: Sequence[Span], events: Iterable[Event]) -> dict[Account, float]:
    """Account -> seconds of the device's work that its scopes, and none inside them, have launched."""
    launches = {e["args"]["correlation"]: float(e["ts"]) for e in events if e.get("cat") in LAUNCHES and _linked(e)}
    done = [e for e in events if e.get("cat") in DEVICE_WORK]
    found: dict[Account, float] = defaultdict(float)
    for e in done:
        if _linked(e) and (launch := launches.get(e["args"]["correlation"])) is not None:
            owner = _innermost(scopes, launch)
            if owner is None:
                continue  # before or after the pass
        else:
            owner = _innermost(ranges, float(e["ts"]) + float(e["dur"]) / 2)
            if owner is None:
                raise TraceError(f"the profile does not show who launched {e['name']!r}, one of {len(done)} things on the device")
        found[account(owner.name)] += float(e["dur"]) / 1e6
    return dict(found)


def _linked(e: Event) -> bool:
    return "correlation" in e.get("args", {})


def _innermost(scopes: Sequence[Span], moment: float) -> Span | None:
    """The last of the scopes to open that is open at a moment."""
    at = bisect_right(scopes, moment, key=lambda s: s.start)
    return next((scopes[i] for i in range(at - 1, -1, -1) if scopes[i].stop >= moment), None)


def account(name: str) -> Account:
    """The account of a scope of this name."""
    work, _, kind = name.removeprefix(SCOPE).partition("|")
    return work, kind
