"""`oracle ab`: what moved, what stayed and what cannot be told, and that each is said as often as it should be."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from tiny_models import save_with_texts

from oracle import ab as ab_module
from oracle.ab import PEAK, REST, TPOT, TTFT, Ab, Alone, Asked, Sample, ab
from oracle.ab_tests import Ruling, change, repeats_to_decide
from oracle.ab_text import ab_json, ab_markdown, headline
from oracle.checkpoints.generation import Generated
from oracle.cli_bench import ab as command
from oracle.errors import InputError
from oracle.memory import peak_bytes, restart_peak

# Deciding


def pairs(ratio: float, sd: float, repeats: int, seed: int = 0) -> tuple[list[float], list[float]]:
    random = np.random.default_rng(seed)
    before = random.lognormal(0.0, 0.3, repeats)  # the machine moves a lot, and both with it
    return before.tolist(), (before * ratio * random.lognormal(0.0, sd, repeats)).tolist()


@pytest.mark.parametrize(
    ("ratio", "sd", "ruling"),
    [
        (1.0, 0.01, Ruling.STAYED),
        (1.01, 0.01, Ruling.STAYED),  # it moved, and by less than anybody asks about
        (0.5, 0.01, Ruling.MOVED),
        (2.0, 0.1, Ruling.MOVED),
        (1.0, 0.3, Ruling.CANNOT_TELL),  # not significant is not equal
    ],
)
def test_rulings(ratio: float, sd: float, ruling: Ruling) -> None:
    found = change("x", "s", *pairs(ratio, sd, 10), 0.05)

    assert found.ruling is ruling
    assert (found.repeats_to_decide is not None) == (ruling is Ruling.CANNOT_TELL)
    assert found.ratio.low <= ratio <= found.ratio.high


@pytest.mark.parametrize("ratio", [1.05, 1 / 1.05])
def test_at_the_margin_it_is_said_to_have_stayed_in_5_percent_and_no_more(ratio: float) -> None:
    """400 samples: 0.05 is known to 0.022 at two standard errors."""
    said = [change("x", "s", *pairs(ratio, 0.02, 10, seed), 0.05).ruling is Ruling.STAYED for seed in range(400)]

    assert 0.028 < np.mean(said) < 0.072


def test_where_nothing_changed_it_is_said_to_have_moved_in_5_percent_and_no_more() -> None:
    said = [change("x", "s", *pairs(1.0, 0.2, 10, seed), 0.05).ruling is Ruling.MOVED for seed in range(400)]

    assert np.mean(said) < 0.072


def test_bytes_without_any_spread_are_decided_as_well() -> None:
    same, more = ([100.0] * 4, [100.0] * 4), ([100.0] * 4, [106.0] * 4)

    assert change("x", "bytes", *same, 0.05).ruling is Ruling.STAYED
    assert change("x", "bytes", *more, 0.05).ruling is Ruling.MOVED


def test_the_repeats_that_are_named_decide() -> None:
    """As often as POWER says, give or take."""
    needed = repeats_to_decide(0.0, 0.1, math.log(1.05))

    assert needed is not None and 30 < needed < 60
    said = [change("x", "s", *pairs(1.0, 0.1, needed, seed), 0.05).ruling is Ruling.STAYED for seed in range(100)]
    assert np.mean(said) > 0.65
    assert repeats_to_decide(math.log(1.05), 0.1, math.log(1.05)) is not None  # at the margin it never stays, and moves at last
    assert repeats_to_decide(0.0, 1e3, math.log(1.05)) is None


@pytest.mark.parametrize("before", [[1.0], [1.0, 0.0], [1.0, math.nan], [1.0, 2.0, 3.0]])
def test_what_is_no_pair_of_positive_numbers_is_refused(before: list[float]) -> None:
    with pytest.raises(ValueError, match="expected two pairs of positive numbers"):
        change("x", "s", before, [1.0, 2.0], 0.05)


# Measuring


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_with_texts(pytest.importorskip("transformers"), tmp_path_factory.mktemp("tiny"))


def asked(tiny: tuple[Path, Path], **options: Any) -> Asked:
    own: dict[str, Any] = {
        "knob": "sdpa-math",
        "kind": "global",
        "against": "off",
        "prompt_tokens": 24,
        "new_tokens": 3,
        "margin": 0.05,
        "repeats": 3,
    }
    return Asked(checkpoint=tiny[0], texts=(tiny[1],), **(own | options))


def measured(tiny: tuple[Path, Path], **options: Any) -> Ab:
    return ab(asked(tiny, **options), {}, lambda done, total, what: None)


def test_a_report_has_every_quantity_and_what_was_produced(tiny: tuple[Path, Path]) -> None:
    found = measured(tiny)
    names = [c.name for c in found.changes]

    assert {TTFT, TPOT} <= {*names} and any(name.startswith("prefill: ") for name in names)
    assert (PEAK in names) == restart_peak("cpu") == (not found.unmeasured)
    assert all(c.before > 0 and c.after > 0 for c in found.changes)
    assert (found.tokens.before, found.tokens.after, found.tokens.steady) == (3, 3, True)
    assert (found.before, found.knob) == ("ORACLE_GLOBAL_ATTN=off", "ORACLE_GLOBAL_ATTN=sdpa-math")
    assert json.loads(json.dumps(ab_json(found), allow_nan=False))["changes"][0]["name"] == TTFT
    assert "| quantity | before | after |" in ab_markdown(found)


def test_the_knob_is_the_only_difference_and_the_order_changes(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def alone(one: Any, side: Any, later: Any, device: str) -> Alone:
        seen.append([side.kernels[layer].target.rpartition(":")[2] for layer in (0, 1)])
        return Alone(first_s=1.0, peak=100, prefill={("attention", "global"): 0.9, ("rope", ""): 0.001})

    def turns(one: Any, sides: Sequence[Any], count: int, later: Any) -> list[Generated]:
        assert [[side.kernels[layer].target.rpartition(":")[2] for layer in (0, 1)] for side in sides] == seen[-2:]
        return [Generated(first_s=1.0, later_s=(0.1,), tokens=(1, 2)) for _ in sides]

    monkeypatch.setattr(ab_module, "_alone", alone)
    monkeypatch.setattr(ab_module, "generate_in_turns", turns)
    found = measured(tiny, repeats=3)

    off, on = ["sdpa_flash", "sdpa_flash"], ["sdpa_flash", "sdpa_math"]  # the global layer is the second
    assert seen == [on, off, off, on, on, off, off, on]
    assert [c.name for c in found.changes] == [TTFT, "prefill: attention of global layers", REST, TPOT, PEAK]
    assert all(c.ruling is Ruling.STAYED for c in found.changes)


def test_the_sentence_says_what_moved_what_stayed_and_what_cannot_be_told(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = iter([1.0, 1.0, *(1.0 + 0.4 * (i % 3) for i in range(20))])

    def repeat(one: Any, sides: Sequence[Any], order: Sequence[int], *_: Any) -> dict[int, Sample]:
        samples = {}
        for at in order:
            on = sides[at].kernels[1].target.endswith("math")
            samples[at] = Sample(
                alone=Alone(first_s=0.5 if on else 1.0, peak=100, prefill={("attention", "global"): 0.2 if on else 0.7}),
                later_s=(0.1 * next(noise),),
                tokens=(1, 2, 4) if on else (1, 2, 3),
            )
        return samples

    monkeypatch.setattr(ab_module, "_repeat", repeat)
    found = measured(tiny, repeats=6)
    told = headline(found)

    assert told.startswith(
        "moved: time to first token by -50.0 % [-50.0 %, -50.0 %], prefill: attention of global layers by -71.4 %"
    )
    assert "; stayed within 5.00 %: peak memory; cannot tell: time per output token (needs about " in told
    assert (found.tokens.same, found.tokens.first_apart) == (2, 2)


@pytest.mark.parametrize("tokens", [12, 13])
@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_the_ratio_of_times_per_token_is_that_of_neighbouring_steps(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, ratio: float, tokens: int
) -> None:
    """The host becomes three times as slow in the middle, between the two steps of a pair; it drifts, and pauses once."""

    noise = np.random.default_rng(0)

    def repeat(one: Any, sides: Sequence[Any], order: Sequence[int], *_: Any) -> dict[int, Sample]:
        times: tuple[list[float], list[float]] = ([], [])
        now = 0
        for number in range(tokens):
            for at in order if number % 2 == 0 else reversed(order):
                pace = (3.0 if (number, at) >= (tokens // 2, 1) else 1.0) * 1.01**now * noise.lognormal(0.0, 1e-3)
                times[at].append(pace * (ratio if at else 1.0) + (50.0 if (number, at) == (2, 1) else 0.0))
                now += 1
        alone = Alone(first_s=1.0, peak=100, prefill={("attention", "global"): 0.9})
        return {at: Sample(alone=alone, later_s=tuple(times[at]), tokens=(1,)) for at in order}

    monkeypatch.setattr(ab_module, "_repeat", repeat)
    found = next(c for c in measured(tiny, repeats=6).changes if c.name == TPOT)

    assert found.ratio.value == pytest.approx(ratio, rel=1e-3)
    assert found.ruling is (Ruling.STAYED if ratio == 1.0 else Ruling.MOVED)
    assert abs(found.after / found.before - ratio) > 0.5  # the sides' own medians would have missed it


def test_once_the_prompt_is_read_both_sides_may_call_the_same_kernel(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """A repeat calls each side's own three times: alone, under the profiler and in turns; all else is the third kernel's."""
    file = tmp_path / "counted.py"
    file.write_text(COUNTED)
    (tmp_path / "calls_of_kernels.py").write_text("from collections import Counter\n\ncalls = Counter()\n")
    names = {word: f"{file}:{word}" for word in ("one", "two", "three")}
    measured(tiny, knob=names["two"], against=names["one"], decode=names["three"], repeats=3, new_tokens=3)

    assert sys.modules["calls_of_kernels"].calls == {"one": 4 * 3, "two": 4 * 3, "three": 2 * 4 * (1 + 2)}


COUNTED = """
from calls_of_kernels import calls

