# make demo      set up .venv, plan GPT-2 small for 4 CPU ranks, run one training step, compare with one device
# make test      set up .venv, lint, type-check, fast tests on the same examples every time
# make test-all  as test, with the full matrix and what takes long (tests/long.txt), on new examples
# make test-gpu  what needs a GPU
PY    ?= python3
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS  ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

# Torch is in memory in half the time where what was compiled of it is kept.
unexport PYTHONDONTWRITEBYTECODE

# Waiting threads sleep, because four ranks may share two cores; large tensors come in large pages.
DEMO_ENV := OMP_WAIT_POLICY=passive THP_MEM_ALLOC_ENABLE=1

.PHONY: demo test fast test-all test-gpu lint types clean

# What is imported is compiled then: most modules of the dependencies never are, and all of them take a minute.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[hf,dev]'
	touch $@

demo: $(STAMP)
	env -u OMP_NUM_THREADS $(DEMO_ENV) $(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	$(BIN)/mypy

# Types take half a minute of one core where none were looked at before.
test: lint
	$(MAKE) --jobs 2 types fast

fast: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --hypothesis-profile repeatable -m 'not slow and not gpu'

test-all: lint types
	$(BIN)/pytest -n $(JOBS) -m 'not gpu'

test-gpu: $(STAMP)
	$(BIN)/pytest -n $(JOBS) -m gpu

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache
