"""The knob: off changes no byte, on calls that kernel in that family of layers alone, and nothing falls back."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import build, llama, real_dims
from torch import Tensor

from oracle.checkpoints import generation
from oracle.checkpoints.configurations import Plugged, plugged
from oracle.checkpoints.generation import Prompted, generate, generate_in_turns
from oracle.checkpoints.knob import turned
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.paged import Run, paged, scattered, step
from oracle.checkpoints.random_models import GEMMA4_31B, random_model
from oracle.checkpoints.variants import Subject

OTHER = "oracle.kernels.torch_sdpa:sdpa_math"
PROMPT = torch.arange(5, 45)


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def subject(hf: Any) -> Subject:
    return Subject(real_dims(hf))


def logits(subject: Subject, kernels: dict[int, Plugged]) -> Tensor:
    """Of a prefill and two decode steps."""
    none = torch.zeros(1, dtype=torch.int64)
    run = Run(kernels=kernels, eight_bit=frozenset(), table=scattered(1, 42, torch.device("cpu")), past=none, new=none)
    with paged(subject.model), torch.inference_mode():
        return torch.cat(
            [step(subject.model, run, [part])[0] for part in torch.split(torch.cat((PROMPT, PROMPT[:2])), [40, 1, 1])]
        )


def knobbed(subject: Subject, **environment: str) -> Tensor:
    return logits(subject, dict(turned(subject, environment).kernels))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ORACLE_GLOBAL_ATTN": "off"},
        {"ORACLE_GLOBAL_ATTN": "", "ORACLE_SLIDING_ATTN": " off "},
        {"ORACLE_OTHER_ATTN": "nothing"},
    ],
)
def test_off_is_the_incumbent_called_directly_byte_for_byte(subject: Subject, environment: dict[str, str]) -> None:
    incumbent = plugged("", "cpu")
    direct = logits(subject, {0: incumbent, 1: incumbent})

    got = knobbed(subject, **environment)

    assert torch.equal(got.view(torch.int16), direct.view(torch.int16))
    assert all(kernel.function is incumbent.function for kernel in turned(subject, environment).kernels.values())


def test_on_the_kernel_is_called_in_that_family_alone(subject: Subject) -> None:
    """And is seen in the logits, in each family: else the test above would say nothing."""
    off = knobbed(subject)
    for knob, layer in (("ORACLE_SLIDING_ATTN", 0), ("ORACLE_GLOBAL_ATTN", 1)):
        kernels = turned(subject, {knob: "sdpa-math"}).kernels

        assert [kernels[i].target == OTHER for i in (0, 1)] == [i == layer for i in (0, 1)]
        assert not torch.equal(knobbed(subject, **{knob: "sdpa-math"}), off)


def test_a_file_is_a_kernel_too(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from oracle.kernels.torch_sdpa import sdpa_flash as mine\n")

    assert torch.equal(knobbed(subject, ORACLE_GLOBAL_ATTN=f"{file}:mine"), knobbed(subject))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sdpa-flsh", "ORACLE_GLOBAL_ATTN: sdpa-flsh: no such kernel; did you mean sdpa-flash"),
        ("tilelang-hd512", "ORACLE_GLOBAL_ATTN: tilelang-hd512: does not run on cpu"),
        ("nowhere.py:f", "ORACLE_GLOBAL_ATTN: nowhere.py: no such file"),
        ("rebuilt-k", "ORACLE_GLOBAL_ATTN: rebuilt-k: asks for k_norm_weight"),
        ("Off", "ORACLE_GLOBAL_ATTN: Off: no such kernel"),
        ("oracle.kernels.tilelang_prefill:hd512", "declares the devices cuda; got cpu"),
    ],
)
def test_an_unknown_or_unavailable_kernel_stops(subject: Subject, word: str, said: str) -> None:
    with pytest.raises(CheckpointError) as stopped:
        turned(subject, {"ORACLE_GLOBAL_ATTN": word})

    assert said in str(stopped.value) and "off is the incumbent" in str(stopped.value)


def test_a_kernel_that_a_layer_does_not_suit_stops_and_is_not_replaced(hf: Any, tmp_path: Path) -> None:
    """Head dim 16, which sdpa-math has not declared; and one whose own code gives up."""
    model = Subject(build(hf, llama(hf)).to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="has head dims"):
        knobbed(model, ORACLE_GLOBAL_ATTN="sdpa-math")
    file = tmp_path / "gives_up.py"
    file.write_text(
        "def kernel(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, window_size=(-1, -1)):\n"
        "    raise RuntimeError('gave up')\n"
    )
    subject = Subject(real_dims(hf))
    with pytest.raises(RuntimeError, match="gave up"):
        knobbed(subject, ORACLE_GLOBAL_ATTN=f"{file}:kernel")


def test_a_knob_for_layers_that_are_not_there_stops(hf: Any) -> None:
    model = Subject(build(hf, llama(hf)))

    with pytest.raises(CheckpointError, match="ORACLE_SLIDING_ATTN=sdpa-math: the model has no sliding layer"):
        turned(model, {"ORACLE_SLIDING_ATTN": "sdpa-math"})


# What runs under it


def test_a_generation_is_that_of_step_by_step_logits(subject: Subject) -> None:
    """The likeliest token each time, from the last logits of a prefill and of every step after it."""
    one = Prompted(subject=subject, prompt=PROMPT, about="")
    kernels = dict(turned(subject, {}).kernels)

    made = generate(one, turned(subject, {}), 3)

    none = torch.zeros(1, dtype=torch.int64)
    run = Run(kernels=kernels, eight_bit=frozenset(), table=scattered(1, 43, torch.device("cpu")), past=none, new=none)
    expected, new = [], PROMPT
    with paged(subject.model), torch.inference_mode():
        for _ in range(3):
            new = step(subject.model, run, [new])[0][-1].argmax()[None]
            expected.append(int(new))
    assert made.tokens == tuple(expected) and made.first_s > 0 and len(made.later_s) == 2 and min(made.later_s) > 0


def test_the_first_step_is_the_prompts_and_each_other_a_tokens(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 5, 1, 100 and 1 seconds, and other seconds between them."""
    clock = iter([0, 5, 10, 11, 20, 120, 130, 131])
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    made = generate(Prompted(subject=subject, prompt=PROMPT, about=""), turned(subject, {}), 4)

    assert (made.first_s, made.later_s) == (5.0, (1.0, 100.0, 1.0))


