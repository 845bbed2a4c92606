# make gate    judge every shipped kernel that this machine can run, and compare with the verdicts expected
# make test    lint, types, tests
# make docs    write the tables and transcripts in docs/ and README.md again
# make bench   speed and memory, by numbers
# make exam    every mutant, and every correct kernel over many seeds (two hours): docs/exam.md
# make study   the calibration tables (ten minutes): docs/study.md
PYTHON ?= python3
BIN := .venv/bin
# The root stays off sys.path, so that ./kernels can hide no installed package.
export PYTHONSAFEPATH := 1

.PHONY: gate test docs bench exam study clean
gate: .venv/ready
	$(BIN)/oracle gate --cases ci/cases

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

docs: .venv/ready
	$(BIN)/python ci/docs.py

bench: .venv/ready
	$(BIN)/python ci/bench.py

exam: .venv/ready
	$(BIN)/python ci/exam.py

study: .venv/ready
	$(BIN)/python ci/study.py

# torch before anything that depends on it, so that pip takes exactly the pinned version
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[triton,checkpoints,test]'
	touch .venv/ready

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
