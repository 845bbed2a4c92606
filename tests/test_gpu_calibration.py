"""What was measured on a GPU: the report is whole, its model gives the GPU's own bits, the probes tell cores apart, the page is
made of the report, and numerics.md assumes no less than was measured, but where docs/gpu.md says that it does."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import Precision
from oracle.formats import FORMATS, U32
from oracle.references.roundoff import WORST_CHAIN, roundoff

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
FOUND: dict[str, Any] = json.loads((ROOT / "docs" / "gpu" / "calibration.json").read_text())
NUMERICS = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
CORES: dict[str, dict[str, Any]] = FOUND["tensor_cores"]
ONCE_OUT_OF_BOUNDS = {  # sums that lose more than (n/16 + 2T) u_acc M, as docs/gpu.md says
    "e4m3 wgmma": {"of one sign", "beside a sink"},
    **{f"{dtype} {unit}": {"beside a sink"} for dtype in ("bf16", "fp16", "tf32") for unit in ("wgmma", "mma.sync")},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def gpu() -> Iterator[dict[str, ModuleType]]:
    """The modules of ci/gpu, which import each other as scripts do."""
    names = ("core", "dots", "long_sums", "tensor_cores", "elementwise", "calibrate", "page")
    sys.path.insert(0, str(ROOT / "ci" / "gpu"))
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(ROOT / "ci" / "gpu"))
    for name in names:
        del sys.modules[name]


def core_of(gpu: dict[str, ModuleType], name: str) -> Any:
    groups = tuple(tuple(int(x) for x in g.split()) for g in CORES[name]["groups"].split(" | "))
    return gpu["core"].Core(groups=groups, **CORES[name]["model"])


def samples(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stored elements of an instruction: a, b (S, 1, 64), c, d (S, 1, 1), float64."""

    def column(key: str, dtype: torch.dtype) -> Tensor:
        data = [torch.frombuffer(bytearray.fromhex(s[key]), dtype=torch.uint8).view(dtype) for s in CORES[name]["samples"]]
        return torch.stack(data)[:, None].double()

    operand = DTYPES[name.split()[0]]
    return column("a", operand), column("b", operand), column("c", torch.float32), column("d", torch.float32)


# The report


def test_the_report_is_whole() -> None:
    assert FOUND["versions"].keys() == {"device", "capability", "driver", "python", "torch", "triton", "command"}
    assert {name.split()[0] for name in CORES} == set(DTYPES)
    assert all({f"{dtype} wgmma", f"{dtype} mma.sync"} <= set(CORES) for dtype in DTYPES)
    assert "failed" not in json.dumps(FOUND)
    assert not re.search(r"NaN|Infinity", json.dumps(FOUND))


def test_every_part_says_how_it_was_measured() -> None:
    described = set(FOUND["how"])
    parts = {key for key in FOUND if key not in ("versions", "how", "seconds", "tensor_cores")}

    assert parts <= described
    assert described - parts <= set(CORES["bf16 wgmma"])


def test_no_bit_of_millions_was_wrong() -> None:
    assert {name: sum(wrong for wrong, _ in f["model_wrong"].values()) for name, f in CORES.items()} == dict.fromkeys(CORES, 0)
    assert all(total > 100_000 for f in CORES.values() for _, total in f["model_wrong"].values())


# The model


@pytest.mark.parametrize("name", list(CORES))
def test_the_model_gives_the_gpu_s_bits(gpu: dict[str, ModuleType], name: str) -> None:
    a, b, c, d = samples(name)

    assert len(d) >= 3
    assert torch.equal(gpu["core"].add_products(core_of(gpu, name), a, b, c), d)


@pytest.mark.parametrize("name", list(CORES))
def test_a_model_that_differs_in_one_respect_does_not(gpu: dict[str, ModuleType], name: str) -> None:
    """But for the exponent of subnormal factors of 8 exponent bits, whose products are too small to show it."""
    a, b, c, d = samples(name)
    core = core_of(gpu, name)
    right = [r for r in gpu["tensor_cores"].rivals(core) if torch.equal(gpu["core"].add_products(r, a, b, c), d)]

    assert right == ([replace(core, smallest=None)] if core.smallest == -126 else [])