def test_in_turns_each_variant_gives_what_it_gives_alone_and_the_order_turns(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Prompted(subject=subject, prompt=PROMPT, about="")
    sides = [turned(subject, {"ORACLE_GLOBAL_ATTN": word}) for word in ("off", "sdpa-math")]
    alone = [generate(one, side, 5).tokens for side in sides]
    seen: list[bool] = []

    def watched(model: Any, run: Run, new: Any, **options: Any) -> Any:
        seen.append(run.kernels == sides[1].kernels)
        return step(model, run, new, **options)

    monkeypatch.setattr(generation, "step", watched)
    made = generate_in_turns(one, sides, 5)

    assert [m.tokens for m in made] == alone
    assert seen == [False, True, True, False, False, True, True, False, False, True]


def test_what_slows_the_host_for_seconds_slows_both_sides_in_turn(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the clock advances it by more than the one before: a later step of the same length seems longer."""
    now = itertools.accumulate(range(1, 1000))
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    sides = [turned(subject, {})] * 2

    before, after = generate_in_turns(Prompted(subject=subject, prompt=PROMPT, about=""), sides, 9)

    assert median(before.later_s) / median(after.later_s) == pytest.approx(1.0, abs=0.05)
    alone = generate(Prompted(subject=subject, prompt=PROMPT, about=""), sides[0], 9)
    assert median(alone.later_s) > 2 * median(after.later_s)


def test_the_last_logits_alone_are_those_of_all(subject: Subject) -> None:
    kernels = dict(turned(subject, {}).kernels)
    both = []
    for last in (False, True):
        none = torch.zeros(2, dtype=torch.int64)
        run = Run(kernels=kernels, eight_bit=frozenset(), table=scattered(2, 30, torch.device("cpu")), past=none, new=none)
        with paged(subject.model), torch.inference_mode():
            both.append(step(subject.model, run, [PROMPT[:30], PROMPT[:7]], last=last))

    assert [part.shape[0] for part in both[1]] == [1, 1]
    for whole, part in zip(*both, strict=True):
        assert torch.allclose(
            whole[-1:].float(), part.float(), rtol=2**-7, atol=2**-7
        )  # a product of another shape rounds otherwise


def test_a_random_model_has_the_shapes_and_ends_with_a_global_layer(hf: Any) -> None:
    small = GEMMA4_31B | {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
                          "num_key_value_heads": 4, "num_global_key_value_heads": 1}  # fmt: skip
    model = random_model(small, 7, "cpu")
    subject = Subject(model)

    assert subject.kinds == ("global", *["sliding"] * 5, "global")
    assert subject.shapes()[-1] == "global, 8 q heads, 1 kv heads, head dim 512, V is K before its norm"
    assert subject.shapes()[1] == "sliding, 8 q heads, 4 kv heads, head dim 256, window 1024"
    assert model.dtype == torch.bfloat16 and not model.training
    with pytest.raises(CheckpointError, match="61 layers: expected 1 to 60"):
        random_model(small, 61, "cpu")


def test_sixty_layers_of_the_31b_like_model_are_31_billion_parameters() -> None:
    s = GEMMA4_31B
    mlp, heads = 3 * s["intermediate_size"], s["num_attention_heads"]
    sliding = mlp + 2 * s["head_dim"] * (heads + s["num_key_value_heads"])
    whole = mlp + s["global_head_dim"] * (2 * heads + s["num_global_key_value_heads"])

    assert 30.6e9 < s["hidden_size"] * (50 * sliding + 10 * whole + s["vocab_size"]) < 30.8e9
