PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Arguments for installing torch alone, for another build than the package index's own:
#   make train TORCH_ARGS="--index-url <PyTorch's index of CPU builds>"
TORCH_ARGS ?=

# make train ENV=AntBulletEnv-v0 STEPS=20000 PRESET=t3d SEED=1 ARGS="--set batch_size=128"
ENV ?= Walker2DBulletEnv-v0
STEPS ?= 500000
PRESET ?= default
SEED ?= 0
ARGS ?=

.PHONY: help install train test lint format type docs dist versions bench speed soak commit-checks clean

help:
	@echo "make train          train the PyBullet walker (STEPS=20000 for a short taste)"
	@echo "make test           run the tests"
	@echo "make install        set up .venv with every extra; train and test do it themselves"
	@echo "make lint format type docs dist versions bench speed soak commit-checks clean"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
		|| { echo "Python 3.11 or newer is needed, for example: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,tests,docs]"
	@touch $@

train: $(INSTALLED)
	$(BIN)/td3x train --env $(ENV) --steps $(STEPS) --preset $(PRESET) --seed $(SEED) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# What a release uploads: dist/ with the sdist and the wheel made from it
dist: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[dist]"
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# The tests under every Python that is here, and with the oldest dependencies
versions: $(INSTALLED)
	$(BIN)/python -m pip install --quiet nox
	$(BIN)/nox

# Hours on two cores: every speed and every run whose figures are not there yet
bench: speed $(INSTALLED)
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/study.py
	for study in returns screening others; do $(BIN)/python benchmarks/returns.py benchmarks/$$study.yml; done

# Up to an hour: 500 kills, 500 damaged checkpoints, 5,000 damaged files, 200,000 updates instead of the tests' 8, 40, 500 and 6,000
soak: $(INSTALLED)
	TD3X_SOAK=1 $(BIN)/python -m pytest -n 2 -rP tests/test_survives_faults.py tests/test_damaged_checkpoints.py tests/test_damaged_files.py \
		tests/test_studies_survive_faults.py tests/test_ray_vec_env.py tests/test_docs_and_examples_run.py \
		tests/test_passes_sb3s_own_tests.py

# Half an hour on a quiet machine; SBX is compared with if it is installed (pip install sbx-rl)
speed: $(INSTALLED)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/figures.py

commit-checks: format lint type test docs

clean:
	rm -rf build dist *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
