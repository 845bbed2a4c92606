#!/usr/bin/env bash
# The CPU lane: the locks beside those of git revision $BASE, within seconds; tests; the gate; a report to look at.
# Where GITHUB_STEP_SUMMARY names a file, the gate writes its summary there; on GitHub it annotates the lines of the locks.
set -euo pipefail
cd "$(dirname "$0")/.."
make test
make gate BASE="${BASE:-origin/main}"
mkdir -p build/reports
.venv/bin/oracle accept sdpa-flash --profile quick --seed 0 --html build/reports/sdpa-flash.html --markdown build/reports/sdpa-flash.md
