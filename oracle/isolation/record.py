"""A kernel's record, from the JSON that its process sends.

Everything here came from the kernel's process, so every field is checked: name, type and value.
"""

from __future__ import annotations

import difflib
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from oracle.contract import Record
from oracle.formats import FORMATS

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtypes": tuple(FORMATS),
    "cache_dtypes": ("e4m3",),
    "devices": ("cpu", "cuda"),
    "lse_base": ("e", "2"),
    "precision.p_format": ("input", "bf16", "fp16", "fp32", "e4m3", "int8"),
    "precision.row_sum": ("before", "after"),
    "precision.qk_format": ("e4m3", "int8"),
    "precision.v_format": ("e4m3",),
}
_WORDS: dict[type, str] = {str: "a string", bool: "true or false", int: "a positive integer", float: "a finite number >= 0"}


class RecordError(ValueError):
    """A record that breaks the contract; the text names the field, what it holds and what it should hold."""


def record_from_json(value: object) -> Record:
    """The record that `value`, a JSON object, declares; fields left out have the defaults of `Record`.

    Raises RecordError for an unknown field, a wrong type or a value that the contract does not have.
    """
    record = _build(Record, value, "")
    assert isinstance(record, Record)
    return record


def _build(kind: Any, value: object, where: str) -> object:
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _build(args[0], value, where)
    if origin is tuple:
        return _build_tuple(args, value, where)
    return _scalar(kind, value, where)


def _build_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object with the fields of oracle.contract." + kind.__name__)
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    for name in value:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]}?" if near else "expected one of " + ", ".join(names)
            raise RecordError(f"record.{where}{name}: no such field; {hint}")
    prefix = f"{where}." if where else ""
    return kind(**{name: _build(hints[name], value[name], prefix + name) for name in value})


def _build_tuple(args: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    kinds = args[:1] * (len(value) if isinstance(value, list) else 0) if args[-1] is Ellipsis else args
    if not isinstance(value, list) or len(value) != len(kinds):
        raise _wrong(where, value, "a tuple" if args[-1] is Ellipsis else f"{len(args)} values")
    return tuple(_build(kind, item, where) for kind, item in zip(kinds, value, strict=True))


def _scalar(kind: type, value: object, where: str) -> object:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise _wrong(where, value, _WORDS[kind])
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise _wrong(where, value, _WORDS[float])
    if where == "precision.p_scale" and value == 0:
        raise _wrong(where, value, "a finite number > 0")
    if type(value) is int and value < 1:
        raise _wrong(where, value, _WORDS[int])
    if isinstance(value, str) and value not in _CHOICES[where]:
        raise _wrong(where, value, "one of " + ", ".join(_CHOICES[where]))
    return value


def _wrong(where: str, value: object, expected: str) -> RecordError:
    return RecordError(f"record{'.' if where else ''}{where}: got {value!r:.80}, expected {expected}")
