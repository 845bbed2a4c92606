"""Triton's interpreter is switched on before Triton is imported, whichever of the kernels' modules is imported first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
SWITCH = KERNELS / "triton_language.py"


def switches_first(source: str) -> bool:
    """Whether a module imports one of the kernels' own Triton modules before Triton, where it imports Triton."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(imports, key=lambda node: node.lineno):
        for name in [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]:
            if name.startswith("oracle.kernels.triton_"):
                return True
            if name.partition(".")[0] == "triton":
                return False
    return True


@pytest.mark.parametrize("file", sorted(set(KERNELS.glob("*.py")) - {SWITCH}), ids=lambda file: file.stem)
def test_every_module_imports_the_switch_before_triton(file: Path) -> None:
    assert switches_first(file.read_text())


def test_the_switch_is_set_before_its_module_imports_triton() -> None:
    lines = SWITCH.read_text().splitlines()
    (switch,) = (i for i, line in enumerate(lines) if 'setdefault("TRITON_INTERPRET"' in line)

    assert switch < min(i for i, line in enumerate(lines) if line.startswith(("import triton", "from triton")))


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("import triton", False),
        ("import triton.language as tl\nfrom oracle.kernels.triton_tiles import place", False),
        ("def f():\n    from triton.tools import x", False),
        ("from oracle.kernels.triton_tiles import place\nimport triton", True),
        ("import torch", True),
    ],
)
def test_a_module_that_imports_triton_first_is_seen(source: str, first: bool) -> None:
    assert switches_first(source) is first
