"""Judges the kernels that other projects ship, and writes docs/field.md.

    python ci/field.py judge [--device cuda] [--profile quick] [--jobs 8] [--seconds 450] [NAME...]
    python ci/field.py page     # docs/field.md, of docs/field/*.json

`judge` asks `oracle accept` about every kernel of kernels/field/table.py that is available, and torch's of kernels/table.py, or
about those named, several at a time, writes docs/field/cpu.json or docs/field/<gpu>.json as verdicts come, where other kernels
stay as they were, and the page.  A kernel without a verdict after `--seconds` is stopped and said to have none.  With `--against
KERNEL` each that was not rejected for more than its door is judged a second time, against that incumbent, after all first ones.
On the H200 of docs/gpu.md:

    PYTHONPATH=. python3 ci/field.py judge --device cuda --profile quick --jobs 12 --seconds 420 --against triton-prefill-16
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
from oracle.kernels.field.table import FIELD, FieldRow, installed, unavailable
from oracle.kernels.table import KERNELS
from oracle.verdict import Reason

Facts = dict[str, Any]

# torch's own, of the table of what ships, where the gate expects a verdict of them: on these devices.
_TORCH: dict[str, tuple[str, ...]] = {"sdpa-flash": ("cpu",), "sdpa-flash-fp32": ("cpu",), "sdpa-math": ("cpu", "cuda")}
ROWS: dict[str, FieldRow] = {
    name: FieldRow(
        target=KERNELS[name].target,
        project="PyTorch",
        package="torch",
        about=f"SDPA: {KERNELS[name].about}",
        devices=devices,
        module="torch",
    )
    for name, devices in _TORCH.items()
} | FIELD

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs" / "field", ROOT / "docs" / "field.md"
TABLES = re.compile(r"(<!-- ci/field.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SEED = 0
RELATIONS = {"relation-broken", "option-ignored", "batch-variant"}
HOSTILE = {"invalid-access", "crash", "past-the-plan", "page-ids", "canary", "input-written", "nondeterministic", "later-call"}
DOORS = {Reason.NO_DOOR, Reason.LESS_ACCURATE, Reason.LOOSER_CONTRACT}  # another incumbent may decide otherwise
BESIDE = ("incumbent", "outcome", "door", "ratio", "reasons", "command", "said")  # kept of a verdict against an incumbent
SHOWN = 400  # characters of a finding that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How the kernels are judged."""

    device: str
    profile: str  # "" = what the table says
    seconds: float
    against: str


def command(row: FieldRow, asked: Asked, against: str = "") -> list[str]:
    """The arguments of `oracle` that judge a kernel."""
    profile = asked.profile or (row.profile if asked.device == "cpu" else "") or "default"
    words = ["accept", row.target, "--seed", str(SEED), "--profile", profile, "--device", asked.device]
    return [*words, *(["--against", against] if against else [])]


def judged(row: FieldRow, asked: Asked) -> Facts:
    """What is kept of the verdict on a kernel, or why there is none."""
    facts: Facts = {"version": installed(row)}
    if why := unavailable(row, asked.device):
        return facts | {"unavailable": why}
    return facts | _asked(row, asked, "")


def judged_again(row: FieldRow, asked: Asked, facts: Facts) -> Facts:
    """`facts` of the first verdict, and those of one against the incumbent `asked` names."""
    beside = {"incumbent": asked.against} | _asked(row, asked, asked.against)
    return facts | {"against": {key: beside.get(key) for key in BESIDE}}


def worth_another(facts: Facts) -> bool:
    """Whether a verdict against another incumbent can differ: there is a first one, and no fault but the door stands in it."""
    return "outcome" in facts and set(facts["reasons"]) <= DOORS


def _asked(row: FieldRow, asked: Asked, against: str) -> Facts:
    words = command(row, asked, against)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        started = time.monotonic()
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "oracle", *words, "--json", str(file)],
                capture_output=True,
                text=True,
                timeout=asked.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"command": f"oracle {' '.join(words)}", "said": f"no verdict after {asked.seconds:.0f} s"}
        facts: Facts = {"command": f"oracle {' '.join(words)}", "wall": round(time.monotonic() - started)}
        if not file.exists():
            return facts | {"said": (ran.stderr or ran.stdout).strip()[-SHOWN:]}
        return facts | kept(json.loads(file.read_text()))


def kept(verdict: Facts) -> Facts:
    """What is kept of a verdict, small enough to be committed."""
    findings: list[Facts] = verdict["findings"]
    figures, counts = verdict["figures"] or {}, verdict["coverage"]["counts"]
    relations = sorted({f["case"] for f in findings if f["reason"] in RELATIONS})  # there it is the relation's name
    families = sorted(name.removeprefix("family ") for name, count in counts.items() if name.startswith("family ") and count)
    return {
        "outcome": verdict["outcome"],
        "door": verdict["door"],
        "incumbent": verdict["incumbent"],
        "profile": verdict["environment"]["profile"],
        "cases": verdict["coverage"]["cases"],
        "families": families,
        "reasons": verdict["reasons"],
        "ratio": {key: verdict["ratios"][0][key] for key in ("value", "lower", "upper")} if verdict["ratios"] else None,
        **{key: figures.get(key) for key in ("max_e", "max_e_lse", "rms_e", "calls")},
        "seconds": figures.get("seconds"),
        "relations": relations,
        "hostile": dict(Counter(f["reason"] for f in findings if f["reason"] in HOSTILE)),
        "findings": [_first(findings, reason) for reason in verdict["reasons"]],
        "missing": verdict["coverage"]["missing"],
    }


