# Everything needs only Python 3.11 or later with pip; the virtual environment is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: setup train test test-slow test-gpu soak lint bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Headwater needs Python 3.11 or later: make PYTHON=python3.11"; exit 2; }
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-megatron: $(VENV)/.installed
	@$(PIP) -e '.[dev,megatron,nvrx]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@$(PIP) -e '.[bench]'
	@touch $@

# The main job: GRPO with a built-in model on the CPU, or on a GPU where there is one.
train: $(VENV)/.installed
	$(BIN)/headwater train grpo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'not slow and not soak and not gpu'

test-slow: $(VENV)/.installed-megatron
	$(BIN)/python -m pytest -m 'slow and not soak and not gpu'

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'soak' --timeout 7200

# On a machine with a CUDA device, in whatever environment has torch for it.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(VENV)/.installed-bench
	$(BIN)/headwater bench step --peer trl grpo.num_prompts_per_step=4 policy.train_global_batch_size=32 policy.train_micro_batch_size=32

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
