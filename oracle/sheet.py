"""A table of a report, before anybody says whether it is printed or written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table: its title, its columns and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, under a heading."""
        lines = [f"## {self.title}", "", f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        cells = ([cell.replace("|", "\\|") for cell in row] for row in self.rows)
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in cells]) + "\n"
