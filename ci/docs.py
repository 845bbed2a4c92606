"""Writes the tables in docs/tables.md and the transcripts in README.md, docs/pytest.md and docs/lock.md: `make docs`.

Tests fail when they differ.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from oracle.accept import Asked, accept, listed
from oracle.cases import Case
from oracle.checkpoints.configurations import ATTENTIONS, KV_FORMATS, WEIGHTS
from oracle.contract import OPTIONAL
from oracle.coverage import OPTIONS
from oracle.families import FAMILIES
from oracle.inputs import EXTRA_CLASSES, INPUT_CLASSES, PROMISED_CLASSES
from oracle.kernels.table import KERNELS
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import record_of
from oracle.relations.table import RELATIONS
from oracle.report import PIPE_WIDTH, verdict_text
from oracle.scope import Scope
from oracle.suite import build
from oracle.verdict import MEANINGS

ROOT = Path(__file__).resolve().parent.parent
TRANSCRIPT = re.compile(r"<!-- oracle accept (.*?) -->\n```\n(.*?)```\n", re.DOTALL)
FILE = re.compile(r"<!-- (\w+\.py) -->\n```python\n(.*?)```\n", re.DOTALL)
EXCERPT = re.compile(r"<!-- (\S+\.toml): (\[.*?\]) -->\n```toml\n(.*?)```\n", re.DOTALL)
SESSION = re.compile(r"<!-- pytest (.*?) -->\n```\n(.*?)```\n", re.DOTALL)
CI_NAMES = ("CI", "BUILD_NUMBER")  # pytest shortens no line where one of them is set


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = list(columns)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def tables() -> str:
    """The text of docs/tables.md."""
    classes = INPUT_CLASSES | PROMISED_CLASSES | EXTRA_CLASSES
    words = WEIGHTS | {word: about for word, (_, about) in ATTENTIONS.items()} | KV_FORMATS
    covered = listed(Asked(candidate="emulator", seed=0))
    parts = [
        "# Tables\n\nMade by `make docs`.",
        "## Kernels (`oracle kernels`)",
        table(
            ("name", "about", "verdict expected", "against"),
            (
                (f"`{n}`", r.about, f"{r.expect} {r.door or r.reason}".strip(), r.against or "emulator")
                for n, r in KERNELS.items()
            ),
        ),
        "## Words of a configuration (`oracle drift --configs`)",
        table(("word", "meaning"), ((f"`{word}`", about) for word, about in words.items())),
        "## Families (`oracle families`)",
        table(
            ("family", "heads", "head dim", "scale", "mask", "softcap", "sinks", "from"),
            (
                (
                    f"`{f.name}`",
                    f"{f.q_heads}:{f.kv_heads}",
                    f.head_dim if f.head_dim == f.head_dim_v else f"{f.head_dim}/{f.head_dim_v}",
                    f"{f.scale:.4g}",
                    ("causal" if f.causal else "full") + (f", window {f.window}" if f.window != (-1, -1) else ""),
                    f"{f.softcap:g}" if f.softcap else "",
                    "yes" if f.sinks else "",
                    f.source,
                )
                for f in FAMILIES.values()
            ),
        ),
        "## Input classes",
        table(("class", "what it is"), ((f"`{name}`", c.about) for name, c in classes.items())),
        "## Reasons for a reject, the most telling first",
        table(("code", "meaning"), ((f"`{reason}`", text) for reason, text in MEANINGS.items())),
        "## Relations (`oracle/relations/table.py`)",
        table(("relation", "demands", "because"), ((f"`{name}`", r.level, r.why) for name, r in RELATIONS.items())),
        "## What the default profile covers (`oracle accept emulator --list --seed 0`)",
        f"{covered.cases} cases, {covered.rows:,} query rows, {covered.elements:,} output elements.",
        table(("what must be covered", "count"), ((name, f"{count:,}") for name, count in covered.counts.items())),
        "## How far the default profile reaches, for a kernel that declares everything",
        BEYOND,
        table(("largest", "in a case"), ((name, f"{size:,}") for name, size in reach().items())),
    ]
    return "\n\n".join(parts) + "\n"


def reach() -> dict[str, int]:
    """What is measured of the default suite of the emulator -> the largest that a case has: the least of seeds 0, 1 and 2."""
    scope = Scope(record=record_of(Arithmetic()), parameters=frozenset(OPTIONAL))
    suites = [build(scope, profile="default", seed=seed).cases for seed in range(3)]
    return {name: min(max(map(size, cases)) for cases in suites) for name, size in SIZES.items()}


def _keys(case: Case) -> int:
    return max(case.kv_lens)


BEYOND = """A fault that begins beyond these sizes is met by no case.  A kernel that takes another path from some number of query
rows or keys on says so (`thresholds`), and both sides are judged; what else its callers do belongs into a folder of cases
(`--cases`).  Of several head dims the smallest and the widest have the longest cases.  In every layout the elements of a head lie
side by side, and scales have no gaps."""
SIZES: dict[str, Callable[[Case], int]] = {  # 0 where a case has nothing of the kind
    "query rows of a sequence": lambda c: max(c.q_lens),
    "query rows of a call": lambda c: c.total_q,
    "sequences": lambda c: len(c.q_lens),
    "sequences where one has more than 8 query rows and one has 1": lambda c: (
        len(c.q_lens) if max(c.q_lens) > 8 and 1 in c.q_lens else 0
    ),
    "sequences of 2 to 8 query rows": lambda c: sum(2 <= n <= 8 for n in c.q_lens),
    "sequences that share a prefix": lambda c: sum(n > 0 for n in c.shared) + 1 if any(c.shared) else 0,
    "tokens of a shared prefix": lambda c: max(c.shared),
    "keys": _keys,
    "keys beside a window": lambda c: _keys(c) if OPTIONS["window"](c) else 0,
    "keys beside a softcap": lambda c: _keys(c) if OPTIONS["softcap"](c) else 0,
    "keys beside sinks": lambda c: _keys(c) if OPTIONS["sinks"](c) else 0,
    "keys beside scales": lambda c: _keys(c) if OPTIONS["scales"](c) else 0,
    "keys of an e4m3 cache": lambda c: _keys(c) if OPTIONS["8-bit cache"](c) else 0,
    "keys in fp16": lambda c: _keys(c) if c.dtype == "fp16" else 0,
    "keys on more than one kv head": lambda c: _keys(c) if c.family.kv_heads > 1 else 0,
    "keys on more than one kv head, without a window": lambda c: (
        _keys(c) if c.family.kv_heads > 1 and not OPTIONS["window"](c) else 0
    ),
    "keys of head dim 128": lambda c: _keys(c) if c.family.head_dim == 128 else 0,
    "window whose edge lies among the keys": lambda c: c.family.window[0] if 0 <= c.family.window[0] < _keys(c) else 0,
    "query heads a kv head": lambda c: c.family.q_heads // c.family.kv_heads,
    "kv heads": lambda c: c.family.kv_heads,
    "query rows of a sequence without keys": lambda c: max(
        (q for q, k in zip(c.q_lens, c.kv_lens, strict=True) if k == 0), default=0
    ),
    "sequences before the first that has keys": lambda c: next((i for i, k in enumerate(c.kv_lens) if k), 0),
    "sequences after the last that has queries": lambda c: next((i for i, q in enumerate(reversed(c.q_lens)) if q), 0),
}


def transcript(arguments: str) -> str:
    """What `oracle accept ARGUMENTS` prints."""
    words = arguments.split()
    seed = int(words[words.index("--seed") + 1])
    profile = words[words.index("--profile") + 1] if "--profile" in words else ""
    sys.argv = ["oracle", "accept", *words]  # what the verdict shows as the command that gives it again
    out = io.StringIO()
    Console(file=out, width=PIPE_WIDTH, highlight=False).print(
        verdict_text(accept(Asked(candidate=words[0], profile=profile, seed=seed)))
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def with_transcripts(readme: str) -> str:
    """The README with every transcript made again."""
    return TRANSCRIPT.sub(lambda m: f"<!-- oracle accept {m[1]} -->\n```\n{transcript(m[1])}```\n", readme)


def session(page: str, arguments: str) -> str:
    """What `pytest ARGUMENTS` prints in a project of the page's files, but for the time that it took."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILE.findall(page):
            (Path(folder) / name).write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments.split()]
        plain = {name: value for name, value in os.environ.items() if name not in CI_NAMES}
        environment = plain | {"COLUMNS": str(PIPE_WIDTH), "PYTEST_ADDOPTS": ""}
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return re.sub(r" in [\d.]+s( \([\d:]+\))?$", "", ran.stdout, flags=re.MULTILINE)


def with_sessions(page: str) -> str:
    """The page with every run of pytest made again."""
    return SESSION.sub(lambda m: f"<!-- pytest {m[1]} -->\n```\n{session(page, m[1])}```\n", page)


def excerpt(file: str, head: str) -> str:
    """One table of a TOML file, its head included."""
    lines = (ROOT / file).read_text().splitlines()
    start = lines.index(head)
    stop = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("[")), len(lines))
    return "\n".join(lines[start:stop]).rstrip() + "\n"


def with_excerpts(page: str) -> str:
    """The page with every excerpt of a file taken again."""
    return EXCERPT.sub(lambda m: f"<!-- {m[1]}: {m[2]} -->\n```toml\n{excerpt(m[1], m[2])}```\n", page)


def main() -> None:
    """Writes the files."""
    (ROOT / "docs/tables.md").write_text(tables())
    readme = ROOT / "README.md"
    readme.write_text(with_transcripts(readme.read_text()))
    page = ROOT / "docs/pytest.md"
    page.write_text(with_sessions(page.read_text()))
    lock = ROOT / "docs/lock.md"
    lock.write_text(with_excerpts(lock.read_text()))


if __name__ == "__main__":
    main()
