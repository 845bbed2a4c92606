"""The tree is what the design says: three linked folders, imports that go downwards only, and one module that prints."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("references", "kernels", "checkpoints")

# A module may import from the rows below its own, and a package's modules from each other.  Names are without `oracle.`; a
# package stands for all of its modules.  A new module needs a place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli", "pytest_plugin"),
    ("cli_bench",),
    ("cli_drift", "cli_kernels"),
    ("progress",),
    ("ab_text", "roofline_text"),
    ("drift_text", "drift_markdown", "drift_html", "drift_json", "bench_text"),
    ("report", "gate_text", "replay_text", "verdict_lines", "markdown", "html_report"),
    ("exam_text", "plugin_lock", "charts", "summary", "drift_charts", "drift_passages", "drift_summary", "bench_charts"),
    ("gate",),
    ("exam", "fuzz", "replay", "locking"),
    ("accept", "constants"),
    ("doors", "drift_door", "coverage", "heldout", "preparation"),
    ("relations", "case_text"),
    ("judged", "exercised", "shrink", "strategies", "ledger", "evidence", "canvas", "drift_numbers"),
    ("ab",),
    ("roofline",),
    ("bench",),
    ("trial", "suite", "case_strategies"),
    ("structured", "pairs", "rates", "roofline_flops"),
    ("measure", "rows", "scope", "pool", "places", "bench_case"),
    ("material",),
    ("inputs",),
    ("casefile", "timing", "roofline_trace", "ab_tests", "memory"),
    ("cases", "geometry"),
    ("checkpoints",),
    ("captured",),
    ("families", "streams", "isolation", "named"),
    ("kernels", "mutants"),
    ("verdict",),
    ("references",),
    ("lock_files", "moves"),
    ("loosened",),
    ("lock",),
    ("files",),
    ("contract", "formats", "errors", "oracle", "sheet"),
)

# What the packages below the judging may import besides themselves.
ONLY: dict[str, set[str]] = {
    "references": {"contract", "formats"},
    "kernels": {"contract", "formats", "references"},
    "mutants": {"contract", "references", "verdict"},
    "isolation": {"contract", "formats"},
    "checkpoints": {"captured", "contract", "errors", "families", "isolation", "kernels", "oracle", "references"},
}

# Who prints or ends the process, and why.
PRINTERS = {
    "cli": "the command line",
    "cli_bench": "the command line",
    "cli_drift": "the command line",
    "cli_kernels": "the command line",
    "captured": "`python -m oracle.captured`, a command of its own",
    "isolation.worker": "the last words of a process whose parent no longer listens",
}
TERMINAL = {
    "click": {"cli", "cli_bench", "cli_drift", "cli_kernels"},
    "rich": {"drift_text", "gate_text", "progress", "pytest_plugin", "report"},
}  # library -> who may import it


@cache
def sources() -> dict[str, str]:
    """The text of every module, by name without `oracle.`."""
    files = [
        f for f in (ROOT / "oracle").rglob("*.py") if not any(part in LINKED for part in f.relative_to(ROOT / "oracle").parts)
    ]
    found = {}
    for file in [*files, *(f for folder in LINKED for f in (ROOT / folder).rglob("*.py"))]:
        place = file.relative_to(ROOT / "oracle") if file.is_relative_to(ROOT / "oracle") else file.relative_to(ROOT)
        parts = place.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "oracle"] = file.read_text()
    return found


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that is imported, wherever in the file; what is imported from a package is taken for a module of it."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own(modules: dict[str, str], name: str) -> set[str]:
    """The modules of the tree that `name` imports."""
    package = "oracle" if name == "oracle" else f"oracle.{name}".rpartition(".")[0]
    found = set()
    for imported in imports(modules[name], package):
        if imported == "oracle":
            found.add("oracle")
        elif imported.startswith("oracle."):
            inner = imported.removeprefix("oracle.")
            parent = inner.rpartition(".")[0]
            found.add(inner if inner in modules else parent if parent in modules else parent.rpartition(".")[0] or "oracle")
    return found - {name}


def row(name: str) -> int:
    """The row of LAYERS that the module stands in, or -1."""
    return next((i for i, names in enumerate(LAYERS) if name in names or name.partition(".")[0] in names), -1)


def problems(modules: dict[str, str]) -> list[str]:
    """Every breach of the tables above."""
    found = [f"{name}: has no place in LAYERS" for name in modules if row(name) < 0]
    for name, source in modules.items():
        package = name.partition(".")[0]
        for other in own(modules, name):
            inside = other.partition(".")[0] == package
            if not inside and not row(other) > row(name):
                found.append(f"{name}: imports {other}, which is not below it")
            if not inside and package in ONLY and other.partition(".")[0] not in ONLY[package]:
                found.append(f"{name}: imports {other}; {package} may import {', '.join(sorted(ONLY[package]))}")
        for imported in imports(source, "oracle"):
            library = imported.partition(".")[0]
            if name not in TERMINAL.get(library, {name}):
                found.append(f"{name}: imports {library}")
        if name not in PRINTERS and (spoken := speaks(source)):
            found.append(f"{name}: {spoken}")
    return found


@cache
def speaks(source: str) -> str:
    """The first call that prints or ends the process, or ""."""
    for node in nodes(source):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in (
                "print",
                "exit",
                "quit",
                "sys.exit",
                "SystemExit",
                "sys.stdout.write",
                "sys.stderr.write",
                "breakpoint",
            ):
                return f"calls {called}"
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc) == "SystemExit":
            return "raises SystemExit"
    return ""


# The tree


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_is_a_relative_link_to_one_at_the_top(folder: str) -> None:
    link = ROOT / "oracle" / folder

    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert link.resolve() == (ROOT / folder).resolve() and (ROOT / folder).is_dir() and not (ROOT / folder).is_symlink()


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_has_no_init(folder: str) -> None:
    """With one, a `kernels` on sys.path would hide the package of that name that transformers uses."""
    assert list((ROOT / folder).rglob("__init__.py")) == []


@pytest.mark.parametrize("module", ["references.attention", "references.bound", "kernels.table", "checkpoints.loading"])
def test_what_lies_in_a_linked_folder_is_a_module_of_oracle(module: str) -> None:
    found = importlib.import_module(f"oracle.{module}")

    assert found.__file__ is not None
    assert Path(found.__file__).resolve() == (ROOT / f"{module.replace('.', '/')}.py").resolve()


def test_no_linked_folder_is_a_package_by_itself(tmp_path: Path) -> None:
    """Neither installed nor from another folder."""
    code = f"""
