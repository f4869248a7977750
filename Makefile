# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv where it is missing.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# vLLM needs older libraries than the rest: an environment of its own, for tests on CPUs.
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_TESTS := tests/unit/test_engine_contract.py tests/swarm/test_vllm_node.py

# What the benchmarks compare with, in an environment of its own too.
PEERS_VENV  := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed

.PHONY: demo smol test test-claims test-vllm test-slow soak fuzz bench bench-ftis lint fmt types clean

demo: $(STAMP)
	$(BIN)/swarm-node demo $(ARGS)

# A swarm of two real models, SmolLM2-135M and a cut of it; five minutes on two idle cores.
smol: build/smollm2
	$(BIN)/python -m scripts.smol --models build/smollm2 --out build/smol-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# 93 MB to download, 1 GB to write.
build/smollm2: $(STAMP) scripts/convert_smollm2.py
	$(BIN)/python -m scripts.convert_smollm2 $@ || { rm -rf $@; exit 1; }
	touch $@

# One thread: tiny models lose more to threads that wait for each other than they gain. Two
# processes, as tests with real nodes wait for half of their time; ARGS="-n 8" for more.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not vllm" \
		-n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What must hold of F-TIS: two cells of the benchmark, about a minute on two cores.
test-claims: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slow/test_ftis_claims.py $(ARGS)

# The vLLM engine with vLLM on CPUs: what every engine must do, and a node that samples with it.
test-vllm: $(STAMP) $(VLLM_STAMP)
	OMP_NUM_THREADS=1 TEST_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python \
		$(BIN)/python -m pytest -m vllm --durations=5 $(VLLM_TESTS) $(ARGS)

# All that `make test` leaves out, but for vLLM.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

# Twenty minutes of kills, freezes and lies for six nodes. ARGS="--minutes 2 --nodes 3".
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/swarm/soak.py $(ARGS)

# Seven minutes: each reader of other people's bytes for one. ARGS="codec --runs 1000000".
fuzz: $(STAMP)
	$(BIN)/python -c 'import atheris' || \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m fuzz $(ARGS)

# Against limits and peers, ten minutes on two cores: docs/BENCHMARKS.md. ARGS="--only codec".
bench: $(STAMP) $(PEERS_STAMP)
	$(BIN)/python -m benchmarks.suite $(ARGS)

# Half an hour on two cores; ARGS=--full takes an hour more, ARGS=--quick some minutes.
bench-ftis: $(STAMP)
	$(BIN)/python -m benchmarks.ftis $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint docker/Dockerfile

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a download of some hundred MB the first time, minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(VLLM_STAMP): constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-compile --requirement constraints-vllm.txt
	touch $(VLLM_STAMP)

$(PEERS_STAMP): constraints-peers.txt
	test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps --no-compile --requirement constraints-peers.txt
	touch $(PEERS_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
