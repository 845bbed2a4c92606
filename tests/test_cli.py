"""The command line as a user meets it: statuses, messages, files."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import oracle

SCHEMA = json.loads((Path(oracle.__file__).parent / "schema" / "verdict.schema.json").read_text())


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oracle", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=300)


def test_help_needs_no_torch() -> None:
    """So that it is quick: torch alone takes over a second."""
    code = "import sys, oracle.cli; assert 'torch' not in sys.modules and 'rich' not in sys.modules"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "accept" in run("--help").stdout


def test_accept_writes_a_verdict_that_its_schema_holds_for(tmp_path: Path) -> None:
    result = run("accept", "sdpa-flash", "--profile", "quick", "--seed", "1", "--json", str(tmp_path / "v.json"))

    data = json.loads((tmp_path / "v.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    assert (result.returncode, data["exit_code"], data["outcome"]) == (0, 0, "accept")
    assert result.stdout.startswith("ACCEPT  sdpa-flash")
    assert result.stderr == ""


def test_reject_exits_with_1() -> None:
    result = run("accept", "oracle.mutants.planted:zeros", "--profile", "quick", "--seed", "1")

    assert result.returncode == 1
    assert result.stdout.startswith("REJECT")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("accept", "sdpa-flsh"), "did you mean sdpa-flash"),
        (("accept", "no_such.py:f"), "no such file"),
        (("accept", "kernel.py:atention"), "did you mean attention?"),
        (("accept", "kernel.py"), "expected kernel.py:FUNCTION"),
        (("accept", "kernel.py:loose"), "takes **kwargs and has no record"),
        (("accept", "kernel.py:no_table"), "page_table is not among its keyword arguments"),
        (("accept", "sdpa-flash", "--family", "gemma5"), "no family 'gemma5'; there are gemma4-global"),
        (("accept", "sdpa-flash", "--family", "gemma2"), "no case fits it"),
        (("accept", "sdpa-flash", "--against", "nobody"), "no such kernel"),
        (("accept", "sdpa-flash", "--cases", "."), "no *.toml case in it"),
        (("accept", "sdpa-flash", "--cases", "nowhere"), "does not exist"),
        (("accept", "sdpa-flash", "--door", "back"), "'back' is not one of"),
        (("accept", "sdpa-flash", "--json", "nowhere/v.json"), "there is no folder"),
        (("accept",), "Missing argument 'KERNEL'"),
        (("fuzz", "sdpa-flash", "--minutes", "0"), "0.0 is not in the range x>0"),
        (("fuzz", "sdpa-flash", "-o", "nowhere"), "'nowhere' does not exist"),
        (("replay", "nothing.toml"), "nothing.toml: no such file or folder"),
        (("gate", "--cases", "nowhere"), "'nowhere' does not exist"),
        (("acept", "x"), "No such command 'acept'"),
        (("capture", "nothing", "--layer", "0", "--text", "kernel.py", "-o", "c"), "nothing"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    head = "def {}(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k{}, softmax_scale): return q\n"
    loose = "def loose(q, k_cache, v_cache, **kwargs): return q\n"
    source = head.format("attention", ", page_table") + head.format("no_table", "") + loose
    (tmp_path / "kernel.py").write_text(source)

    result = run(*arguments, folder=tmp_path)

    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["kernel.py"]


def test_a_malformed_case_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('format = 1\nname = "x"\nfamily = "llama3"\nq_lens = [1]\nkv_lens = [1]\ncolour = 3\n')

    result = run("accept", "sdpa-flash", "--cases", str(tmp_path))

    assert result.returncode == 2
    assert "bad.toml: unknown key 'colour'" in result.stderr


def test_list_judges_nothing_and_shows_counts() -> None:
    result = run("accept", "oracle.mutants.planted:zeros", "--list", "--seed", "0")

    assert result.returncode == 0
    assert "value pairs of the parameter table" in result.stdout
    assert "captured inputs" in result.stdout


@pytest.mark.parametrize("verb", ["kernels", "families"])
def test_tables_are_listed(verb: str) -> None:
    result = run(verb)

    assert result.returncode == 0
    assert len(result.stdout.splitlines()) > 5


def test_fuzz_saves_what_it_found_and_replay_sees_it_again(tmp_path: Path) -> None:
    result = run("fuzz", "oracle.mutants.planted:zeros", folder=tmp_path)
    (case,) = tmp_path.iterdir()

    assert result.returncode == 1 and result.stderr == ""
    assert [line.split()[0] for line in result.stdout.splitlines()[:5]] == ["called", "wrong", "got", "where", "replay"]
    assert result.stdout.splitlines()[4] == f"replay   oracle replay {case.name}"

    again = run("replay", case.name, folder=tmp_path)
    assert again.returncode == 1 and again.stdout.startswith(f"WRONG  {case.name}  oracle.mutants.planted:zeros\n")


def test_fuzz_finds_nothing_and_shows_the_pairs(tmp_path: Path) -> None:
    result = run("fuzz", "emulator", "--minutes", "0.001", folder=tmp_path)

    assert result.returncode == 0 and list(tmp_path.iterdir()) == []
    assert "examples with both options" in result.stdout and "19 full pages" in result.stdout
    assert "nothing found: 1 example in " in result.stdout


@pytest.mark.parametrize("verb", ["accept", "fuzz"])
def test_interrupting_leaves_no_process_and_says_so(verb: str) -> None:
    command = [sys.executable, "-m", "oracle", verb, "emulator", "--seed", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children: list[int] = []
    while process.poll() is None and not children:
        listing = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = [int(pid) for pid in listing if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    handles = [os.pidfd_open(pid) for pid in children]
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "interrupted: " in output or errors.strip() == "oracle: interrupted; no verdict"
    for handle in handles:
        assert select.select([handle], [], [], 60)[0], "the kernel's process outlived the command"
        os.close(handle)
