"""The documents say what the code does: their tables and transcripts are made again and compared."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from oracle.checkpoints.loading import weights_sha256

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_docs", ROOT / "ci" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_that_make_docs_writes(docs: ModuleType) -> None:
    assert (ROOT / "docs" / "tables.md").read_text() == docs.tables(), "run make docs"


def shape(text: str) -> str:
    """A transcript without its digits, versions and line breaks: figures move in the last place from machine to machine."""
    text = re.sub(r"torch \S+", "torch", text)
    return " ".join(re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", text).split())


def test_the_transcripts_are_what_the_commands_print(docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word; the numbers in them are left to the reader's machine."""
    monkeypatch.setattr("sys.argv", ["oracle"])
    shown = list(docs.TRANSCRIPT.finditer((ROOT / "README.md").read_text()))

    assert [m[2].split()[0] for m in shown] == ["ACCEPT", "REJECT"]
    for m in shown:
        assert shape(m[2]) == shape(docs.transcript(m[1])), "run make docs"


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("contract", "captures", "drift", "numerics"))]


@pytest.mark.parametrize("document", PAGES)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    links = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("http")]
    paths = re.findall(r"`((?:oracle|references|kernels|checkpoints|ci|docs|tests)/[\w./-]*)`", text)

    folder = (ROOT / document).parent
    assert [t for t in links if t and not (folder / t).exists()] == []
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_drift_was_measured_on_the_checkpoint_that_ships() -> None:
    """Every configuration of the study, on the weights of checkpoints/gemma4-mini."""
    page = (ROOT / "docs" / "drift_measured.md").read_text()
    study = (ROOT / "ci" / "drift_study.py").read_text()
    configurations = re.findall(r'^    "([^"]+)",$', study, re.MULTILINE)

    assert weights_sha256(ROOT / "checkpoints" / "gemma4-mini") in page
    assert len(configurations) == 10 and all(page.count(f"| `{name}` | ") >= 2 for name in configurations)
