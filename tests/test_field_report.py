"""What `ci/field.py` asks, keeps of a verdict and writes on its page."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from oracle.casefile import CaseFile, read
from oracle.kernels.field.table import FIELD
from oracle.scope import Scope

ROOT = Path(__file__).resolve().parent.parent
FINDING = {"reason": "relation-broken", "case": "chunks", "text": "in chunks: e = 2", "size": 9}
VERDICT: dict[str, Any] = {
    "outcome": "reject",
    "door": "",
    "incumbent": "emulator (textbook)",
    "reasons": ["crash", "relation-broken"],
    "findings": [
        FINDING,
        FINDING | {"reason": "crash", "text": "it read past the end of sinks", "size": 70},
        FINDING | {"reason": "crash", "text": "it read past the end of v", "size": 7},
    ],
    "ratios": [{"value": 1.01, "lower": 1.0, "upper": 1.02, "margin": 1.25}],
    "figures": {"max_e": 0.7, "max_e_lse": None, "rms_e": 0.1, "calls": 90, "seconds": 1.25},
    "coverage": {"cases": 12, "counts": {"family llama3": 2, "family mqa": 0, "dtype bf16": 3}, "missing": []},
    "environment": {"profile": "quick"},
}


@pytest.fixture(scope="module")
def field() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "ci"))
    yield importlib.import_module("field")
    sys.path.remove(str(ROOT / "ci"))
    del sys.modules["field"]


def asked(field: ModuleType, **changes: Any) -> Any:
    return field.Asked(**{"device": "cpu", "profile": "", "seconds": 5.0, "against": ""} | changes)


def ran(verdict: dict[str, Any] | None, calls: list[list[str]], stderr: str = "") -> Any:
    """Stands in for `subprocess.run`: writes the verdict where the command says."""

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        if verdict is not None:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(verdict))
        return SimpleNamespace(stderr=stderr, stdout="", returncode=1)

    return run


def test_what_is_kept_of_a_verdict(field: ModuleType) -> None:
    kept = field.kept(VERDICT)

    assert kept["families"] == ["llama3"]
    assert kept["relations"] == ["chunks"]
    assert kept["hostile"] == {"crash": 2}
    assert [f["text"] for f in kept["findings"]] == ["it read past the end of v", "in chunks: e = 2"]  # the smallest of each
    assert kept["ratio"] == {"value": 1.01, "lower": 1.0, "upper": 1.02}


def test_a_kernel_is_judged_by_its_profile_and_again_against_an_incumbent(
    field: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(field.subprocess, "run", ran(VERDICT, calls))
    how = asked(field, against="emulator")

    facts = field.judged_again(FIELD["flex-eager"], how, field.judged(FIELD["flex-eager"], how))

    assert [c[c.index("--profile") + 1] for c in calls] == ["quick", "quick"]
    assert "--against" not in calls[0] and calls[1][calls[1].index("--against") + 1] == "emulator"
    assert facts["command"].startswith("oracle accept oracle.kernels.field.flex:eager --seed 0")
    assert facts["outcome"] == facts["against"]["outcome"] == "reject"


@pytest.mark.parametrize(
    ("reasons", "times"), [([], 2), (["no-door"], 2), (["looser-contract"], 2), (["no-door", "gain"], 1), (["crash"], 1)]
)
def test_only_what_another_incumbent_may_decide_is_judged_again(
    field: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reasons: list[str], times: int
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(field.subprocess, "run", ran(VERDICT | {"reasons": reasons, "findings": []}, calls))
    monkeypatch.setattr(field, "kept", lambda verdict: VERDICT | {"reasons": reasons})
    monkeypatch.setattr(field, "DATA", tmp_path)
    monkeypatch.setattr(field, "write_page", lambda: None)

    field.judge(["sdpa-math", "sdpa-flash"], asked(field, against="emulator"), 2)

    kernels = json.loads((tmp_path / "cpu.json").read_text())["kernels"]
    assert len(calls) == 2 * times
    assert [name for name, facts in kernels.items() if ("against" in facts) == (times == 2)] == ["sdpa-flash", "sdpa-math"]


def test_no_verdict_says_why(field: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field.subprocess, "run", ran(None, [], stderr="oracle: cannot be loaded"))
    assert field.judged(field.ROWS["sdpa-math"], asked(field))["said"] == "oracle: cannot be loaded"

    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("oracle", 5.0)

    monkeypatch.setattr(field.subprocess, "run", late)
    assert field.judged(field.ROWS["sdpa-math"], asked(field))["said"] == "no verdict after 5 s"
    assert field.judged(FIELD["sage"], asked(field))["unavailable"] == "is not for cpu"


def test_a_second_verdict_that_came_too_late_is_said_beside_the_first(field: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def late_the_second_time(command: list[str], **_: Any) -> Any:
        if "--against" in command:
            raise subprocess.TimeoutExpired("oracle", 5.0)
        return ran(VERDICT, [])(command)

    monkeypatch.setattr(field.subprocess, "run", late_the_second_time)
    how = asked(field, against="triton-prefill-16")
    facts = field.judged_again(FIELD["flex-eager"], how, field.judged(FIELD["flex-eager"], how))
    whole = {"machine": {"device": "CPU, AVX512", "python": "3.11"}, "kernels": {"flex-eager": facts}}

    text = field.page("# Field\n\n<!-- ci/field.py: cpu -->\n<!-- end -->\n", {"cpu": whole})

    assert facts["outcome"] == "reject" and facts["against"]["outcome"] is None
    assert "against triton-prefill-16: no verdict after 5 s |" in text and "None" not in text


def test_the_page_has_a_row_for_every_kernel_judged_and_a_reason_for_every_one_that_is_not(field: ModuleType) -> None:
    judged = field.kept(VERDICT) | {"version": "2.13", "wall": 8, "command": "oracle accept x"}
    whole = {
        "machine": {"device": "CPU, AVX512", "python": "3.11"},
        "kernels": {
            "sdpa-math": judged,
            "mlx-16": {"version": "", "unavailable": "mlx is not installed: pip install mlx"},
            "sage": {"version": "", "unavailable": "is not for cpu"},
        },
    }

    text = field.page("# Field\n\n<!-- ci/field.py: cpu -->\nold\n<!-- end -->\n", {"cpu": whole})

    assert "old" not in text and "`sdpa-math`: PyTorch" in text and "2 x crash" in text
    assert f"| `mlx-16`: MLX, {FIELD['mlx-16'].about} | cpu | mlx is not installed: pip install mlx |" in text
    assert f"| `jax-fp32`: JAX, {FIELD['jax-fp32'].about} | cpu | not judged yet |" in text
    assert "sage" not in text  # it is for another machine
    assert field.page(text, {"cpu": whole}) == text


def test_the_committed_page_is_that_of_the_committed_verdicts(field: ModuleType) -> None:
    machines = {f.stem: json.loads(f.read_text()) for f in sorted((ROOT / "docs" / "field").glob("*.json"))}
    page = (ROOT / "docs" / "field.md").read_text()

    assert machines and field.page(page, machines) == page
    assert {name for whole in machines.values() for name in whole["kernels"]} <= set(field.ROWS)


FOUND = read(ROOT / "ci" / "cases" / "field")


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.case.name)
def test_a_finding_is_a_small_case_of_an_adapter_that_takes_it_and_the_page_has_its_command(file: CaseFile) -> None:
    module, _, function = file.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    scope = Scope(record=kernel.record, parameters=frozenset(inspect.signature(kernel).parameters))

    assert file.kernel in {row.target for row in FIELD.values()}
    assert scope.refuses(file.case) is None and file.case.family.kv_heads == len(file.case.q_lens) == 1
    device = " --device cuda" if "--device cuda" in file.path.read_text() else ""
    assert device or "cpu" in next(row.devices for row in FIELD.values() if row.target == file.kernel)
    assert f"`oracle replay {file.path.relative_to(ROOT)}{device}`" in (ROOT / "docs" / "findings.md").read_text()
