"""`oracle drift` as a user meets it: statuses, files, messages, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from tiny_models import save_with_texts

import oracle
from oracle.cli_drift import drift

SCHEMA = json.loads((Path(oracle.__file__).parent / "schema" / "drift.schema.json").read_text())
FLOOR, WORSE = "bf16+other-attention", "fp8"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a folder of texts."""
    return save_with_texts(pytest.importorskip("transformers"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(tiny: tuple[Path, Path], tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str, blocks: str = "8x48") -> Result:
        checkpoint, texts = map(str, tiny)
        own = [checkpoint, "--text", texts, "--blocks", blocks, "--work", str(tmp_path / "work")]
        return CliRunner().invoke(drift, [*own, *arguments], standalone_mode=False)

    return invoke


def test_a_report_is_not_a_decision(run: Callable[..., Result]) -> None:
    result = run("--configs", "fp8")

    assert result.return_value == 0, result.exception
    assert "fp8" in result.stdout and "the floor" in result.stdout and "reject" not in result.stdout.lower()


@pytest.mark.parametrize(
    ("candidate", "incumbent", "blocks", "status", "word"),
    [
        (FLOOR, WORSE, "8x48", 0, "ACCEPT"),
        (WORSE, FLOOR, "8x48", 1, "REJECT"),
        (FLOOR, WORSE, "3x48", 3, "INCONCLUSIVE"),
    ],
)
def test_with_accept_the_status_is_the_decision(
    run: Callable[..., Result], candidate: str, incumbent: str, blocks: str, status: int, word: str
) -> None:
    result = run("--configs", "fp8", "--accept", candidate, "--no-worse-than", incumbent, blocks=blocks)

    assert result.return_value == status, result.exception
    assert result.stdout.startswith(word)


def test_commas_part_configurations_and_not_their_layers(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("--configs", "fp8@0,1,bf16+kv-fp8@1", "--json", str(tmp_path / "d.json"))
    written = json.loads((tmp_path / "d.json").read_text())

    assert result.return_value == 0, result.exception
    assert [one["configuration"] for one in written["configurations"]] == [FLOOR, "fp8@0,1", "bf16+kv-fp8@1"]


def test_every_form_of_the_report_is_written(run: Callable[..., Result], tmp_path: Path) -> None:
    files = {option: tmp_path / f"d.{option}" for option in ("json", "markdown", "html")}
    options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
    result = run("--configs", "fp8", "--attribute", "fp8", *options)

    assert result.return_value == 0, result.exception
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(files["json"].read_text()))
    assert "fp8" in files["markdown"].read_text() and files["html"].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--accept", "fp8"), "--accept and --no-worse-than name the two sides of a decision: give both"),
        (("--json", "nowhere/d.json"), "--json nowhere/d.json: there is no folder"),
        (("--configs", "int8"), "weights 'int8' are unknown"),
        (("--configs", "fp8", "--floor", "bf16+nothing"), "nothing: no such kernel"),
        (("--configs", "fp8", "--blocks", "8"), "expected COUNTxLENGTH"),
    ],
)
def test_wrong_usage_is_told(run: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)

    assert result.exception is not None and said in str(getattr(result.exception, "message", result.exception))


def test_without_a_floor_there_is_none(run: Callable[..., Result]) -> None:
    result = run("--configs", "fp8", "--floor", "")

    assert result.return_value == 0, result.exception
    assert "the floor" not in result.stdout


def test_help_needs_no_torch_and_names_the_grammar() -> None:
    result = subprocess.run([sys.executable, "-m", "oracle", "drift", "--help"], capture_output=True, text=True, check=True)

    assert "WEIGHTS[+ATTENTION][+kv-FORMAT][@LAYERS]" in result.stdout


def test_an_interrupted_run_keeps_its_blocks_and_says_so(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    work, kernel = tmp_path / "work", tmp_path / "kernel.py"
    kernel.write_text(KERNEL)
    command = [sys.executable, "-m", "oracle", "drift", str(tiny[0]), "--text", str(tiny[1]), "--blocks", "20x120"]
    command += ["--configs", f"bf16+{kernel}:slow", "--floor", "", "--work", str(work)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while first.poll() is None and not list(work.rglob("*.safetensors")):
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate()

    assert (first.returncode, said.strip()) == (130, "oracle: interrupted; no verdict")
    assert 0 < len(list(work.rglob("*.safetensors"))) < 20


KERNEL = """
import time

from oracle.kernels.torch_sdpa import sdpa_math


def slow(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal=True, window_size=(-1, -1)):
    time.sleep(0.2)
    return sdpa_math(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size,
    )
"""
