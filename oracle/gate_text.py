"""What the gate found, for a terminal, for GitHub's annotations and its step summary.  torch is not loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from oracle.lock import Lock
from oracle.loosened import Complaint

if TYPE_CHECKING:
    from oracle.gate import Judged

Complaints = Mapping[str, Sequence[Complaint]]  # by file name


def gate_table(judged: Sequence[Judged]) -> Table:
    """One line a kernel: expected, got, how much was judged, and what is not as expected (or why it was not run)."""
    table = Table(box=None)
    for column in ("kernel", "expected", "got", "judged", ""):
        table.add_column(column, overflow="fold")
    for j in judged:
        if j.verdict is None:
            table.add_row(j.entry.name, _expected(j), "-", "", _state(j), style="" if j.moves else "dim")
        else:
            table.add_row(j.entry.name, _expected(j), _got(j), _size(j), Text(_state(j), style="green" if j.holds else "red"))
    return table


def gate_lines(judged: Sequence[Judged]) -> list[str]:
    """Every sentence that a person must read: what moved, and what was not compared."""
    moves = [move.text for j in judged for move in j.moves]
    return moves + [f"note: {note}" for j in judged for note in j.notes]


def complaint_lines(complaints: Complaints) -> list[str]:
    """What stands against the locks, each with the waiver that would permit it, to be filled in."""
    lines = []
    for file, found in complaints.items():
        for complaint in found:
            lines.append(f"{file}: {complaint.text}")
            lines += [f"    {line}" for line in complaint.blank.splitlines()]
    return lines


def github_annotations(
    folder: Path, locks: Mapping[str, Lock], judged: Sequence[Judged], complaints: Complaints
) -> Iterator[str]:
    """GitHub's workflow commands that put each sentence beside the line of the lock that it is about."""
    for j in judged:
        file = j.entry.file or next(iter(locks), "cpu")
        for move in j.moves:
            yield _annotation(folder / f"{file}.toml", locks.get(file), move.what, move.text)
        if j.problem:
            yield _annotation(folder / f"{file}.toml", locks.get(file), f"kernel.{j.entry.name}", f"{j.entry.name}: {j.problem}")
    for name, found in complaints.items():
        for complaint in found:
            yield _annotation(folder / name, locks.get(name.removesuffix(".toml")), complaint.what, complaint.text)


def summary(judged: Sequence[Judged], complaints: Complaints, holds: bool) -> str:
    """The step summary, in Markdown."""
    lines = [f"## oracle gate: {'holds' if holds else 'moved'}", ""]
    lines += [f"- **{_markdown(line)}**" for line in complaint_lines(complaints) if not line.startswith("    ")]
    lines += [f"- **{_markdown(line)}**" for line in gate_lines(judged) if not line.startswith("note: ")]
    lines += [f"- **{_markdown(f'{j.entry.name}: {j.problem}')}**" for j in judged if j.problem]
    if judged:
        lines += ["", "| kernel | expected | got | judged | |", "|---|---|---|---|---|"]
        for j in judged:
            cells = (j.entry.name, _expected(j), _got(j) if j.verdict else "-", _size(j) if j.verdict else "", _state(j))
            lines.append(f"| {' | '.join(map(_markdown, cells))} |")
    notes = [line.removeprefix("note: ") for line in gate_lines(judged) if line.startswith("note: ")]
    missing = [
        f"{j.entry.name}: {', '.join(j.verdict.coverage.left_out)}" for j in judged if j.verdict and j.verdict.coverage.left_out
    ]
    for title, items in (("Notes", notes), ("Not covered", missing)):
        if items:
            lines += [
                "",
                f"<details><summary>{title}</summary>",
                "",
                *(f"- {_markdown(item)}" for item in items),
                "",
                "</details>",
            ]
    return "\n".join(lines) + "\n"


def _annotation(path: Path, lock: Lock | None, what: str, text: str) -> str:
    line = 1
    if lock is not None:
        while what and what not in lock.lines:
            what = what.rpartition(".")[0]
        line = lock.lines.get(what, 1)
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error file={path},line={line},title=oracle gate::{escaped}"


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _expected(j: Judged) -> str:
    if j.entry.row is not None:
        return f"{j.entry.row.expect} {j.entry.row.door or j.entry.row.reason}".strip()
    locked = j.entry.locked
    return f"{locked.verdict} {locked.door or locked.reason}".strip() if locked else ""


def _got(j: Judged) -> str:
    assert j.verdict is not None
    return f"{j.verdict.outcome} {j.verdict.door or ', '.join(j.verdict.reasons[:2])}".strip()


def _size(j: Judged) -> str:
    assert j.verdict is not None
    return f"{j.verdict.coverage.cases} cases, {j.verdict.environment['profile']}"


def _state(j: Judged) -> str:
    if j.problem:
        return j.problem
    if j.moves:
        return f"{len(j.moves)} moved: {', '.join(dict.fromkeys(str(m.kind) for m in j.moves))}"
    if j.verdict is None:
        return f"not run: {j.entry.absent}"
    return "as locked" if j.entry.locked else "as expected"
