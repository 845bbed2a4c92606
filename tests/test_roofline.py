"""`oracle roofline`: every microsecond of a prefill in one account, and FLOPs that two counts agree on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_models import TINY, build, real_dims, save_with_texts

from oracle import roofline as roofline_module
from oracle.checkpoints.configurations import configuration
from oracle.checkpoints.generation import Prompted
from oracle.checkpoints.scopes import WHOLE, Kind, named, scoped
from oracle.checkpoints.variants import Subject
from oracle.cli_bench import roofline as command
from oracle.rates import Ceiling
from oracle.roofline import Asked, Roofline, check_flops, profiled, roofline
from oracle.roofline_flops import counted, pairs
from oracle.roofline_text import headline, roofline_json, roofline_markdown
from oracle.roofline_trace import TraceError, split

SLIDING, GLOBAL = named(Kind.OTHER, "sliding"), named(Kind.OTHER, "global")


def scope(name: str, start: float, stop: float, category: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start}


# Reading a trace

CPU = [
    scope(WHOLE, 0, 100),
    scope(named(Kind.ROPE), 5, 10),
    scope(SLIDING, 10, 50),
    scope(named(Kind.NORMS, "sliding"), 10, 20),
    scope(named(Kind.CACHE, "sliding"), 30, 48),
    scope(named(Kind.ATTENTION, "sliding"), 35, 45),
    scope(GLOBAL, 50, 90),
    scope(named(Kind.ATTENTION, "global"), 60, 90),
    scope(named(Kind.OUTPUT), 90, 98),
    scope("aten::mm", 91, 97, "cpu_op"),
    scope(named(Kind.NORMS), 110, 120),  # after the pass
]


def test_on_the_cpu_a_scope_has_its_own_time_and_all_of_it_is_somewhere() -> None:
    found = split(CPU, "cpu")

    assert {key: round(1e6 * s, 6) for key, s in found.items()} == {
        ("other", ""): 100 - 5 - 40 - 40 - 8,
        ("rope", ""): 5,
        ("other", "sliding"): 40 - 10 - 18,
        ("norms", "sliding"): 10,
        ("cache writes", "sliding"): 8,
        ("attention", "sliding"): 10,
        ("other", "global"): 10,
        ("attention", "global"): 30,
        ("output layer", ""): 8,
    }
    assert sum(found.values()) == pytest.approx(100e-6)


def test_the_order_of_events_does_not_matter() -> None:
    assert split(CPU[::-1], "cpu") == pytest.approx(split(CPU, "cpu"))


def launched(name: str, at: float, start: float, stop: float, number: int, category: str = "kernel") -> list[dict[str, Any]]:
    """A launch on the CPU, and what the device did later."""
    by = "cuda_driver" if "triton" in name else "cuda_runtime"
    both = [scope("launch", at, at + 0.5, by), scope(name, start, stop, category)]
    return [e | {"args": {"correlation": number}} for e in both]


def test_on_cuda_work_of_the_device_belongs_to_the_innermost_scope_that_launched_it() -> None:
    """The CPU runs ahead: when the device does the work, another scope is open."""
    events = [
        *CPU,
        *launched("triton_kernel", 36, 1036, 1044, 1),
        *launched("gemm", 46, 1045, 1048, 2),
        *launched("Memset (Device)", 55, 1050, 1053, 3, "gpu_memset"),
        *launched("triton_hd512", 61, 1060, 1090, 4),
        *launched("gemm", 90.5, 1090, 1097, 5),
        *launched("Memcpy DtoH", 99, 1100, 1101, 6, "gpu_memcpy"),
        *launched("Memcpy DtoH", 130, 1130, 1140, 7, "gpu_memcpy"),  # after the pass
    ]

    found = split(events, "cuda")

    assert {key: round(1e6 * s, 6) for key, s in found.items()} == {
        ("attention", "sliding"): 8,
        ("cache writes", "sliding"): 3,
        ("other", "global"): 3,
        ("attention", "global"): 30,
        ("output layer", ""): 7,
        ("other", ""): 1,
    }


def test_what_has_no_launch_in_the_trace_is_found_by_the_ranges_on_the_device() -> None:
    """And what is in none of them is no one's: that is an error, and not left out."""
    events = [
        *CPU,
        scope(WHOLE, 1000, 1200, "gpu_user_annotation"),
        scope(named(Kind.ATTENTION, "global"), 1060, 1090, "gpu_user_annotation"),
        scope("hd512", 1060, 1090, "kernel"),
        scope("embedding", 1001, 1003, "kernel"),
    ]

    assert split(events, "cuda") == pytest.approx({("attention", "global"): 30e-6, ("other", ""): 2e-6})
    with pytest.raises(TraceError, match="does not show who launched 'lost'"):
        split([*events, scope("lost", 1300, 1310, "kernel")], "cuda")


def test_a_trace_without_the_pass_or_without_work_says_nothing() -> None:
    with pytest.raises(TraceError, match=r"has no scope 'oracle scope: other\|'"):
        split(CPU[1:], "cpu")
    with pytest.raises(TraceError, match="no work of cuda"):
        split(CPU, "cuda")


# Counting


