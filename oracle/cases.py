"""Cases: one call of a kernel, described in a few lines.  Same case, same bits, on any machine."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from oracle.errors import InputError
from oracle.families import FAMILIES, Family

LAYOUTS = ("plain", "kv-in-page", "layers-in-page", "strided", "hnd")
SCALES = ("none", "scalar", "per-head", "per-sequence")
SINKS = ("none", "small", "dominant", "below")
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: family, batch geometry, input class, seed.  What lies past the plan is chosen when the call is laid out."""

    name: str
    family: Family
    dtype: str = "bf16"  # of q, and of k and v unless cache_dtype says otherwise
    cache_dtype: str = ""  # "e4m3", or "" for the dtype of q
    q_lens: tuple[int, ...]  # new tokens of each sequence
    kv_lens: tuple[int, ...]  # keys of each sequence, the new tokens included
    page_size: int = 16
    layout: str = "plain"  # one of LAYOUTS
    inputs: str = "randn"  # an input class, or "captured"
    captured: str = ""  # a capture's file name, where inputs == "captured"
    scales: str = "none"  # one of SCALES
    sinks: str = "none"  # one of SINKS; "none" unless the family has sinks
    padded_seqs: int = 0  # plan entries past the live batch; num_seqs is given where there are any
    tail_rows: int = 3  # rows of q past the plan
    give_out: bool = True
    rows: int = 0  # rows judged at least; 0 = the profile's share
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise InputError(f"case {self.name}: {len(self.q_lens)} q_lens but {len(self.kv_lens)} kv_lens; they go in pairs")
        for value, allowed, what in (
            (self.layout, LAYOUTS, "layout"),
            (self.scales, SCALES, "scales"),
            (self.sinks, SINKS, "sinks"),
            (self.dtype, DTYPES, "dtype"),
            (self.cache_dtype, ("", "e4m3"), "cache_dtype"),
        ):
            if value not in allowed:
                raise InputError(f"case {self.name}: {what} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")

    @property
    def total_q(self) -> int:
        """Live query rows."""
        return sum(self.q_lens)

    @property
    def total_k(self) -> int:
        """Live keys, over all sequences."""
        return sum(self.kv_lens)


def captured_case(name: str, family: Family, tokens: int, dtype: str, file: str) -> Case:
    """A case that reads the last tokens of a capture of `tokens` tokens, in `file` beside the case's own."""
    return Case(
        name=name,
        family=family,
        dtype=dtype,
        q_lens=(min(96, tokens),),
        kv_lens=(tokens,),
        inputs="captured",
        captured=file,
        sinks="small" if family.sinks else "none",
    )


def case_seed(seed: int, name: str) -> int:
    """The seed of the case called `name` in a suite drawn with `seed`: cases do not share random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:6], "little")


def to_toml(case: Case) -> str:
    """The case as TOML; `from_toml` reads it back."""
    data = {name: value for name, value in asdict(case).items() if value != _DEFAULTS.get(name)}
    if FAMILIES.get(case.family.name) == case.family:
        data["family"] = case.family.name
    return tomli_w.dumps({"format": 1} | data)


def from_toml(text: str, where: str) -> Case:
    """The case in `text`; `where` names the file in errors.  Raises InputError naming the key, what it got and expected."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{where}: not valid TOML: {problem}") from None
    if data.pop("format", None) != 1:
        raise InputError(f"{where}: expected `format = 1` on its first line; this version of the oracle reads no other")
    known = {f.name for f in fields(Case)}
    if unknown := sorted(set(data) - known):
        raise InputError(f"{where}: unknown key {unknown[0]!r}; a case has {', '.join(sorted(known))}")
    if missing := sorted({"name", "family", "q_lens", "kv_lens"} - set(data)):
        raise InputError(f"{where}: {missing[0]!r} is missing")
    data["family"] = _family(data["family"], where)
    data["q_lens"], data["kv_lens"] = tuple(data["q_lens"]), tuple(data["kv_lens"])
    return Case(**data)


def _family(value: Any, where: str) -> Family:
    if isinstance(value, str):
        if value not in FAMILIES:
            raise InputError(f"{where}: no family {value!r}; `oracle families` lists them")
        return FAMILIES[value]
    if not isinstance(value, dict):
        raise InputError(f"{where}: family is a name or a table, got {value!r}")
    try:
        row: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        return Family(**row)
    except TypeError as problem:
        raise InputError(f"{where}: [family]: {problem}") from None


def read_cases(folder: Path) -> list[Case]:
    """All `*.toml` cases of a folder, by name.  Raises InputError where there is none or one is malformed."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise InputError(f"{folder}: no *.toml case in it; `oracle accept --list` shows the cases of the built-in suite")
    cases = []
    for file in files:
        case = from_toml(file.read_text(), str(file))
        if case.captured:
            case = replace(case, captured=str((file.parent / case.captured).resolve()))
        cases.append(case)
    return cases


_DEFAULTS = {f.name: f.default for f in fields(Case)}
