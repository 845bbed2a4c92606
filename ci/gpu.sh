#!/usr/bin/env bash
# The GPU lane: the tests that need a device, the kernels of this GPU beside their lock, and one of them under compute-sanitizer and
# in CUDA graphs.  The TileLang kernels are libraries here, so that the machine needs no compiler for them.
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/ready
export PYTHONSAFEPATH=1
export ATTENTION_ORACLE_LIBRARIES="${ATTENTION_ORACLE_LIBRARIES:?name the folder that oracle build-kernels made}"
.venv/bin/pytest tests/test_sanitizer.py tests/test_isolation.py tests/test_emulator.py
.venv/bin/oracle gate --device cuda ${BASE:+--base "$BASE"}
for mode in --sanitize --graph; do
    .venv/bin/oracle accept triton-prefill-16 --device cuda --profile quick "$mode"
done
