"""The life of a lock, as a team lives it: told once by the command in this process, once by the installed wheel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KERNEL = '''\
"""Attention by the contract, in emulated arithmetic: what the team ships."""

from oracle.contract import Call, Record
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate

ARITHMETIC = Arithmetic(tile=32)


def attention(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal=True, return_lse=False):
    call = Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    rows, lse_rows = emulate(call, ARITHMETIC)
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[-1]), q.new_zeros(*q.shape[:2]).float()
    out[: len(rows)], lse[: len(rows)] = rows, lse_rows
    return (out, lse) if return_lse else out


attention.record = Record(dtypes=("bf16",), head_dims=(64,), page_sizes=(16,), groups=(2,))
'''
WORSE = "Arithmetic(tile=32, lazy=6.0)"  # a lazily rescaled maximum: right, and its error is 3 % larger
BETTER = 'Arithmetic(tile=32, p_format="fp32")'  # P kept in fp32: its error is an eighth smaller
LOCK = Path("ci/thresholds/cpu.toml")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said, and how it ended."""

    status: int
    text: str


Run = Callable[[list[str]], Said]  # `oracle ...`, in the folder of the story


def tell(folder: Path, run: Run, *, aside: bool = True) -> None:
    """Lock; a kernel 3 % worse; a lock loosened by hand; a waiver; its end; a better kernel; tightened.

    With what is said aside: a refusal, a loosened lock that only history shows, and errors that may fall.
    """
    (folder / "kernel.py").write_text(KERNEL)
    (folder / ".gitignore").write_text("__pycache__/\n")
    _git(folder, "init", "-q")

    created = run(["lock", "kernel.py:attention", "--profile", "quick"])
    assert (created.status, "created: look at it and commit it" in created.text) == (1, True), created
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "the lock")
    assert run(["gate", "--base", "HEAD"]).status == 0

    (folder / "kernel.py").write_text(KERNEL.replace("Arithmetic(tile=32)", WORSE))
    worse = run(["gate"])
    assert worse.status == 1, worse
    rise = re.search(r"kernel.py:attention on all: ratio rose from [\d.]+ to [\d.]+ \(\+(\d\.\d)%\), ceiling [\d.]+", worse.text)
    assert rise is not None and 2.0 < float(rise[1]) < 4.0, worse
    if aside:
        refused = run(["lock"])
        assert refused.status == 2 and "say why with --reason TEXT" in refused.text, refused

    text = (folder / LOCK).read_text()
    loose = re.sub(r"ratio_ceiling = [\d.]+", "ratio_ceiling = 1.1", text)
    (folder / LOCK).write_text(loose)
    if aside:
        assert run(["gate"]).status == 0  # nothing but the history shows it
    loosened = run(["gate", "--base", "HEAD"])
    assert loosened.status == 1 and "went from" in loosened.text and "no waiver permits it" in loosened.text, loosened

    blanks = re.findall(r"^    (\[\[waiver\]\]\n(?:    .*\n?){6})", loosened.text, re.MULTILINE)
    assert len(blanks) == len(re.findall("no waiver permits it", loosened.text)) >= 2, loosened
    waivers = "\n".join(blanks).replace("    ", "")
    waivers = waivers.replace('why = ""', 'why = "the new rescaling is worth it"').replace(
        '"https://"', '"https://example.org/1"'
    )
    (folder / LOCK).write_text(loose + "\n" + waivers.replace('expires = ""', 'expires = "2999-12-31"'))
    assert run(["gate", "--base", "HEAD"]).status == 0

    (folder / LOCK).write_text(loose + "\n" + waivers.replace('expires = ""', 'expires = "2020-01-01"'))
    for arguments in (["gate", "--base", "HEAD"], ["gate"]):
        late = run(arguments)
        assert late.status == 1 and "expired on 2020-01-01" in late.text, late

    (folder / LOCK).write_text(text)
    (folder / "kernel.py").write_text(KERNEL.replace("Arithmetic(tile=32)", BETTER))
    stale = run(["gate"])
    assert stale.status == 1 and "the lock is stale; `oracle lock` tightens it" in stale.text, stale
    if aside:
        assert run(["gate", "--allow-better"]).status == 0
    tightened = run(["lock"])
    if tightened.status == 2:  # a spread may have grown where a figure fell
        tightened = run(["lock", "--reason", "P in fp32"])
    assert tightened.status == 0 and "written anew" in tightened.text, tightened
    assert run(["gate"]).status == 0


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)
