"""docs/kernels.md is made of the reports that stand beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_made_of_the_reports() -> None:
    spec = importlib.util.spec_from_file_location("kernels_page", ROOT / "ci" / "gpu" / "kernels_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert (ROOT / "docs" / "kernels.md").read_text() == module.page(), "run python ci/gpu/kernels_page.py"
