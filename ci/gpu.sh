#!/usr/bin/env bash
# The GPU lane: the tests that need a device, the kernels of this GPU beside their lock, and one of them under compute-sanitizer and
# in CUDA graphs.
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/ready
export PYTHONSAFEPATH=1
.venv/bin/pytest tests/test_sanitizer.py tests/test_isolation.py tests/test_emulator.py
.venv/bin/oracle gate --device cuda ${BASE:+--base "$BASE"}
for mode in --sanitize --graph; do
    .venv/bin/oracle accept triton-prefill-16 --device cuda --profile quick "$mode"
done
