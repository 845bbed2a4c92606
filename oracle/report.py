"""A verdict as text: what a person reads first, then the evidence, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from oracle.families import Family
from oracle.kernels.table import KernelRow
from oracle.summary import again, headline, reasons, setting
from oracle.verdict import Coverage, Outcome, Ratio, Verdict

if TYPE_CHECKING:
    from oracle.sheet import Sheet

VERSION = 1  # of the JSON form; oracle/schema/verdict.schema.json describes it
STYLES = {
    Outcome.ACCEPT: "bold green",
    Outcome.REJECT: "bold red",
    Outcome.INCONCLUSIVE: "bold yellow",
    Outcome.NOT_COVERED: "bold yellow",
}
SHOWN = 5  # findings printed in full, one for each reason
PIPE_WIDTH = 120


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON, whole; `oracle/schema/verdict.schema.json` holds for it."""
    whole: dict[str, Any] = plain(asdict(verdict))
    return {"format": VERSION, "exit_code": verdict.exit_code, "reasons": [str(r) for r in verdict.reasons]} | whole


def plain(value: Any) -> Any:
    """`value` with enums and tuples as JSON has them, and numbers that are not finite as strings, which JSON lacks."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return repr(value)
    return str(value) if isinstance(value, str) else value


def verdict_text(verdict: Verdict) -> RenderableType:
    """The verdict for a terminal."""
    lines: list[RenderableType] = [_headline(verdict), _judged(verdict)]
    if verdict.findings:
        lines += ["", _findings(verdict)]
    lines += ["", _figures(verdict)]
    lines += [Text(f"note: {note}", style="dim") for note in verdict.notes]
    lines += [Text(f"unseen: {text}", style="yellow") for text in verdict.coverage.unseen]
    if verdict.coverage.missing and verdict.outcome is not Outcome.REJECT:
        lines.append(Text(f"not covered: {_few(verdict.coverage.missing, 12)}", style="yellow"))
    if verdict.coverage.left_out:
        lines.append(Text(f"not covered by the quick profile: {_few(verdict.coverage.left_out, 8)}", style="yellow"))
    lines.append(Text(f"{setting(verdict)}; again: {again(verdict)}", style="dim"))
    return Group(*lines)


def _headline(verdict: Verdict) -> Text:
    text = Text(f"{verdict.outcome.upper()}", style=STYLES[verdict.outcome])
    text.append(f"  {verdict.candidate}", style="bold")
    text.append(f"  {headline(verdict)}")
    return text


def _judged(verdict: Verdict) -> Text:
    c = verdict.coverage
    skipped = sum(c.skipped.values())
    declared = f"; not declared: {skipped} ({_few([f'{n} x {r}' for r, n in c.skipped.items()], 3)})" if skipped else ""
    return Text(f"judged {c.cases} cases, {c.rows:,} query rows, {c.elements:,} output elements of what it declares{declared}")


def _findings(verdict: Verdict) -> Table:
    """The most telling finding of each reason, on the smallest case that shows it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="red", no_wrap=True)
    table.add_column(overflow="fold")
    for told in reasons(verdict)[:SHOWN]:
        more = f" (and {told.more} more)" if told.more else ""
        where = f"{told.smallest.case}: " if told.smallest.case else ""
        table.add_row(told.reason, f"{where}{told.smallest.text}{more}")
    return table


def _figures(verdict: Verdict) -> RenderableType:
    f = verdict.figures
    if f is None:
        return Text("no figures: it gave no result")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    lse = "not given" if f.max_e_lse is None else f"{f.max_e_lse:.3g}"
    largest = f"max e {f.max_e:.3g} (limit 1; {f.max_e_own:.3g} beside the output's rounding), max e_det {f.max_e_det:.3g}"
    table.add_row("error", f"{largest}, max e_lse {lse}, RMS e {f.rms_e:.4f}")
    table.add_row("absolute", f"mean {f.mean_abs:.3g}, max {f.max_abs:.3g}; row sum taken {f.row_sum} rounding P")
    if verdict.ratios:
        table.add_row("against", _ratio(verdict.ratios[0], verdict.incumbent))
    if d := verdict.drift:
        table.add_row("drift", Text(f"{d.reason}{'' if d.kl_floor is None else f'; floor {d.kl_floor:.2g}'}"))
    slopes = "; ".join(f"{name} {s['beta']:+.1e} ({s['share_of_limit']:.0%} of its limit)" for name, s in f.slopes.items())
    table.add_row("slopes", slopes)
    table.add_row("calls", f"{f.calls}")
    return table