import importlib.util
for name in {LINKED}:
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    assert not any(str(place).startswith({str(ROOT)!r}) for place in places), places
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)


# The imports


def test_imports_go_downwards_and_only_the_command_line_speaks() -> None:
    assert problems(sources()) == []


def test_no_module_imports_itself_by_a_detour() -> None:
    modules = sources()
    order = list(graphlib.TopologicalSorter({name: own(modules, name) for name in modules}).static_order())

    assert set(order) == set(modules) and len(modules) > 40


def test_every_name_in_the_tables_is_there() -> None:
    modules = sources()
    packages = {name.partition(".")[0] for name in modules}
    named = {name for names in LAYERS for name in names}

    assert named <= packages | {"oracle"} and packages <= named
    assert len([name for names in LAYERS for name in names]) == len(named)
    assert {*PRINTERS, *TERMINAL["click"], *TERMINAL["rich"]} <= set(modules) and set(ONLY) <= packages


# The rules themselves: each breach is seen, however it is written

BREACHES = [
    ("measure", "from oracle.doors import decide", "measure: imports doors, which is not below it"),
    ("measure", "import oracle.cli", "measure: imports cli, which is not below it"),
    ("measure", "from oracle import cli", "measure: imports cli, which is not below it"),
    ("measure", "from . import cli", "measure: imports cli, which is not below it"),
    ("measure", "from .cli import main", "measure: imports cli, which is not below it"),
    ("measure", "def f():\n    import oracle.accept as a", "measure: imports accept, which is not below it"),
    ("measure", "if TYPE_CHECKING:\n    from oracle.accept import Asked", "measure: imports accept, which is not below it"),
    ("doors", "from oracle.coverage import planned", "doors: imports coverage, which is not below it"),
    (
        "verdict",
        "from oracle.isolation.process import KernelProcess",
        "verdict: imports isolation.process, which is not below it",
    ),
    ("references.bound", "from oracle.kernels.table import KERNELS", "references.bound: imports kernels.table, which is not"),
    ("references.bound", "from ..kernels import table", "references.bound: imports kernels.table, which is not below it"),
    ("references.bound", "from oracle.errors import InputError", "references may import contract, formats"),
    ("kernels.table", "from oracle.families import FAMILIES", "kernels.table: imports families, which is not below it"),
    ("kernels.table", "from oracle.verdict import Reason", "kernels may import contract, formats, references"),
    ("isolation.child", "from oracle.references.plan import tokens", "isolation may import contract, formats"),
    ("doors", "import click", "doors: imports click"),
    ("doors", "from rich.table import Table", "doors: imports rich"),
    ("accept", "import rich", "accept: imports rich"),
    ("doors", "print('fine')", "doors: calls print"),
    ("doors", "import sys\nsys.exit(1)", "doors: calls sys.exit"),
    ("doors", "raise SystemExit(1)", "doors: calls SystemExit"),
    ("doors", "raise SystemExit", "doors: raises SystemExit"),
    ("doors", "import sys\nsys.stderr.write('x')", "doors: calls sys.stderr.write"),
    ("new_module", "", "new_module: has no place in LAYERS"),
]


@pytest.mark.parametrize(("name", "source", "problem"), BREACHES, ids=[str(i) for i in range(len(BREACHES))])
def test_a_breach_is_seen(name: str, source: str, problem: str) -> None:
    found = problems(sources() | {name: source})

    assert any(problem in text for text in found), found


def test_what_is_allowed_is_no_breach() -> None:
    assert problems({"kernels.emulated": "from oracle.references.emulator import x", "references.emulator": ""}) == []
    assert (
        problems(
            {
                "cli": "import click\nprint(1)",
                "report": "import rich",
                "isolation.a": "from oracle.isolation.b import c",
                "isolation.b": "",
            }
        )
        == []
    )
    assert problems({"measure": "import torch\nfrom oracle.contract import Call", "contract": ""}) == []
