"""`oracle bench`: what is compared before it is timed, what is refused, and what the figures mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from oracle import bench as bench_module
from oracle.bench import Asked, Bench, Runs, bench, compare
from oracle.bench_case import calls_of, grid
from oracle.bench_charts import growth
from oracle.bench_text import bench_json, bench_markdown, headline
from oracle.checkpoints.clusters import Estimate
from oracle.checkpoints.configurations import Plugged, plugged
from oracle.cli_bench import bench as command
from oracle.errors import InputError
from oracle.rates import Ceiling

WRONG = """
import torch

from oracle.contract import Record, contract_kernel
from oracle.kernels.torch_sdpa import sdpa_flash

answers = {}


def right(call):
    options = {name: value for name, value in call.keywords().items() if name in TAKES}
    return sdpa_flash(call.q, call.k_cache, call.v_cache, **options)


TAKES = ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "causal", "window_size", "num_seqs")
LACKS = ("out", "softcap", "sinks", "q_scale", "k_scale", "v_scale")


@contract_kernel(Record(dtypes=("bf16",)), lacks=LACKS)
def doubled(call, return_lse):
    return right(call) * 2


@contract_kernel(Record(dtypes=("bf16",)), lacks=LACKS)
def holed(call, return_lse):
    out = right(call)
    out[-1, -1, -1] = torch.nan
    return out


@contract_kernel(Record(dtypes=("bf16",)), lacks=LACKS)
def gives_up(call, return_lse):
    raise RuntimeError("no such tile")


@contract_kernel(Record(dtypes=("bf16",)), lacks=LACKS)
def remembers(call, return_lse):
    key = call.q.data_ptr()
    if key not in answers:
        answers[key] = right(call)
    return answers[key]
"""


@pytest.fixture
def tiny_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that cost nothing."""
    x = torch.ones(8)
    monkeypatch.setattr(bench_module, "products", lambda dtype, device: Ceiling(work=lambda: x + x, amount=1e3))
    monkeypatch.setattr(bench_module, "copies", lambda device: Ceiling(work=x.clone, amount=1e3))
    monkeypatch.setattr(bench_module, "cache_bytes", lambda device: (2**12, "a test"))


def asked(a: str, b: str, **options: object) -> Asked:
    own = {"families": ("smollm2",), "contexts": (0, 24), "shapes": ("1x8",), "page_size": 16, "rounds": 6, "seconds": 1e-4}
    return Asked(a=a, b=b, **(own | options))  # type: ignore[arg-type]


def measured(a: str, b: str, **options: object) -> Bench:
    return bench(asked(a, b, **options), lambda done, total, what: None)


@pytest.fixture
def found(tiny_ceilings: None) -> Bench:
    return measured("sdpa-math", "sdpa-flash", families=("smollm2", "gpt-oss-full"))


def test_every_case_that_both_take_is_timed_and_the_others_are_counted(found: Bench) -> None:
    assert [(row.family, row.context) for row in found.rows] == [("smollm2", 0), ("smollm2", 24)]
    assert [why for _, why in found.skipped] == ["sdpa-math: no sinks"] * 2
    assert "sdpa-math: no sinks" in bench_markdown(found)


def test_figures_belong_together(found: Bench) -> None:
    for row in found.rows:
        for timed in (row.a, row.b):
            assert len(timed.rounds) == 6 and timed.first_s > 0 and 0 < timed.max_e <= 1
            assert timed.seconds.low <= timed.seconds.value <= timed.seconds.high
        assert row.floor_s == max(row.flops / row.products_flops, row.nbytes / row.copy_bytes)
        assert row.ratio.low <= row.ratio.value <= row.ratio.high
        ratios = [a / b for a, b in zip(row.a.rounds, row.b.rounds, strict=True)]
        assert min(ratios) <= row.ratio.value <= max(ratios)
        assert row.buffers >= 2


def test_a_slower_kernel_is_told(found: Bench) -> None:
    """A third of a second of work against nothing, in numbers put in place of measured ones."""
    one = replace(found.rows[0], ratio=Estimate(value=3.0, low=2.5, high=3.5, se=0.2))

    told = headline(replace(found, rows=(one,)))

    assert (
        told == "A = sdpa-math takes 3.00 [2.50, 3.50] of the time of B = sdpa-flash; of 1 case faster in 0, slower in 1, "
        "not to be told apart in 0"
    )