def _ratio(r: Ratio, incumbent: str) -> str:
    text = f"{incumbent}: RMS e ratio {r.value:.3f} [{r.lower:.3f}, {r.upper:.3f}], margin {r.margin}, {r.rows:,} clusters"
    return text if r.rows_to_decide is None else f"{text}; about {r.rows_to_decide:,} would decide"


def _few(items: tuple[str, ...] | list[str], count: int) -> str:
    rest = len(items) - count
    return ", ".join(items[:count]) + (f" and {rest} more" if rest > 0 else "")


def coverage_table(c: Coverage) -> Table:
    """What a suite covers, as counts: what `--list` shows."""
    table = Table(title=f"{c.cases} cases, {c.rows:,} query rows, {c.elements:,} output elements", title_justify="left", box=None)
    table.add_column("what must be covered", overflow="fold")
    table.add_column("count", justify="right")
    for label, count in c.counts.items():
        table.add_row(label, f"{count:,}")
    for reason, count in c.skipped.items():
        table.add_row(f"not declared: {reason}", f"{count:,}", style="dim")
    for label in c.left_out:
        table.add_row(f"left out by the quick profile: {label}", "", style="dim")
    for label in c.missing:
        table.add_row(f"missing: {label}", "", style="yellow")
    return table


def pairs_table(counts: Mapping[tuple[str, str], int]) -> Table:
    """Options by options: cases that had both, zeros included; the diagonal counts one.  Columns have the numbers of the rows."""
    names = [one for one, other in counts if one == other]
    table = Table(title="examples with both options", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("option")
    for number in range(1, len(names) + 1):
        table.add_column(str(number), justify="right")
    for i, name in enumerate(names):
        below = [counts[other, name] for other in names[: i + 1]]
        table.add_row(f"{i + 1} {name}", *(Text(str(count), style="" if count else "bold yellow") for count in below))
    return table


def kernels_table(rows: Mapping[str, tuple[KernelRow, str]]) -> Table:
    """Every kernel of the table: name, what it is, the verdict expected, availability on the CPU."""
    table = Table(box=None)
    for column in ("name", "about", "expected", "on this CPU"):
        table.add_column(column, overflow="fold")
    for name, (row, why) in rows.items():
        table.add_row(name, row.about, f"{row.expect} {row.door or row.reason}".strip(), why or "available")
    return table


def families_table(families: Iterable[Family]) -> Table:
    """Every family: heads, dims, scale, mask and options."""
    table = Table(box=None)
    for column in ("family", "heads", "head dim", "scale", "mask", "options", "source"):
        table.add_column(column, overflow="fold")
    for f in families:
        dims = str(f.head_dim) if f.head_dim == f.head_dim_v else f"{f.head_dim}/{f.head_dim_v}"
        mask = ("causal" if f.causal else "full") + (f", window {f.window}" if f.window != (-1, -1) else "")
        options = ", ".join([f"softcap {f.softcap:g}"] * (f.softcap > 0) + ["sinks"] * f.sinks)
        table.add_row(f.name, f"{f.q_heads}:{f.kv_heads}", dims, f"{f.scale:.4g}", mask, options, f.source)
    return table


def sheet_table(sheet: Sheet) -> Table:
    """A table of the exam."""
    table = Table(title=sheet.title, title_justify="left", box=None)
    for column in sheet.columns:
        table.add_column(column, overflow="fold")
    for row in sheet.rows:
        table.add_row(*(cell.replace("`", "") for cell in row))
    return table


def console(*, stderr: bool = False) -> Console:
    """A console: as wide as the terminal, or PIPE_WIDTH where there is none."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)
