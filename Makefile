# make gate    judge every shipped kernel that this machine can run, and compare with the locks in ci/thresholds and the verdicts
#              expected; BASE=REV: first see that no lock was loosened since that git revision; then decide whether int8 attention
#              drifts no more than fp8 weights do on the small checkpoint
# make lock    measure every shipped kernel and write the locks, or tighten them (a quarter of an hour)
# make test    lint, types, tests
# make docs    write the tables and transcripts in docs/ and README.md again
# make bench   speed and memory, by numbers; what kernels are worth on the small checkpoint, into build/bench
# make exam    every mutant, and every correct kernel over many seeds (hours): docs/correct.md, docs/exam.md, docs/peers.md
# make drift   every way to round on the small checkpoint (a quarter of an hour): docs/drift_measured.md
# make study   the calibration tables (ten minutes): docs/study.md
# make gpu     speed, first calls, bits and errors of the Hopper kernels on the GPU of this machine, into OUT, with its own Python,
#              torch and Triton (four minutes); PARTS: some of it; ATTENTION_ORACLE_LIBRARIES: what `oracle build-kernels` made
# make gpu_bench   what the Hopper kernels are worth, on the GPU of this machine with its own Python, into OUT (a part of PARTS takes
#              up to ten minutes)
# make screenshots   reports of an accept and of a reject as pictures, in build/
PYTHON ?= python3
BIN := .venv/bin
# The root stays off sys.path, so that ./kernels can hide no installed package.
export PYTHONSAFEPATH := 1

.PHONY: gate lock test docs bench drift exam study gpu gpu_bench screenshots clean
gate: .venv/ready
	$(BIN)/oracle gate --lock ci/thresholds --cases ci/cases $(if $(BASE),--base $(BASE))
	$(BIN)/oracle drift --configs fp8 --accept bf16+int8-attention --no-worse-than fp8 --blocks 24x512

lock: .venv/ready
	$(BIN)/oracle lock $(if $(REASON),--reason "$(REASON)")

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml
	$(BIN)/zizmor --offline --quiet .github/workflows/ci.yml
	$(BIN)/pytest -n 2

docs: .venv/ready
	$(BIN)/python ci/docs.py

bench: .venv/ready
	$(BIN)/python ci/bench.py
	$(BIN)/python ci/bench_drift.py
	$(BIN)/python ci/bench_kernels.py build/bench

exam: .venv/ready
	$(BIN)/python ci/exam.py

drift: .venv/ready
	$(BIN)/python ci/drift_study.py $(OTHER)

study: .venv/ready
	$(BIN)/python ci/study.py

gpu_bench:
	PYTHONPATH=.:$(PYTHONPATH) $(PYTHON) ci/bench_kernels.py --device cuda $(or $(OUT),build/gpu-bench) $(PARTS)

gpu:
	PYTHONPATH=.:ci/gpu:$(PYTHONPATH) $(PYTHON) ci/gpu/kernels.py $(or $(OUT),build/gpu) $(PARTS)

screenshots: .venv/ready
	$(BIN)/python ci/screenshots.py

# torch before anything that depends on it, so that pip takes exactly the pinned version
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[triton,checkpoints,test]'
	touch .venv/ready

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