def _first(findings: Sequence[Facts], reason: str) -> Facts:
    """The first finding for a reason, on the smallest case there is of it."""
    found = min((f for f in findings if f["reason"] == reason), key=lambda f: int(f["size"]))
    return {"reason": reason, "case": found["case"], "text": found["text"][:SHOWN]}


def machine(device: str) -> tuple[str, Facts]:
    """(name of the JSON file, what the verdicts depend on besides the kernels)."""
    import torch

    facts = {"python": platform.python_version(), "torch": str(torch.__version__), "oracle": oracle.__version__}
    if device == "cpu":
        return "cpu", {"device": f"CPU, {torch.backends.cpu.get_cpu_capability()}", **facts}
    name = torch.cuda.get_device_name()
    return name.lower().replace(" ", "-"), {"device": name, **facts}


def judge(names: Sequence[str], asked: Asked, jobs: int) -> None:
    """Every kernel of `names` has been judged; after each verdict its row is in the JSON of this machine, and on the page.

    A second verdict, against a named incumbent, begins when no first one waits any more.
    """
    stem, here = machine(asked.device)
    file = DATA / f"{stem}.json"
    DATA.mkdir(exist_ok=True)
    known: Facts = json.loads(file.read_text())["kernels"] if file.exists() else {}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(judged, ROWS[name], asked): (name, False) for name in names}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name, again = running.pop(future)
                known[name] = facts = future.result()
                print(name, _verdict(facts["against"] if again else facts), flush=True)
                if asked.against and not again and worth_another(facts):
                    running[pool.submit(judged_again, ROWS[name], asked, facts)] = (name, True)
            whole = {"machine": here, "kernels": {n: known[n] for n in ROWS if n in known}}
            file.write_text(json.dumps(whole, indent=1) + "\n")
            write_page()


def _verdict(facts: Facts) -> str:
    """The verdict in a few words, or why there is none."""
    if not facts.get("outcome"):
        return str(facts.get("unavailable") or facts.get("said") or "not judged yet")
    return f"{facts['outcome']}{' by ' + facts['door'] if facts['door'] else ''}"


def tables(machines: Mapping[str, Facts]) -> dict[str, str]:
    """The tables of the page, by name."""
    made = {}
    for stem, whole in machines.items():
        made[_key(stem)] = _judged_table(whole)
    made["absent"] = _absent(machines)
    return made


def _key(stem: str) -> str:
    return re.sub(r"\W", "_", stem)


def _judged_table(whole: Facts) -> str:
    heads = ("kernel", "version", "verdict", "door", "RMS e ratio", "max e", "max e_lse", "families", "cases", "reasons")
    more = ("relations that fail", "hostile findings", "kernel s / wall s")
    rows = []
    for name, facts in whole["kernels"].items():
        if "outcome" not in facts:
            continue
        row = ROWS[name]
        ratio = facts["ratio"]
        against = facts.get("against")
        door = facts["door"]
        if against:
            door += f"; against {against['incumbent']}: {against['door'] or against['outcome'] or against['said']}"
        rows.append(
            (
                f"`{name}`: {row.project}, {row.about}",
                facts["version"],
                f"{facts['outcome']} ({facts['profile']})",
                door,
                f"{ratio['value']:.3f}" if ratio else "",
                _number(facts["max_e"]),
                _number(facts["max_e_lse"]),
                len(facts["families"]),
                facts["cases"],
                ", ".join(facts["reasons"]),
                "; ".join(facts["relations"]),
                ", ".join(f"{count} x {reason}" for reason, count in facts["hostile"].items()),
                f"{_number(facts['seconds'])} / {facts['wall']}",
            )
        )
    machine = ", ".join(f"{key} {value}" for key, value in whole["machine"].items() if key != "device")
    return f"{whole['machine']['device']}; {machine}\n\n{_markdown((*heads, *more), rows)}"


def _absent(machines: Mapping[str, Facts]) -> str:
    rows = []
    for stem, whole in machines.items():
        device = "cpu" if stem == "cpu" else "cuda"
        for name, row in ROWS.items():
            facts = whole["kernels"].get(name, {})
            if device in row.devices and "outcome" not in facts:
                rows.append((f"`{name}`: {row.project}, {row.about}", stem, _verdict(facts)))
    return _markdown(("kernel", "machine", "why"), rows)


def _number(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)])


def page(text: str, machines: Mapping[str, Facts]) -> str:
    """The page with its tables made again; one that the page does not name yet is put at its end."""
    made = tables(machines)
    for name in made:
        if f"<!-- ci/field.py: {name} -->" not in text:
            text += f"\n<!-- ci/field.py: {name} -->\n<!-- end -->\n"
    return TABLES.sub(lambda m: f"{m[1]}{made[m[2]]}\n{m[3]}" if m[2] in made else m[0], text)


def write_page() -> None:
    """docs/field.md has the tables of every docs/field/*.json."""
    machines = {file.stem: json.loads(file.read_text()) for file in sorted(DATA.glob("*.json"))}
    PAGE.write_text(page(PAGE.read_text(), machines))


def main() -> None:
    """Judges, or only writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("page")
    asked = verbs.add_parser("judge")
    asked.add_argument("names", nargs="*", metavar="NAME", help="rows of kernels/field/table.py; all where none is named")
    asked.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked.add_argument("--profile", choices=("quick", "default", "deep"), default="")
    asked.add_argument("--jobs", type=int, default=1)
    asked.add_argument("--seconds", type=float, default=1800.0)
    asked.add_argument("--against", default="")
    given = parser.parse_args()
    if given.verb == "judge":
        if unknown := set(given.names) - set(ROWS):
            parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
        how = Asked(device=given.device, profile=given.profile, seconds=given.seconds, against=given.against)
        judge(given.names or list(ROWS), how, given.jobs)
    else:
        write_page()


if __name__ == "__main__":
    main()
