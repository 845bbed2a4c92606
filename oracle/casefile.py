"""Case files that name their kernel: saved whole or not at all, and read with the kernel that the case was made for.

The kernel and what was found stand in leading comments, each a line of TOML, so that every reader of cases reads the file:

    # kernel = "my_kernel.py:attention"
    # found = "error-exceeds-bound: e = 3.2 at row 0 ..."
    format = 1
    ...
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from oracle.cases import Case, read_case, read_cases, to_toml
from oracle.errors import InputError
from oracle.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """A case with the file it was read from."""

    path: Path
    case: Case
    kernel: str  # the kernel that the file names, "" = none


def save(case: Case, folder: Path, about: Mapping[str, str]) -> Path:
    """`NAME.toml` in `folder` holds the case under the comments `about`; it is there whole, or not at all.

    Raises InputError where it cannot be written.
    """
    path = folder / f"{case.name.replace('/', '-')}.toml"
    head = "".join(f"# {tomli_w.dumps({key: ' '.join(text.split())})}" for key, text in about.items())
    write_whole(path, head + to_toml(case), otherwise="name another folder with -o")
    return path


def read(path: Path) -> list[CaseFile]:
    """The case in the file `path`, or all cases of the folder `path`, by name.

    Raises InputError where there is none or one is malformed.
    """
    if path.is_dir():
        files, cases = sorted(path.glob("*.toml")), read_cases(path)
    elif path.is_file():
        files, cases = [path], [read_case(path)]
    else:
        raise InputError(f"{path}: no such file or folder; `oracle fuzz` and `oracle capture` save cases")
    return [
        CaseFile(path=file, case=case, kernel=_about(file).get("kernel", "")) for file, case in zip(files, cases, strict=True)
    ]


def _about(file: Path) -> dict[str, str]:
    """The comments at the head of a case file, each a line of TOML; those of people are left aside."""
    about: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        try:
            about |= {key: value for key, value in tomllib.loads(line[1:]).items() if isinstance(value, str)}
        except tomllib.TOMLDecodeError:
            continue
    return about
