"""Cases: one call of a kernel, described in a few lines.  Same case, same bits, on any machine."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from oracle.captured import shipped
from oracle.errors import InputError
from oracle.families import FAMILIES, Family

LAYOUTS = ("plain", "kv-in-page", "layers-in-page", "strided", "hnd", "many-pages", "far-pages")
SCALES = ("none", "scalar", "per-head", "per-sequence", "kv-scalar", "kv-per-head", "kv-per-sequence")  # kv-: no q_scale
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
    shared_prefix: int = 0  # first tokens of sequence 0 that the later sequences have too, as far as both reach
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
        for number, least, what in (
            (min(self.q_lens, default=0), 0, "a length in q_lens"),
            (min(self.kv_lens, default=0), 0, "a length in kv_lens"),
            (self.page_size, 1, "page_size"),
            (self.shared_prefix, 0, "shared_prefix"),
            (self.padded_seqs, 0, "padded_seqs"),
            (self.tail_rows, 0, "tail_rows"),
            (self.rows, 0, "rows"),
        ):
            if number < least:
                raise InputError(f"case {self.name}: {what} is {number}; it must be {least} or more")

    @property
    def total_q(self) -> int:
        """Live query rows."""
        return sum(self.q_lens)

    @property
    def total_k(self) -> int:
        """Live keys, over all sequences."""
        return sum(self.kv_lens)

    @property
    def shared(self) -> tuple[int, ...]:
        """Keys that each sequence has in common with sequence 0; 0 for that one itself.  Whole pages of them are shared."""
        return tuple(min(self.shared_prefix, self.kv_lens[0], n) if b else 0 for b, n in enumerate(self.kv_lens))


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
    if isinstance(family := data.get("family"), str):
        if family not in FAMILIES:
            raise InputError(f"{where}: no family {family!r}; `oracle families` lists them")
        data["family"] = FAMILIES[family]
    elif isinstance(family, dict):
        data["family"] = _made(Family, family, f"{where}: [family]")
    return _made(Case, data, where)


T = TypeVar("T", Case, Family)


def _made(kind: type[T], data: dict[str, Any], where: str) -> T:
    """`kind` made of the keys and values of a TOML table.  Raises InputError for a key or a value that does not fit."""
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise InputError(f"{where}: unknown key {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    if missing := [name for name, f in known.items() if f.default is MISSING and name not in data]:
        raise InputError(f"{where}: {missing[0]!r} is missing")
    for key, value in data.items():
        expected, fits = _EXPECTED[str(known[key].type)]
        if not fits(value):
            raise InputError(f"{where}: {key} is {value!r}; expected {expected}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    try:
        return kind(**values)
    except InputError as problem:
        raise InputError(f"{where}: {problem}") from None


def _whole(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {  # type of a field -> what TOML must hold, in words and as a test
    "str": ("a line of text", lambda value: isinstance(value, str) and len(value.splitlines()) <= 1),
    "int": ("a whole number", _whole),
    "float": ("a number", lambda value: isinstance(value, float) or _whole(value)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[int, ...]": ("a list of whole numbers", lambda value: isinstance(value, list) and _whole(*value)),
    "tuple[int, int]": ("two whole numbers", lambda value: isinstance(value, list) and len(value) == 2 and _whole(*value)),
    "Family": ("the name of a family, or a table", lambda value: isinstance(value, Family)),
}


def read_cases(folder: Path) -> list[Case]:
    """All `*.toml` cases of a folder, by name.  Raises InputError where there is none or one is malformed."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise InputError(f"{folder}: no *.toml case in it; `oracle accept --list` shows the cases of the built-in suite")
    return [read_case(file) for file in files]


def read_case(file: Path) -> Case:
    """The case of one file, whatever lies beside it but for its capture.  Raises InputError where it is malformed."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{file}: cannot be read as UTF-8 text: {problem}") from None
    case = from_toml(text, str(file))
    beside = file.parent / case.captured
    if case.captured and (beside.is_file() or case.captured.removesuffix(".safetensors") not in shipped()):
        return replace(case, captured=str(beside.resolve()))
    return case


_DEFAULTS = {f.name: f.default for f in fields(Case)}
