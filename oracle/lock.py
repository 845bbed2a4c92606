"""A lock: what was measured of kernels on one kind of device, and how far each figure may move.  docs/lock.md explains the file.

Records, and their form as a file; this module imports neither torch nor anything that judges, so that a lock is read at once.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import tomli_w

from oracle.errors import InputError
from oracle.files import write_whole

FORMAT = 1
_MEND = "restore it from git, or run `oracle lock`"
ERRORS = ("max_abs", "max_e", "max_e_lse", "mean_abs", "ratio", "rms_e")  # a fall of these below their band makes a lock stale
SLOPES = ("bias", "gain", "temperature")  # sizes of slopes: noise about 0, so only a rise counts
FIGURES = (*ERRORS, *SLOPES)
ALL = "all"  # the row of all cases of a kernel together

_HEAD = """\
# Written by `oracle lock`, read by `oracle gate`; docs/lock.md says what each fact means.  Change it with `oracle lock` only.
# ceiling = value + {factor} spread; under value - {factor} spread the lock is stale.  spread is a figure's standard deviation
# over {seeds} seeds, and {factor} = t(0.999, {freedom}) sqrt(1 + 1/{seeds}), Student's bound on one more seed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure."""

    value: float
    spread: float  # standard deviation over the lock's seeds
    ceiling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel on one family, or on a group of cases of no family."""

    cases: int
    rows: int  # judged query rows
    digest: str  # SHA-256 over the bits of its answers; "" for a kernel whose bits vary
    figures: Mapping[str, Figure]  # those of FIGURES that it has


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLock:
    """What is expected of one kernel."""

    verdict: str
    door: str  # "" for one that is rejected
    reason: str  # of a reject: the one that must be among the reasons found
    against: str  # the incumbent, "" = the emulator
    profile: str
    suite_sha256: str  # over the cases that it was judged on
    skipped: Mapping[str, int]  # reason -> cases of the suite that it has not declared
    families: Mapping[str, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """A written permission to loosen one fact."""

    what: str  # as the gate names it: kernel.NAME.family.FAMILY.rms_e_ceiling
    was: Any  # "from" in the file: what it is in the lock that was
    now: Any  # "to" in the file; "removed" where it is gone
    why: str
    link: str
    expires: str  # YYYY-MM-DD, the last day on which it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The content of one lock file."""

    header: Mapping[str, Any]  # versions, hardware, seeds, the command, sizes of the suite; see the schema
    bound: Mapping[str, float]  # constants of the bound and of the doors
    kernels: Mapping[str, KernelLock]
    waivers: Sequence[Waiver] = ()
    loosened: Sequence[Mapping[str, Any]] = ()  # reasons given to `oracle lock --reason`, newest last
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)  # dotted name of a fact -> its line in the file


def rounded(value: float) -> float:
    """`value` to the six digits that a lock holds."""
    return float(f"{value:.6g}")


def to_text(lock: Lock) -> str:
    """The lock as a file: sorted, one fact a line, the same text for equal locks."""
    seeds = lock.header["seeds"]
    head = _HEAD.format(factor=lock.header["factor"], seeds=seeds, freedom=seeds - 1)
    data: dict[str, Any] = {
        "format": FORMAT,
        "header": dict(sorted(lock.header.items())),
        "bound": dict(sorted(lock.bound.items())),
        "kernel": {name: _kernel_data(kernel) for name, kernel in sorted(lock.kernels.items())},
    }
    if lock.loosened:
        data["loosened"] = [dict(entry) for entry in lock.loosened]
    if lock.waivers:
        data["waiver"] = [waiver_data(waiver) for waiver in lock.waivers]
    return head + tomli_w.dumps(data)


def waiver_data(waiver: Waiver) -> dict[str, Any]:
    """A waiver as it stands in the file."""
    texts = {"why": waiver.why, "link": waiver.link, "expires": waiver.expires}
    return {"what": waiver.what, "from": waiver.was, "to": waiver.now} | texts


def _kernel_data(kernel: KernelLock) -> dict[str, Any]:
    own = {name: value for name, value in sorted(asdict(kernel).items()) if isinstance(value, str)}
    return own | {
        "skipped": dict(sorted(kernel.skipped.items())),
        "family": {name: _row_data(row) for name, row in sorted(kernel.families.items())},
    }


