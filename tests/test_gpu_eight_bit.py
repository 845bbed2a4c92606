"""The scripts that time decode and 8-bit kernels on a GPU count operations and bytes right; timing itself needs the GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "ci" / "gpu"
E4M3 = "e4m3, sums in FP22"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that loads a module of ci/gpu by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, f"gpu_{name}", module)  # where a dataclass looks for its module
        spec.loader.exec_module(module)
        return module

    return load


def rates(e4m3: float, int8: float) -> dict[str, Any]:
    """What the part `rates` would have found: ratios to 500 TFLOP/s of bf16."""
    return {
        name: {"ratio": ratio, "products_tflops": [400.0, 600.0]}
        for name, ratio in ((E4M3, e4m3), ("e4m3, sums promoted", e4m3), ("int8", int8))
    }


def test_an_attention_gains_what_both_of_its_products_gain(script: Any) -> None:
    found = script("eight_bit").ceiling(rates(2.0, 2.0), 1e30)

    assert found["q.k and P.V in e4m3, FP22, head dim 512"]["tensor cores"] == 2
    assert found["q.k in int8, P.V in bf16, head dim 512"]["tensor cores"] == pytest.approx(4 / 3, abs=1e-3)
    assert found["q.k in int8, P.V in bf16, head dim 512"]["nothing overlaps"] == pytest.approx(4 / 3, abs=1e-3)


def test_float32_work_lowers_the_ceiling_and_more_so_where_heads_are_small(script: Any) -> None:
    """One score at head dim 512: 29.5 issues, and 2048 operations at 1000 TFLOP/s, 2.048 ps."""
    found = script("eight_bit").ceiling(rates(2.0, 2.0), 29.5 / 2.048e-12)
    small, large = (found[f"q.k and P.V in e4m3, FP22, head dim {dim}"] for dim in (128, 512))

    assert large["float32 beside"] == pytest.approx(1)
    assert large["nothing overlaps"] == pytest.approx(1)
    assert small["float32 beside"] > large["float32 beside"]


def test_bytes_are_those_of_live_keys_and_values(script: Any) -> None:
    decode = script("decode")

    assert decode.GLOBAL.bytes == 32 * 16384 * 4 * 512 * 2 * 2
    assert decode.replace(decode.LLAMA, cache="e4m3").bytes == 32 * 16384 * 8 * 128 * 2


def test_the_shapes_of_the_bar_are_timed(script: Any) -> None:
    shapes = script("decode").SHAPES

    for dim, kv_heads in ((512, 4), (128, 8)):
        for cache in ("bf16", "e4m3"):
            barred = [s for s, bar in shapes.items() if bar == 0.7 and (s.dim, s.kv_heads, s.cache) == (dim, kv_heads, cache)]
            assert {s.tokens for s in barred} >= {1, 5}
            assert all((s.batch, s.keys) == (32, 16384) for s in barred)
