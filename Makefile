# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv where it is missing.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-claims test-slow bench-ftis lint fmt types clean

demo: $(STAMP)
	$(BIN)/swarm-node demo $(ARGS)

# One thread: tiny models lose more to threads that wait for each other than they gain.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

# What must hold of F-TIS: two cells of the benchmark, about a minute on two cores.
test-claims: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slow/test_ftis_claims.py $(ARGS)

# All that `make test` leaves out.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

# Half an hour on two cores; ARGS=--full takes two hours, ARGS=--quick some minutes.
bench-ftis: $(STAMP)
	$(BIN)/python -m benchmarks.ftis $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
