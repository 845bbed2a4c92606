"""docs/numerics.md has every section that the code refers to, and the constants that it quotes are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oracle import doors, measure, suite
from oracle.contract import Precision
from oracle.formats import FORMATS
from oracle.kernels.emulated import VARIANTS
from oracle.mutants.planted import FAULTS
from oracle.references import attention, bound, logits, roundoff, ties
from oracle.rows import rows_needed

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "numerics.md").read_text()
SOURCES = sorted(
    file
    for folder in ("oracle", "references", "kernels", "checkpoints", "tests", "ci")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != Path(__file__).name and not any(part.is_symlink() for part in file.parents)
)
REFERENCE = re.compile(r"numerics\.md\)?(?:,?\s+sections?)?\s+(\d+(?:\.\d+)?(?:(?:,| to| and|, and)\s+\d+(?:\.\d+)?)*)")


def referred(text: str) -> set[str]:
    """The sections that a text refers to by number."""
    flat = re.sub(r"\s*\n\s*#?\s*", " ", text)
    return {number for found in REFERENCE.findall(flat) for number in re.findall(r"\d+(?:\.\d+)?", found)}


def test_a_reference_is_read_in_all_its_forms() -> None:
    text = """(numerics.md 2.4) docs/numerics.md, section 3.2). numerics.md 2.3 to 2.5
    docs/numerics.md, sections 1 and 3, X8 in numerics.md"""

    assert referred(text) == {"2.4", "3.2", "2.3", "2.5", "1", "3"}
    assert referred("docs/numerics.md,\n    # section 2.6: with P") == {"2.6"}


def test_every_section_that_is_referred_to_exists() -> None:
    headings = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", TEXT, re.MULTILINE))
    found = {file: referred(file.read_text()) for file in [*SOURCES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}
    broken = {str(file.relative_to(ROOT)): sections - headings for file, sections in found.items() if sections - headings}

    assert broken == {}
    assert sum(map(len, found.values())) >= 20, "the pattern no longer finds the references"


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_formats_are_those_of_the_table(name: str) -> None:
    f = FORMATS[name]
    row = re.search(
        rf"^\| {name.upper() if name == 'e4m3' else name} \| 2\^(-\d+) \| 2\^(-\d+) \| 2\^(-\d+) \|", TEXT, re.MULTILINE
    )

    assert row is not None
    assert (f.u, f.smallest_normal, f.smallest_subnormal) == tuple(2.0 ** int(e) for e in row.groups())


def test_the_contract_s_constants_are_those_of_the_table() -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        row = re.search(rf"^\| {dtype}, default \|(.*)\| before \|$", TEXT, re.MULTILINE)
        assert row is not None
        stated = [2.0 ** int(e) for e in re.findall(r"2\^(-\d+)", row[1])]
        r = roundoff.roundoff(Precision(), dtype=dtype, out_dtype=dtype, scaled=False)
        assert stated == [r.u_out, r.a_out, r.u_p, r.a_p, r.u_acc, r.eps_exp, r.eps_tanh]


@pytest.mark.parametrize("share", [0.25, 0.03, 0.01, 0.001])
def test_the_rows_needed_are_those_of_the_table(share: float) -> None:
    row = re.search(rf"^\| {share * 100:g} %[^|]*\|(.*)\|$", TEXT, re.MULTILINE)

    assert row is not None
    assert [int(n) for n in row[1].split("|")] == [rows_needed(share, c) for c in (0.95, 0.99, 0.999)]


@pytest.mark.parametrize(
    ("sentence", "value"),
    [
        (r"B takes (\d) u_p V2g in its place", bound.LAMBDA),
        (r"eta \+= (\d) \(1 / \(127 sqrt 12\)\)", logits.QUANTISED),
        (r"at worst ([\d.]+) d, every addend truncated", roundoff.WORST_CHAIN),
        (r"t = ([\d.]+) places for 16 products", roundoff.TRUNCATIONS),
        (r"FP22: ([\d.]+); at worst", roundoff.TRUNCATIONS_FP22),
        (r"beyond a cap of (\d) \(a weight", doors.TIGHT_CAP),
        (r"Tiles are counted as (\d+) keys", bound.TILE),
        (r"2 eta\* is above (\d+) nats", logits.LIFTED),
        (r"What is left above ([\d.]+) P2", ties.STRUCTURAL),
        (r"Keys under 2\^-(\d+) of the heaviest", ties.OCTAVES),
        (r"rows whose e is above ([\d.]+) under it", measure.REFINE_ABOVE),
        (r"at most (\d+) rows of a case", measure.REFINE_ROWS),
        (r"\|z\| = \|beta\| / SE above (\d)", doors.SLOPE_Z),
        (r"above its floor: (4e-4)", doors.SLOPE_BETA),
        (r"\(bias: ([\d.]+)\)", doors.BIAS_BETA),
        (r"rms\(g / B\) above ([\d.]+)", doors.SLOPE_EFFECT),
        (r"- (\d+) effective rows or more", doors.SLOPE_ROWS),
        (r"rms\(g / B\) under (1e-3)", measure.WEAKEST),
        (r"within 2\^-(\d+) of the middle", -16 if measure.NEAR_TIE != 2.0**-16 else 16),
        (r"The margin is ([\d.]+) against a named", doors.MARGIN_NAMED),
        (r"incumbent, ([\d.]+) against the emulator", doors.MARGIN_EMULATOR),
        (r"with (\d+) clusters or more", doors.CLASS_ROWS),
        (r"an RMS e of ([\d.]+) or more on one side", doors.NEGLIGIBLE),
        (r"\((\d+) resamples", doors.RESAMPLES),
        (r"a row of at most (\d+) keys", attention.SHORT),
        (r"the suite (\d) million", suite.ELEMENTS / 1e6),
    ],
)
def test_a_quoted_constant_is_that_of_the_code(sentence: str, value: float) -> None:
    found = re.search(sentence, " ".join(TEXT.split()))

    assert found is not None, sentence
    assert float(found[1]) == value


def test_the_kernels_and_faults_are_counted_right() -> None:
    words = {18: "eighteen", 27: "twenty-seven"}
    text = " ".join(TEXT.split())

    assert f"holds {words[len(VARIANTS)]}:" in text
    assert f"{words[sum(f.claims.p_format != 'e4m3' for f in FAULTS.values())]} of them of 16-bit P" in text
