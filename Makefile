# make train   train a small language model and print which kernel ran
# make test    all tests; those that need an NVIDIA GPU are skipped where there is none
# Each sets up .venv on its first call. Another Python: make test PYTHON=python3.12. More words for the program: make train ARGS="--help".

PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INSTALLED := .venv/installed

.PHONY: train test gpu-test check

# passive: torch's threads spin while they wait, and where other programs want the cores a step takes up to 40 times as long
train: $(INSTALLED)
	@OMP_WAIT_POLICY=passive $(BIN)/whorl train $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadgroup $(ARGS)

gpu-test: $(INSTALLED)
	@$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

$(INSTALLED): pyproject.toml tools/environment.py tools/constraints.txt
	@$(PYTHON) tools/environment.py
	@touch $@