# The probes


@pytest.mark.parametrize(
    ("dtype", "core"),
    [
        ("bf16", {"group": 16, "fraction_bits": 25, "result_bits": 23, "of_factors": True, "smallest": -126}),
        ("fp16", {"group": 8, "fraction_bits": 24, "result_bits": 23, "of_factors": False, "smallest": None}),
        ("fp16", {"group": 4, "fraction_bits": 23, "result_bits": 23, "of_factors": True, "smallest": -14}),
        ("e4m3", {"group": 32, "fraction_bits": 13, "result_bits": 13, "of_factors": True, "smallest": -6}),
        ("e4m3", {"group": 16, "fraction_bits": 13, "result_bits": 23, "of_factors": False, "smallest": None}),
    ],
)
def test_the_probes_find_the_core_that_answers_them(
    gpu: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, dtype: str, core: dict[str, Any]
) -> None:
    """An emulated core in the GPU's place: what the probes say of it is what it was made of."""
    t = gpu["tensor_cores"]
    fmt = next(f for f in t.FORMATS if f.name == dtype)
    size = core.pop("group")
    groups = tuple(tuple(range(i, i + size)) for i in range(0, 64, size))
    made = gpu["core"].Core(groups=groups, lowest=-126, apart=None, **core)

    def dot(unit: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, None]:
        d = gpu["core"].add_products(made, a.double(), b.double(), c.double()).float()
        return d.expand(-1, max(unit.m, a.shape[1]), max(unit.n, b.shape[1])), None

    monkeypatch.setattr(t, "DEVICE", "cpu")
    monkeypatch.setattr(t, "dot", dot)
    monkeypatch.setattr(t, "DRAWS", ())  # `lowest` is what random products decide: not asked here

    found = t.order(fmt, t.MMA, 64)
    facts = t.alignment(fmt, t.MMA, found[-1])
    facts |= t.result(fmt, t.MMA, found[-1], facts["fraction_bits"])
    facts |= {"subnormal_factors_keep_bits": t.subnormal_factors(fmt, t.MMA, found[-1])}

    assert t.fit(fmt, t.MMA, found, facts) == made
    assert facts["addends"] == "toward zero"


# The page


