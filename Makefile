# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup train test lint clean

setup: $(STAMP)

# A plain `pip install torch` pulls gigabytes of CUDA. Where there is no NVIDIA driver, a CPU build
# is asked for first, and the project's own requirement is satisfied by it.
$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || command -v nvidia-smi >/dev/null || \
		$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup lint
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

train: setup
	$(BIN)/python -m patrickstar train

clean:
	rm -rf $(VENV)
