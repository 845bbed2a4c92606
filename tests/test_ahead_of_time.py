"""Libraries built ahead of time: what they are built from, which are refused, and how one is launched."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.kernels import ahead_of_time
from oracle.kernels.ahead_of_time import BuildError, build, file_name, fingerprint, load
from oracle.kernels.tilelang_families import FAMILIES

HD128 = FAMILIES["hd128"]
COMPILER = shutil.which("cc")
needs_cc = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

# A library whose launch writes what it was given: x, then n and s as text, to the buffer that x points to.
STAND_IN = """
#include <stdio.h>
const char *describe(void) {{ return {about}; }}
const char *get_last_error(void) {{ return "no device"; }}
int init(void) {{ return {fails}; }}
int call(char *x, int n, float s, void *stream) {{ sprintf(x, "%d %.1f %ld", n, s, (long)stream); return {fails}; }}
"""


def stand_in(folder: Path, *, made_from: str, fails: int = 0) -> Path:
    """A C library in the place of HD128's for pages of 16."""
    about = {"fingerprint": made_from, "arguments": [["x", "pointer"], ["n", "int"], ["s", "float"]]}
    text = folder / "stand_in.c"
    text.write_text(STAND_IN.format(about=json.dumps(json.dumps(about)), fails=fails))
    path = folder / file_name(HD128, 16)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(text), "-o", str(path)], check=True)
    return path


@needs_cc
def test_a_launch_passes_tensors_by_address_and_numbers_by_name(tmp_path: Path) -> None:
    stand_in(tmp_path, made_from=fingerprint(HD128, 16))
    x = torch.zeros(32, dtype=torch.uint8)
    library = load(tmp_path, HD128, 16)
    library.prepare()
    library.launch({"s": 2.5, "n": 7, "x": x, "more": 1}, stream=11)
    assert bytes(x.tolist()).rstrip(b"\0") == b"7 2.5 11"


@needs_cc
def test_a_library_that_fails_says_why(tmp_path: Path) -> None:
    path = stand_in(tmp_path, made_from=fingerprint(HD128, 16), fails=-1)
    library = load(tmp_path, HD128, 16)
    with pytest.raises(RuntimeError, match=f"{path}: got no device; expected a GPU of compute capability 9.0"):
        library.prepare()
    with pytest.raises(RuntimeError, match="the launch failed: no device"):
        library.launch({"s": 2.5, "n": 7, "x": torch.zeros(32, dtype=torch.uint8)}, stream=0)


@needs_cc
def test_a_stale_library_is_refused(tmp_path: Path) -> None:
    stand_in(tmp_path, made_from="0123456789abcdef")
    with pytest.raises(BuildError, match=r"built from 0123456789abcdef, expected .*; oracle build-kernels --arch sm_90a"):
        load(tmp_path, HD128, 16)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected a library; oracle build-kernels --arch sm_90a"):
        load(tmp_path, HD128, 16)
    (tmp_path / file_name(HD128, 16)).write_bytes(b"text")
    with pytest.raises(BuildError, match="expected a library"):
        load(tmp_path, HD128, 16)


def test_a_fingerprint_covers_row_and_page_size() -> None:
    prints = {fingerprint(f, page) for f in (*FAMILIES.values(), replace(HD128, keys=64)) for page in (16, 64)}
    assert len(prints) == 2 * (len(FAMILIES) + 1)
    assert fingerprint(HD128, 16) == fingerprint(replace(HD128), 16)


def test_a_build_without_a_compiler_explains_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", None)  # import fails
    with pytest.raises(BuildError, match=r"hd128: tilelang is not installed; pip install tilelang==0\.1\.15"):
        build(HD128, 16, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@needs_tilelang
def test_a_library_launches_in_stream_order() -> None:
    """TileLang's launcher asks for programmatic stream serialisation; the kernels never wait for what runs before them."""
    code, arguments = ahead_of_time.source(replace(HD128, name="hd64", head_dim=64, chunk=64), 64)
    assert "ProgrammaticStreamSerialization" not in code and "griddepcontrol" not in code
    assert code.count("config.numAttrs = 0;") == code.count("cudaLaunchKernelEx") == 1
    assert ("scale2", "float") in arguments and ("q", "pointer") in arguments and ("k_page", "int") in arguments


@needs_tilelang
@needs_nvcc
def test_a_built_library_loads_without_tilelang(tmp_path: Path) -> None:
    family = FAMILIES["hd512"]
    path = build(family, 64, tmp_path)
    code = (
        "import sys, pathlib\n"
        "sys.modules['tilelang'] = None\n"
        "from oracle.kernels.ahead_of_time import load\n"
        "from oracle.kernels.tilelang_families import FAMILIES\n"
        f"print(load(pathlib.Path({str(tmp_path)!r}), FAMILIES['hd512'], 64).path)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(path)