def test_pairs_are_those_of_the_mask() -> None:
    pos, key = torch.arange(50)[:, None], torch.arange(50)

    assert pairs(50, None) == int((key <= pos).sum())
    assert pairs(50, 8) == int(((key <= pos) & (key > pos - 8)).sum())


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("model", ["gemma4", "llama"])
def test_the_count_by_hand_is_that_of_the_profiler(hf: Any, model: str) -> None:
    """Account by account; and one more or less is seen."""
    made = real_dims(hf) if model == "gemma4" else build(hf, hf.LlamaConfig(**TINY | {"head_dim": 64})).to(torch.bfloat16)
    one = Prompted(subject=Subject(made), prompt=torch.arange(3, 27), about="")
    counts = counted(made.config.get_text_config(), one.subject.kinds, 24)

    seen = profiled(one, one.subject.variant(configuration("bf16")), flops=True).product_flops

    check_flops(seen, counts)
    assert len(seen) == (5 if model == "gemma4" else 3)
    key = next(iter(seen))
    for wrong in (dict(seen) | {key: seen[key] + 2}, {k: f for k, f in seen.items() if k != key}):
        with pytest.raises(TraceError, match="FLOPs counted from the configuration"):
            check_flops(wrong, counts)


def test_a_global_layer_of_gemma_4_has_no_product_for_v(hf: Any) -> None:
    config = real_dims(hf).config.get_text_config()
    counts = counted(config, ("sliding", "global"), 10)

    assert counts["projections", "sliding"] == 2 * 10 * 64 * (2 * 4 * 64 + 2 * 2 * 64)
    assert counts["projections", "global"] == 2 * 10 * 64 * (2 * 4 * 128 + 1 * 128)
    assert counts["MLP products", "global"] == 2 * 10 * 3 * 64 * 96
    assert counts["attention", "global"] == 4 * 4 * 128 * 55
    assert counts["attention", "sliding"] == 4 * 4 * 64 * (36 + 2 * 8)
    assert counts["output layer", ""] == 2 * 64 * 96


def test_scopes_leave_no_trace_and_change_no_bit(hf: Any) -> None:
    model = real_dims(hf)
    subject, tokens = Subject(model), torch.arange(3, 13)[None]
    before = model(tokens, use_cache=False).logits
    with scoped(subject):
        inside = model(tokens, use_cache=False).logits

    assert torch.equal(inside, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# The report


@pytest.fixture(scope="module")
def tiny(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_with_texts(hf, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8)
    monkeypatch.setattr(roofline_module, "products", lambda dtype, device: Ceiling(work=lambda: x + x, amount=1e3))


@pytest.fixture
def found(tiny: tuple[Path, Path], cheap: None) -> Roofline:
    asked = Asked(checkpoint=tiny[0], texts=(tiny[1],), prompt_tokens=24, seconds=1e-4)
    return roofline(asked, {"ORACLE_GLOBAL_ATTN": "sdpa-math"}, lambda done, total, what: None)


def test_a_report_has_every_kind_of_work_and_the_largest_first(found: Roofline) -> None:
    works = {(row.work, row.kind) for row in found.rows}

    assert {row.work for row in found.rows} == {str(kind) for kind in Kind}
    assert {("attention", "global"), ("attention", "sliding"), ("norms", ""), ("output layer", "")} <= works
    assert [row.seconds.value for row in found.rows] == sorted((row.seconds.value for row in found.rows), reverse=True)
    assert found.kernels == {"sliding": "oracle.kernels.torch_sdpa:sdpa_flash", "global": "oracle.kernels.torch_sdpa:sdpa_math"}
    assert found.checked_flops > 0


def test_the_row_with_the_most_to_give_is_named(found: Roofline) -> None:
    """Not the largest share where that is done at the product's rate, and never what has no name."""

    def at(row: Any, share: float, rate: float) -> Any:
        low = {"low": 0.0, "high": 1.0, "se": 0.0}
        return replace(row, share=type(row.share)(value=share, **low), of_products=type(row.share)(value=rate, **low))

    row = next(row for row in found.rows if (row.work, row.kind) == found.worst)
    assert row.work != Kind.OTHER
    assert row.share.value * (1 - row.of_products.value) == max(
        r.share.value * (1 - r.of_products.value) for r in found.rows if r.work != Kind.OTHER
    )
    rows = (at(replace(row, work="attention", kind="global", flops=1.0), 0.4, 0.2),)
    assert headline(replace(found, rows=rows, worst=("attention", "global"))) == (
        "attention of global layers: 40.0 % of the prefill at 20.0 % of the matrix product's rate; it has the most to give"
    )


def test_the_report_is_json_and_markdown(found: Roofline) -> None:
    assert json.loads(json.dumps(roofline_json(found), allow_nan=False))["rows"][0]["share"]["value"] > 0
    assert "| work | layers | ms | share |" in roofline_markdown(found)


@pytest.fixture
def run(tiny: tuple[Path, Path], cheap: None) -> Callable[..., Result]:
    def invoke(*arguments: str, environment: dict[str, str] | None = None) -> Result:
        own = [str(tiny[0]), "--text", str(tiny[1])]
        return CliRunner().invoke(command, [*own, *arguments], standalone_mode=False, env=environment)

    return invoke


def test_the_command_reads_the_knob(run: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    result = run("--prompt-tokens", "24", "--json", str(file), environment={"ORACLE_SLIDING_ATTN": "sdpa-math"})

    assert result.return_value == 0, result.exception
    assert "it has the most to give" in result.stdout.splitlines()[0]
    assert json.loads(file.read_text())["kernels"]["sliding"] == "oracle.kernels.torch_sdpa:sdpa_math"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--prompt-tokens", "300"), {}, "the model's context is 256"),
        (("--depth", "2"), {}, "--depth is for random models (gemma4-31b-like)"),
        ((), {"ORACLE_GLOBAL_ATTN": "nothing"}, "ORACLE_GLOBAL_ATTN: nothing: no such kernel"),
        (("--markdown", "nowhere/r.md"), {}, "there is no folder"),
    ],
)
def test_wrong_usage_is_told(
    run: Callable[..., Result], arguments: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    result = run("--prompt-tokens", "24", *arguments, environment=environment)

    assert result.exception is not None and said in str(getattr(result.exception, "message", result.exception))
