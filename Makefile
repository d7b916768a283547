PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASIC := $(VENV)/.basic
ALL := $(VENV)/.all

# pip's arguments for torch: TORCH_ARGS="--index-url <PyTorch's index of CPU builds>" avoids several GB of CUDA libraries
TORCH_ARGS ?=

# make train ENV=AntBulletEnv-v0 STEPS=20000 PRESET=t3d SEED=1 ARGS="--set batch_size=128"
ENV ?= Walker2DBulletEnv-v0
STEPS ?= 500000
PRESET ?= default
SEED ?= 0
ARGS ?=

# make speed PROCESSOR=zen5; the folder in benchmarks/results/speed/
PROCESSOR ?= here

.PHONY: help demo train test install lint format type docs dist versions bench speed soak commit-checks clean

help:
	@echo "make demo     a trained walker walks, a pendulum is trained in a minute, its report opens"
	@echo "make train    train PyBullet's walker (STEPS=20000 for a short run)"
	@echo "make test     run the tests"
	@echo "make install  set up .venv with everything (train and demo install less; each target does its own set-up)"
	@echo "make lint format type docs dist versions bench speed soak commit-checks clean"

# With a CPU build of torch: 1.8 GB for demo and train, 2.8 GB for everything
$(BASIC): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
		|| { echo "Python 3.11 or newer is needed, for example: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[extra,bullet]"
	@touch $@

$(ALL): $(BASIC)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

install: $(ALL)

demo: $(BASIC)
	$(BIN)/python examples/demo.py

train: $(BASIC)
	$(BIN)/td3x train --env $(ENV) --steps $(STEPS) --preset $(PRESET) --seed $(SEED) $(ARGS)

test: $(ALL)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(ALL)
	$(BIN)/mypy

docs: $(ALL)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# What a release uploads: dist/ with the sdist and the wheel made from it
dist: $(ALL)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# The tests under every Python that is here, and with the oldest dependencies
versions: $(ALL)
	$(BIN)/python -m pip install --quiet nox
	$(BIN)/nox

# Days on two cores: saves, studies, and speeds and runs whose figures are not there yet; others.yml needs gymnasium[box2d,mujoco]
bench: speed
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/study.py
	for study in returns candidates screening others; do $(BIN)/python benchmarks/returns.py benchmarks/$$study.yml || exit 1; done
	$(BIN)/python benchmarks/figures.py

# Up to an hour: 500 kills, 500 damaged checkpoints, 5,000 damaged files, 200,000 updates instead of the tests' 6, 40, 500 and 3,000
soak: $(ALL)
	TD3X_SOAK=1 $(BIN)/python -m pytest -n 2 -rP tests/test_survives_faults.py tests/test_damaged_checkpoints.py tests/test_damaged_files.py \
		tests/test_studies_survive_faults.py tests/test_ray_vec_env.py tests/test_docs_and_examples_run.py \
		tests/test_passes_sb3s_own_tests.py tests/test_logs_what_td3_is_debugged_with.py

# JSON files that the folder of this processor lacks (all: half an hour on a quiet machine); docs/speed.md has tables of four processors
speed: $(ALL)
	$(BIN)/python benchmarks/speed.py benchmarks/results/speed/$(PROCESSOR)

commit-checks: format lint type test docs

clean:
	rm -rf build dist *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