def test_the_page_is_made_of_the_report(gpu: dict[str, ModuleType]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()

    assert gpu["page"].with_tables(page, FOUND) == page, "run python ci/gpu/page.py"
    assert {m[2] for m in gpu["page"].TABLES.finditer(page)} == set(gpu["page"].PARTS)


def test_the_page_moves_with_the_report(gpu: dict[str, ModuleType]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    other = json.loads(json.dumps(FOUND))
    other["tensor_cores"]["bf16 wgmma"]["model_wrong"]["wide"][0] = 7

    assert gpu["page"].with_tables(page, other) != page


def test_the_report_is_written_as_it_is_read(gpu: dict[str, ModuleType]) -> None:
    assert gpu["page"].lines(FOUND) == (ROOT / "docs" / "gpu" / "calibration.json").read_text()


# What numerics.md assumes


def errors(name: str, kind: str = "relative") -> float:
    largest: float = max(e["largest"] for e in FOUND["functions"][name]["errors"] if e["kind"] == kind)
    return largest


def test_exponentials_keep_what_numerics_md_says_of_them() -> None:
    stated = re.search(r"`ex2\.approx` is good to 2\^(-\d+)", NUMERICS)

    assert stated is not None
    assert max(errors(f) for f in ("ex2.approx.f32", "ex2.approx.ftz.f32", "tl.exp2", "torch.exp2", "torch.exp")) <= 2.0 ** int(
        stated[1]
    )
    assert all(f["at_zero"] == 1 for f in FOUND["functions"].values() if "at_zero" in f)


def test_exp_in_triton_is_off_by_its_argument_s_rounding_and_no_more() -> None:
    """u32 |x| for x log2(e), which is part of 3 u32 |s - m|, beside what ex2.approx is off by."""
    for e in FOUND["functions"]["tl.exp"]["errors"]:
        assert e["largest"] <= U32 * max(abs(e["from"]), abs(e["to"])) + errors("ex2.approx.f32")


def test_tanh_keeps_what_numerics_md_says_of_it() -> None:
    stated = re.search(r"`tanh\.approx` to 2\^(-\d+)", NUMERICS)

    assert stated is not None
    assert errors("torch.tanh") <= errors("tanh.approx.f32") <= 2.0**-16 <= 2.0 ** int(stated[1])


def test_quotients_and_logarithms_are_within_the_default_s_terms() -> None:
    assert errors("x / y in Triton") <= 8 * U32
    assert max(errors(f, kind) for f in ("lg2.approx.f32", "tl.log", "tl.log2") for kind in ("relative", "absolute")) <= 2.0**-22


@pytest.mark.parametrize("name", list(CORES))
def test_no_product_costs_more_than_the_worst_chain(gpu: dict[str, ModuleType], name: str) -> None:
    assert gpu["page"].worst_chain(CORES[name]) <= WORST_CHAIN


@pytest.mark.parametrize("name", list(CORES))
def test_logits_are_within_their_terms(gpu: dict[str, ModuleType], name: str) -> None:
    """Those with one large channel were not with one truncation for 16 products."""
    page, core = gpu["page"], CORES[name]

    for part in (page.logit_share, page.lse_share):
        assert part(core, "random", page.places(core)) <= 0.4
        assert part(core, "one channel", page.places(core)) <= 1
    assert (page.logit_share(core, "one channel", page.ASSUMED) > 1) == (name in ONCE_OUT_OF_BOUNDS)
    assert (page.lse_share(core, "one channel", page.ASSUMED) > 1) == (name == "e4m3 wgmma")


@pytest.mark.parametrize("name", list(CORES))
def test_sums_are_within_their_term(gpu: dict[str, ModuleType], name: str) -> None:
    """Those of the kinds that the page names were not with one truncation for 16 products."""
    page, core = gpu["page"], CORES[name]

    assert max(page.share(core, kind, page.places(core)) for kind in page.SUMS) <= 1
    assert {kind for kind in page.SUMS if page.share(core, kind, page.ASSUMED) > 1} == ONCE_OUT_OF_BOUNDS.get(name, set())


@pytest.mark.parametrize("name", list(CORES))
def test_the_places_that_the_bound_allows_are_no_fewer_than_the_derived_one_sided_loss(
    gpu: dict[str, ModuleType], name: str
) -> None:
    assert gpu["page"].one_sided(CORES[name]) <= gpu["page"].places(CORES[name])


@pytest.mark.parametrize("name", list(CORES))
def test_no_sum_loses_more_than_the_derived_one_sided_loss(gpu: dict[str, ModuleType], name: str) -> None:
    """Half a place of each addend is a mean: the largest of 16384 sums of 128 products is up to a quarter above it."""
    page = gpu["page"]
    largest = max(page.share(CORES[name], kind, page.ASSUMED) for kind in page.SUMS) * (page.ASSUMED + page.RESCALES)

    assert largest <= 1.25 * page.one_sided(CORES[name])


def test_the_u_acc_that_the_page_takes_is_the_default_contract_s(gpu: dict[str, ModuleType]) -> None:
    default = roundoff(Precision(), dtype="bf16", out_dtype="bf16", scaled=False)

    assert gpu["page"].allowed(CORES["bf16 wgmma"]) == default.u_acc
    assert re.search(r"u_acc is 2\^-23 for truncating fp32, 2\^-24 for rounding, 2\^-13 for FP22", NUMERICS)
    assert gpu["page"].allowed(CORES["e4m3 wgmma"]) == 2.0**-13


@pytest.mark.parametrize("name", list(FOUND["conversions"]))
def test_conversions_round_to_nearest(name: str) -> None:
    found = FOUND["conversions"][name]
    past = {k: n for k, n in found["beyond_largest"].items() if k != "patterns" and n}
    saturates = name == "e4m3 triton"

    assert found["wrong"] == 0 and found["nan_lost"] == 0
    assert past == {
        "largest" if saturates else "nan" if name == "e4m3 torch" else "infinite": found["beyond_largest"]["patterns"]
    }
    assert name.split()[0] in FORMATS