def test_the_report_is_json_and_a_picture(found: Bench) -> None:
    text = json.dumps(bench_json(found), allow_nan=False)
    picture = growth(found)

    assert json.loads(text)["rows"][0]["a"]["kernel"] == "sdpa-math"
    assert picture.light.startswith("<svg") and "floor at the rates measured" in picture.dark


@pytest.mark.parametrize(
    ("kernel", "said"),
    [("doubled", "e = .* a wrong kernel is not timed"), ("holed", "1 of 4608 elements of its answer are not finite"),
     ("remembers", "e = .* a wrong kernel is not timed"),
     ("gives_up", "after 0: its call failed: RuntimeError: no such tile")],
)  # fmt: skip
@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_kernel_is_not_timed(tiny_ceilings: None, tmp_path: Path, kernel: str, said: str, side: int) -> None:
    """On whichever side, and where it answers other numbers from memory."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    names = ["sdpa-flash", "sdpa-flash"]
    names[side] = f"{file}:{kernel}"

    with pytest.raises(InputError, match=said):
        measured(*names)


def test_both_kernels_are_given_one_pool_and_one_plan() -> None:
    (case,) = grid(("smollm2",), (8,), ("1x4",), dtype="bf16", page_size=16, seed=0)
    calls = calls_of(case, "cpu", 3)
    seen: list[tuple[int, int, int]] = []

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        seen.append((q.data_ptr(), k.data_ptr(), options["page_table"].data_ptr()))
        return q

    kernel = replace(plugged("sdpa-flash"), function=function, takes=frozenset(("page_table",)))
    one, other = Runs(kernel, calls), Runs(kernel, calls)
    for runs in (one, other):
        for _ in range(4):
            runs()

    assert seen[:4] == seen[4:] and seen[0] == seen[3] and len(set(seen)) == 3


def test_no_case_to_time_is_an_error(tiny_ceilings: None) -> None:
    with pytest.raises(InputError, match="no case to time: gpt-oss-full 1x8 after 0: sdpa-math: no sinks"):
        measured("sdpa-math", "sdpa-flash", families=("gpt-oss-full",))


@pytest.mark.parametrize(
    ("a", "said"),
    [
        ("sdpa-flsh", "did you mean sdpa-flash"),
        ("rebuilt-k", "asks for k_norm_weight"),
        ("tilelang-hd512", "does not run on cpu"),
        ("no.py:f", "no such file"),
    ],
)
def test_an_unknown_or_unavailable_kernel_is_an_error(a: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        measured(a, "sdpa-flash")


def test_an_answer_of_another_shape_is_wrong() -> None:
    (case,) = grid(("smollm2",), (8,), ("1x4",), dtype="bf16", page_size=16, seed=0)
    (call,) = calls_of(case, "cpu", 1)
    flat: Plugged = replace(plugged("sdpa-flash"), function=lambda q, *_, **__: q[:1], takes=frozenset())

    with pytest.raises(InputError, match=r"got an answer of \(1, 9, 64\)"):
        compare(case, flat, call, 4)


@pytest.fixture
def run(tiny_ceilings: None) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        own = [
            "sdpa-math",
            "sdpa-flash",
            "--rounds",
            "6",
            "--block-seconds",
            "0.0001",
            "--families",
            "smollm2",
            "--shapes",
            "1x8",
        ]
        return CliRunner().invoke(command, [*own, *arguments], standalone_mode=False)

    return invoke


def test_the_command_writes_every_form(run: Callable[..., Result], tmp_path: Path) -> None:
    files = {option: tmp_path / f"b.{option}" for option in ("json", "markdown", "svg")}
    result = run("--contexts", "0,16", *(word for option, file in files.items() for word in (f"--{option}", str(file))))

    assert result.return_value == 0, result.exception
    assert result.stdout.startswith("A = sdpa-math takes ") and "Time of a call" in result.stdout
    assert json.loads(files["json"].read_text())["format"] == 1
    assert "## `sdpa-math` against `sdpa-flash`" in files["markdown"].read_text()
    assert files["svg"].read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contexts", "0;16"), "--contexts '0;16': expected numbers"),
        (("--contexts", "0", "--families", "llama"), "family 'llama' is unknown"),
        (("--contexts", "0", "--shapes", "8"), "expected SEQUENCESxROWS"),
        (("--json", "nowhere/b.json"), "there is no folder"),
        (("--rounds", "5"), "5 is not in the range x>=6"),
    ],
)
def test_wrong_usage_is_told(run: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)

    assert result.exception is not None and said in str(getattr(result.exception, "message", result.exception))
