"""Families: rows of a table, as the models have them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from oracle.errors import InputError
from oracle.families import FAMILIES


def test_a_family_stands_under_its_own_name() -> None:
    assert [f.name for f in FAMILIES.values()] == list(FAMILIES)
    assert all(f.source for f in FAMILIES.values())


@pytest.mark.parametrize(
    ("name", "q_heads", "kv_heads", "head_dim", "scale", "window"),
    [
        ("gemma4-global", 32, 4, 512, 1.0, (-1, -1)),
        ("gemma4-sliding", 32, 16, 256, 1.0, (1023, 0)),
        ("gemma3", 8, 4, 256, 1 / 16, (1023, 0)),
        ("gemma2", 16, 8, 256, 1 / 16, (4095, 0)),
        ("llama3", 32, 8, 128, 128**-0.5, (-1, -1)),
        ("gpt-oss-sliding", 64, 8, 64, 1 / 8, (127, 0)),
    ],
)
def test_the_models_are_as_published(
    name: str, q_heads: int, kv_heads: int, head_dim: int, scale: float, window: tuple[int, int]
) -> None:
    """Hugging Face's "sliding_window 1024" is (1023, 0): the row's own key counts."""
    f = FAMILIES[name]

    assert (f.q_heads, f.kv_heads, f.head_dim, f.scale, f.window) == (q_heads, kv_heads, head_dim, scale, window)


def test_scales_are_one_over_the_root_of_head_dim_unless_a_model_has_another() -> None:
    others = {f.name for f in FAMILIES.values() if not math.isclose(f.scale, f.head_dim**-0.5)}

    assert others == {"gemma4-global", "gemma4-sliding"}


@pytest.mark.parametrize(
    "wanted",
    [
        lambda f: f.group == 1,
        lambda f: f.kv_heads == 1,
        lambda f: f.group % 2 == 1 and f.group > 1,
        lambda f: f.group == 12,
        lambda f: f.softcap > 0,
        lambda f: f.sinks,
        lambda f: f.sinks and f.window != (-1, -1),
        lambda f: not f.causal,
        lambda f: f.head_dim != f.head_dim_v,
        lambda f: f.head_dim & (f.head_dim - 1) != 0,
    ],
    ids=["mha", "mqa", "odd", "12:1", "softcap", "sinks", "sinks and window", "bidirectional", "uneven", "hd not a power of 2"],
)
def test_every_kind_of_layer_has_a_family(wanted: Any) -> None:
    assert any(wanted(f) for f in FAMILIES.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_heads": 10}, "q_heads is 10; it must be a multiple of kv_heads, 4"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be 1 or more"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim_v": -1}, "head_dim_v is -1"),
        ({"scale": 0.0}, "scale is 0.0; it must be finite and not 0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": math.inf}, "scale is inf"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be 0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"window": (0, -2)}, r"window is \(0, -2\); each side must be -1"),
    ],
)
def test_a_family_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    """In one line that names it, what it got and what it must be."""
    with pytest.raises(InputError, match=f"^family gemma4-global: {message}"):
        replace(FAMILIES["gemma4-global"], **changes)


def test_a_group_is_the_query_heads_of_a_kv_head() -> None:
    assert {f.name: f.group for f in FAMILIES.values() if f.name in ("llama3", "mqa", "encoder", "qwen2-0.5b")} == {
        "llama3": 4,
        "mqa": 16,
        "encoder": 1,
        "qwen2-0.5b": 7,
    }
