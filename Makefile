# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install
TRAINS := $(VENV)/.trains
STAMP  := $(VENV)/.installed

.PHONY: setup train test lint bench soak accelerator docs clean

setup: $(STAMP)

# A plain `pip install torch` pulls gigabytes of CUDA. Where there is no NVIDIA driver, this release
# is asked for first, and the project's own requirement is satisfied by it. Where pip does not find a
# CPU build of it by itself, PIP_EXTRA_INDEX_URL can name an index that has one.
CPU_TORCH ?= torch==2.13.0

# What training, planning (of Hugging Face configs too) and the page of a run need.
$(TRAINS): pyproject.toml
	@test -d $(VENV) || { echo "Making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c "import torch" 2>/dev/null || command -v nvidia-smi >/dev/null || \
		{ echo "Installing PyTorch for CPUs into $(VENV): the largest part, some minutes"; \
		$(PIP) $(CPU_TORCH); }
	@echo "Installing PatrickStar and what it needs into $(VENV)"
	@$(PIP) --editable ".[hf,report]"
	@touch $(TRAINS)

# What the tests need besides.
$(STAMP): $(TRAINS)
	@echo "Installing what the tests need into $(VENV): some minutes"
	@$(PIP) --editable ".[dev]"
	@touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# 25M parameters have 389 MiB of state in bf16 (16 bytes each, gradients included); the host gets
# less than half of that, and the rest goes to a file that vanishes with the run.
train: $(TRAINS)
	$(BIN)/patrickstar train --model gpt-25m --steps 60 --batch-size 2 --learning-rate 1e-3 \
		--host-memory 192MiB --disk runs/spool --metrics runs/train.jsonl

# One table, quickly: make bench BENCH="--table first --steps 3 --rounds 1"
bench: setup
	$(BIN)/python benchmarks/run.py $(BENCH)

# One part, a few times: make soak SOAK="--part kills --count 5"
soak: setup
	$(BIN)/python -m soak.run $(SOAK)

# The path of accelerators on a double of one, which is compiled first: tests/accelerator/late.py.
accelerator: setup
	PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		-p tests.accelerator.late tests/accelerator tests/engine/test_on_an_accelerator.py \
		tests/comm/test_stream_lane.py tests/memory/test_accelerator.py

# The documentation as a site, in site/.
docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
