"""What is installed from the wheel, in projects that know nothing of this repository: the plugin and the strategies."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from lock_story import Said, tell

ROOT = Path(__file__).parents[1]
SOURCES = ("oracle", "references", "kernels", "checkpoints", "pyproject.toml", "README.md", "LICENSE")
DATA = (
    "references/attention.py",
    "kernels/table.py",
    "checkpoints/loading.py",
    "schema/verdict.schema.json",
    "schema/lock.schema.json",
    "schema/drift.schema.json",
    "templates/drift.html",
    "checkpoints/gemma4-mini/model.safetensors",
    "checkpoints/gemma4-mini/tokenizer.json",
    "checkpoints/gemma4-mini/text/documents.json",
    "checkpoints/gemma4-mini/text/LICENSES/python3.11-doc.txt",
    "py.typed",
)

PAGE = """
<!-- test_theirs.py -->
```python
from hypothesis import given, settings

import oracle
from oracle.contract import Record
from oracle.scope import Scope
from oracle.strategies import cases

SCOPE = Scope(record=Record(head_dims=(64,)), parameters=frozenset({"causal"}))

@settings(max_examples=5, deadline=None)
@given(cases(SCOPE))
def test_cases_are_drawn(case):
    assert SCOPE.refuses(case) is None and len(case.q_lens) == len(case.kv_lens) > 0

def test_it_is_the_installed_one():
    assert oracle.__file__.startswith(TARGET)
```
"""


@pytest.fixture(scope="session")
def docs() -> ModuleType:
    """ci/docs.py, which runs pytest on the files that a page shows."""
    spec = importlib.util.spec_from_file_location("ci_docs", ROOT / "ci" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs.  Built from a copy, for a build leaves files beside its sources."""
    place = tmp_path_factory.mktemp("wheel")
    source, wheels, target = place / "source", place / "wheels", place / "target"
    for name in SOURCES:
        whole = ROOT / name
        if whole.is_dir():
            shutil.copytree(whole, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(whole, source / name)
    offline = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    pip("install", *offline, "--target", str(target), str(next(wheels.glob("*.whl"))))
    return target


@pytest.fixture
def installed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python finds the installed package before any other."""
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    return wheel


def pip(*arguments: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr


def words(text: str) -> list[str]:
    """A transcript without its digits, versions and line breaks: figures move in the last place from machine to machine."""
    return re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", re.sub(r"torch \S+", "torch", text)).split()


def test_the_wheel_has_the_linked_folders_and_the_data(wheel: Path) -> None:
    for file in DATA:
        assert (wheel / "oracle" / file).is_file() and not (wheel / "oracle" / file).parent.is_symlink()


@pytest.mark.usefixtures("installed")
def test_the_documented_project_passes_and_fails_as_its_page_says(docs: ModuleType) -> None:
    """One kernel is accepted, one is not, with all that a failure shows."""
    page = (ROOT / "docs" / "pytest.md").read_text()
    (arguments, shown), *others = docs.SESSION.findall(page)

    assert not others and words(docs.session(page, arguments)) == words(shown), "run make docs"
    for line in (
        "REJECT  mine.py:rewritten  error-exceeds-bound",
        "again: oracle accept mine.py:rewritten ",
        "1 failed, 1 passed",
    ):
        assert f"\n{line}" in shown


def test_strategies_work_where_warnings_are_errors(docs: ModuleType, installed: Path) -> None:
    printed = docs.session(PAGE.replace("TARGET", repr(str(installed))), "-q -W error --strict-markers")
    assert printed.endswith("2 passed\n"), printed


def test_a_small_drift_report_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """The checkpoint and its texts come with the wheel."""
    options = ("--configs", "fp8", "--blocks", "4x64", "--work", str(tmp_path / "work"))
    command = [sys.executable, "-P", "-m", "oracle", "drift", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "measured 252 tokens in 4 blocks" in done.stdout and os.environ["PYTHONPATH"] == str(installed)


def test_nothing_moves_unseen_in_a_project_of_its_own(installed: Path, tmp_path: Path) -> None:
    """The story of `tests/test_lock_story.py`, told by what the wheel installs, in a scratch repository."""

    def run(arguments: list[str]) -> Said:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
        command = [sys.executable, "-P", "-m", "oracle", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
        return Said(done.returncode, done.stdout + done.stderr)

    shown = subprocess.run(
        [sys.executable, "-P", "-c", "import oracle; print(oracle.__file__)"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith(str(installed))
    tell(tmp_path, run, aside=False)