def _row_data(row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {"cases": row.cases, "digest": row.digest, "rows": row.rows}
    for name, figure in row.figures.items():
        facts |= {name: figure.value, f"{name}_ceiling": figure.ceiling, f"{name}_spread": figure.spread}
    return dict(sorted(facts.items()))


def write(lock: Lock, path: Path) -> None:
    """The file holds the lock, whole; a killed run leaves the old one.  Raises InputError where it cannot be written."""
    write_whole(path, to_text(lock), otherwise="name another folder with --lock")


def read(path: Path) -> Lock:
    """The lock in that file.  Raises InputError, with line and column, for one that is not as `oracle lock` writes it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as problem:
        raise InputError(f"{path}: cannot be read: {problem.strerror}; `oracle lock` makes it") from None
    except UnicodeDecodeError as problem:
        raise InputError(f"{path}: byte {problem.start} is not UTF-8; restore it from git") from None
    return from_text(text, str(path))


def from_text(text: str, where: str) -> Lock:
    """The lock that `text` holds; `where` names it in errors.  Raises InputError, with line and column."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{where}: {problem}; {_MEND}") from None
    places = _places(text)
    problems = sorted(_validator().iter_errors(data), key=lambda e: _nearest(places, _dotted(e.absolute_path)))
    if problems:
        raise InputError(_malformed(problems[0], where, places))
    for name, value in _leaves(data, ""):
        if isinstance(value, float) and not math.isfinite(value):
            line, column = places[_nearest_name(places, name)]
            raise InputError(f"{where}: line {line}, column {column}: {name}: got {value}, expected a finite number; {_MEND}")
    lines = {name: line for name, (line, _) in places.items()}
    return Lock(
        header=data["header"],
        bound=data["bound"],
        kernels={name: _kernel(kernel) for name, kernel in data["kernel"].items()},
        waivers=tuple(_waiver(waiver) for waiver in data.get("waiver", ())),
        loosened=tuple(data.get("loosened", ())),
        lines=lines,
    )


def _kernel(data: Mapping[str, Any]) -> KernelLock:
    own = {name: data[name] for name in ("verdict", "door", "reason", "against", "profile", "suite_sha256", "skipped")}
    return KernelLock(**own, families={name: _row(row) for name, row in data["family"].items()})


def _row(data: Mapping[str, Any]) -> Row:
    figures = {
        name: Figure(value=data[name], spread=data[f"{name}_spread"], ceiling=data[f"{name}_ceiling"])
        for name in FIGURES
        if name in data
    }
    return Row(cases=data["cases"], rows=data["rows"], digest=data["digest"], figures=figures)


def _waiver(data: Mapping[str, Any]) -> Waiver:
    return Waiver(
        what=data["what"], was=data["from"], now=data["to"], why=data["why"], link=data["link"], expires=data["expires"]
    )


@cache
def _validator() -> Any:
    schema = json.loads(files("oracle").joinpath("schema/lock.schema.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def _malformed(problem: Any, where: str, places: Mapping[str, tuple[int, int]]) -> str:
    name, message = _dotted(problem.absolute_path), problem.message
    if problem.validator == "additionalProperties":
        unknown = sorted(set(problem.instance) - set(problem.schema.get("properties", ())))
        name, message = _join(name, unknown[0]), "unknown key"
    elif problem.validator in ("pattern", "enum", "type", "minimum"):
        expected = problem.schema.get("description") or f"{problem.validator} {problem.validator_value}"
        message = f"got {problem.instance!r}, expected {expected}"
    line, column = places[_nearest_name(places, name)]
    return f"{where}: line {line}, column {column}: {name or 'the file'}: {message}; {_MEND}"


def _leaves(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no table and no array, with its dotted name."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, _join(name, str(key)))
    else:
        yield name, data


def _places(text: str) -> dict[str, tuple[int, int]]:
    """Line and column, from 1, of the value of every fact, and of the head of every table, by dotted name."""
    places: dict[str, tuple[int, int]] = {"": (1, 1)}
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = _dotted(_keys(tomllib.loads(stripped)))
            if stripped.startswith("[["):
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            places[table] = number, 1
        elif "=" in stripped and not stripped.startswith("#"):
            key = next(iter(tomllib.loads(f"{stripped.partition('=')[0]} = 0")), "")
            places[_join(table, key)] = number, line.index("=") + 3
    return places


def _keys(data: object) -> list[str]:
    """The keys on the way to the innermost table of a single table's head."""
    keys = []
    while isinstance(data, dict | list) and data:
        if isinstance(data, dict):
            keys.append(next(iter(data)))
            data = data[keys[-1]]
        else:
            data = data[0]
    return keys


def _dotted(path: Any) -> str:
    return ".".join(map(str, path))


def _join(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _nearest_name(places: Mapping[str, tuple[int, int]], name: str) -> str:
    while name not in places:
        name = name.rpartition(".")[0]
    return name


def _nearest(places: Mapping[str, tuple[int, int]], name: str) -> int:
    return places[_nearest_name(places, name)][0]
