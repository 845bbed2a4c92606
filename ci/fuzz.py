"""Ten kernels that are wrong in rare calls, each searched for a minute: what is found, how soon, and how small it gets.

python ci/fuzz.py [--seed S] [FAULT ...]
"""

from __future__ import annotations

import argparse
import ast
import time
from pathlib import Path

from oracle.accept import open_kernel
from oracle.case_text import in_words
from oracle.fuzz import Limits, search

WRONG = Path(__file__).parents[1] / "tests" / "wrong_by_path.py"
MINUTE = 60.0


def faults() -> list[str]:
    """The functions of WRONG that plant a fault, in the order of the file."""
    functions = [node for node in ast.parse(WRONG.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d).startswith("fault(") for d in f.decorator_list)]


def main() -> int:
    """Exit status 1 where a fault was not found within a minute, or not made as small as two sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=faults(), metavar="FAULT")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    missed = 0
    for name in asked.faults:
        candidate = open_kernel(f"{WRONG}:{name}", "cpu")
        start = time.monotonic()
        try:
            found = search(candidate, asked.seed, Limits(search_s=MINUTE)).found
        finally:
            candidate.process.close()
        seconds = time.monotonic() - start
        if found is None:
            print(f"{name}: not found in {seconds:.0f} s", flush=True)
            missed += 1
            continue
        missed += len(found.judged.case.q_lens) > 2
        print(f"{name}: {found.judged.reason} after {found.after} examples, shrunk in {found.shrunk_in}, {seconds:.0f} s in all")
        print(f"    {in_words(found.judged.case)}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
