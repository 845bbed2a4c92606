"""A model over pages, in any steps and company, says what it says whole; and every layer's kernel really ran."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import TINY, build, deepseek3, gemma2, gemma4, gpt_oss, llama
from torch import Tensor

from oracle.checkpoints.configurations import Plugged, plugged
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.paged import PAGE_SIZE, Run, paged, scattered, step
from oracle.references.rounding import round_to

FILE = Path(__file__).with_name("contract_kernels.py")


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


def kernel(name: str) -> Plugged:
    return plugged(f"{FILE}:{name}")


def run(name: str, layers: int, sequences: int, tokens: int, eight_bit: frozenset[int] = frozenset()) -> Run:
    none = torch.zeros(sequences, dtype=torch.int64)
    table = scattered(sequences, tokens, torch.device("cpu"))
    return Run(kernels=dict.fromkeys(range(layers), kernel(name)), eight_bit=eight_bit, table=table, past=none, new=none)


def in_steps(model: Any, of: Run, sequences: list[Tensor], steps: list[list[int]]) -> list[Tensor]:
    """The logits of each sequence, which takes steps[i][j] tokens in step i."""
    said: list[list[Tensor]] = [[] for _ in sequences]
    with paged(model), torch.inference_mode():
        for counts in steps:
            starts = of.past.tolist()
            new = [tokens[start : start + n] for tokens, start, n in zip(sequences, starts, counts, strict=True)]
            for own, logits in zip(said, step(model, of, new), strict=True):
                own.append(logits)
    return [torch.cat(own) for own in said]


def whole(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def text(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models(hf: Any) -> dict[str, Any]:
    """Each kind of attention, in fp32, by the model's own."""
    attention = {"llama": "sdpa", "gemma2": "eager", "gemma4": "sdpa", "gpt_oss": "eager", "deepseek3": "eager"}
    makers: dict[str, Callable[[Any], Any]] = {
        "llama": llama, "gemma2": gemma2, "gemma4": gemma4, "gpt_oss": gpt_oss, "deepseek3": deepseek3
    }  # fmt: skip
    models = {name: build(hf, make(hf), attention[name]) for name, make in makers.items()}
    models["gpt_oss"].set_experts_implementation("eager")  # the grouped product has no fp64
    return models


NAMES = ("llama", "gemma2", "gemma4", "gpt_oss", "deepseek3")


@pytest.mark.parametrize("name", NAMES)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), cuts=st.lists(st.integers(0, 40), min_size=9, max_size=9))
@example(lengths=[33], cuts=[0] * 9)
@settings(max_examples=6)
def test_any_steps_in_any_company_say_what_the_model_says_whole(
    models: dict[str, Any], name: str, lengths: list[int], cuts: list[int]
) -> None:
    """In fp32, as near to the model in fp64 as its own attention is, but for the factor of a few roundings more."""
    model = models[name]
    sequences = [text(n, seed) for seed, n in enumerate(lengths)]
    ends = [sorted(min(n, c) for c in cuts[3 * i : 3 * i + 3]) for i, n in enumerate(lengths)]
    counts = [[b - a for a, b in pairwise([0, *own, n])] for own, n in zip(ends, lengths, strict=True)]
    steps = [list(step) for step in zip(*counts, strict=True) if any(step)]
    ran = run("plain", len(model.model.layers), len(sequences), 40)
    said = in_steps(model, ran, sequences, steps)

    for tokens, logits in zip(sequences, said, strict=True):
        own = whole(model, tokens)
        exact = whole(model.double(), tokens)
        model.float()
        error, allowed = (logits - exact).abs().max(), (own - exact).abs().max()
        assert error <= 8 * allowed + 1e-6 * exact.abs().max()
    assert set(ran.calls.values()) == {len(steps)}


def test_a_kernel_that_reads_past_the_plan_reads_nan(models: dict[str, Any]) -> None:
    (logits,) = in_steps(models["llama"], run("past_the_plan", 2, 1, 40), [text(20)], [[20]])

    assert bool(logits.isnan().any())


def test_pages_lie_scattered_and_none_is_shared() -> None:
    table = scattered(3, 5 * PAGE_SIZE, torch.device("cpu"))

    assert table.shape == (3, 5) and len(set(table.flatten().tolist())) == 15
    assert table.flatten().tolist() != sorted(table.flatten().tolist())


@given(values=st.lists(st.floats(-1000, 1000, width=16), min_size=1))
def test_e4m3_is_the_nearest_of_its_numbers_and_saturates(values: list[float]) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].double()
    x = torch.tensor(values, dtype=torch.float16)

    apart = (x.double()[:, None] - every).abs()
    assert torch.equal((x.double() - round_to(x, "e4m3").double()).abs(), apart.amin(1))


def test_an_8_bit_cache_changes_what_its_layers_say_and_no_other(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], text(24)
    said = [in_steps(model, run("plain", 2, 1, 24, layers), [tokens], [[24]])[0] for layers in (frozenset(), frozenset({1}))]
    ran = run("plain", 2, 1, 24, frozenset({0}))
    in_steps(model, ran, [tokens], [[24]])
    held = ran._pools[0].k.nan_to_num()

    assert not torch.equal(*said)
    assert torch.equal(held, round_to(held, "e4m3")) and not torch.equal(
        ran._pools[1].k.nan_to_num(), round_to(ran._pools[1].k.nan_to_num(), "e4m3")
    )


def test_a_window_that_the_kernel_does_not_take_is_an_error(models: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"no_window: layer 0 needs window_size=\(7, 0\), which the kernel does not take"):
        in_steps(models["gemma4"], run("no_window", 2, 1, 8), [text(8)], [[8]])


def test_head_dims_that_the_kernel_does_not_declare_are_an_error(models: dict[str, Any]) -> None:
    none = torch.zeros(1, dtype=torch.int64)
    table = scattered(1, 8, torch.device("cpu"))
    of = Run(kernels=dict.fromkeys(range(2), plugged("sdpa-flash")), eight_bit=frozenset(), table=table, past=none, new=none)

    with pytest.raises(
        CheckpointError, match=r"sdpa-flash: layer 0 has head dims \(16, 16\), the kernel declares .*leave that layer out"
    ):
        in_steps(models["llama"], of, [text(8)], [[8]])


def test_an_answer_of_another_shape_is_an_error(models: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"layer 0 got \(7, 4, 16\); expected \(8, 4, 16\)"):
        in_steps(models["llama"], run("wrong_shape", 2, 1, 8), [text(8)], [[8]])


def test_a_layer_that_goes_another_way_is_an_error(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(hf, llama(hf))

    def another_way(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None

    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", another_way)
    with pytest.raises(CheckpointError, match=r"layer 1: .* was called 0 times in one step; expected once"):
        in_steps(model, run("plain", 2, 1, 8), [text(8)], [[8]])


def test_after_a_run_the_model_attends_as_before(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], text(16)
    before = whole(model, tokens)
    in_steps(model, run("plain", 2, 1, 16), [tokens], [[16]])

    assert torch.equal(whole(model, tokens), before)


def test_attention_that_the_contract_does_not_have_is_an_error(hf: Any) -> None:
    config = hf.Gemma3TextConfig(
        **TINY, sliding_window=8, layer_types=["sliding_attention"] * 2, use_bidirectional_attention=True
    )
    with pytest.raises(CheckpointError, match="layer 0"):
        in_steps(build(hf, config), run("plain", 2, 1, 8), [text(8)], [[8]])