from oracle.kernels.torch_sdpa import sdpa_flash


def _counted(name):
    def kernel(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, window_size=(-1, -1)):
        calls[name] += 1
        return sdpa_flash(q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table,
                          softmax_scale=softmax_scale, window_size=window_size)

    return kernel


one, two, three = _counted("one"), _counted("two"), _counted("three")
"""


def test_a_kernel_against_itself_is_refused_but_as_a_control(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="ORACLE_GLOBAL_ATTN=sdpa-flash and ORACLE_GLOBAL_ATTN=off are the same kernel"):
        measured(tiny, knob="sdpa-flash")
    monkeypatch.setattr(ab_module, "_alone", lambda *_: Alone(first_s=1.0, peak=None, prefill={("rope", ""): 1.0}))
    found = measured(tiny, knob="off")

    assert found.unmeasured and PEAK not in [c.name for c in found.changes]


def test_the_peak_of_memory_is_that_of_the_stretch() -> None:
    """A gibibyte less an eighth that was there before does not count after a restart."""
    if not restart_peak("cpu"):
        pytest.skip("this machine does not let a process restart the count")
    before = peak_bytes("cpu")
    block = bytearray(b"x") * (64 << 20)
    with_block = peak_bytes("cpu")
    del block
    restart_peak("cpu")

    assert with_block - before > 60 << 20
    assert peak_bytes("cpu") < with_block - (30 << 20)


@pytest.fixture
def run(tiny: tuple[Path, Path]) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        own = [str(tiny[0]), "--text", str(tiny[1]), "--prompt-tokens", "24", "--new-tokens", "2", "--repeats", "3"]
        return CliRunner().invoke(command, [*own, *arguments], standalone_mode=False)

    return invoke


def test_the_command_reports_and_writes(run: Callable[..., Result], tmp_path: Path) -> None:
    files = {option: tmp_path / f"a.{option}" for option in ("json", "markdown")}
    result = run(
        "--knob", "sdpa-math", "--layers", "sliding", *(w for option, f in files.items() for w in (f"--{option}", str(f)))
    )

    assert result.return_value == 0, result.exception
    assert "ORACLE_SLIDING_ATTN=sdpa-math against ORACLE_SLIDING_ATTN=off" in result.stdout
    assert json.loads(files["json"].read_text())["margin"] == 0.05 and files["markdown"].read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--knob", "nothing"), "ORACLE_GLOBAL_ATTN: nothing: no such kernel"),
        (("--knob", "sdpa-math", "--against", "nothing"), "ORACLE_GLOBAL_ATTN: nothing: no such kernel"),
        ((), "Missing option '--knob'"),
        (("--knob", "sdpa-math", "--prompt-tokens", "255"), "the model's context is 256"),
    ],
)
def test_wrong_usage_is_told(run: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)

    problem = result.exception
    told = problem.format_message() if isinstance(problem, click.ClickException) else str(problem)
    assert problem is not None and said in told
