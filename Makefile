# make help       this list
# make install    the locked packages into .venv (torch for CUDA where a GPU is to be used)
# make demo       from a fresh clone to a pretrained and a fine-tuned model (CPU, no network after the installation)
# make test       lint, types, shell and every test; installs what it needs
# make test-slurm the job scripts on a real Slurm of two nodes (Debian: slurm-wlm, munge; part of test)
# make test-fast  the tests that start no process and train no model
# make test-gpu   the tests marked `gpu`, on one GPU, in at most four minutes; each failure is printed when it happens
# make test-oldest  the tests but those on Slurm, with the oldest transformers that pyproject.toml allows
# make test-exhaustive  every case of the proofs in tests/exactness (hours), into benchmarks/results/exactness/; `make interruptions`; and all others that `make test` leaves out
# make bench      Stoker beside other toolkits on this CPU, into benchmarks/results/cpu/ (nothing else may run)
# make bench-gpu  the same on one GPU, into benchmarks/results/gpu/; begin it again as often as needed
# make soak       an hour of runs on a real Slurm, something killed every minute, into benchmarks/results/exactness/soak.json
# make lint       ruff, mypy, shellcheck, hadolint, spelling
# make site       README.md and docs/ as a site in site/; refuses broken links and anchors
# make interruptions  every interruption of a job on a real Slurm (part of test-exhaustive), into benchmarks/results/interruptions.json
# make figures    write the figures in README.md and docs/ anew from benchmarks/results/
# make recipes-table  the recipes' predictions and their gallery in docs/recipes.md
# make pictures   the pictures of reports in docs/images, from runs in benchmarks/results/ (chromium)
# make interrupted-run  record the run of the README's picture: a Slurm job that is killed, loses its node and resumes (root, slurm-wlm, munge; after make demo)
# make lock       write requirements.lock and requirements-test.lock anew from pyproject.toml
# make lock-docs  write requirements-docs.lock anew, from the version of the site's generator below

.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
# PYTEST_ARGS="-k packing" runs a part of the tests but those on Slurm.
PYTEST_ARGS ?=

.PHONY: help install recipes-table pictures interrupted-run bench bench-gpu demo figures test test-rest test-slurm test-fast test-gpu test-oldest test-exhaustive interruptions soak lint lock lock-docs site

$(VENV)/.runtime: requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.lock
	touch $@

$(VENV)/.test: requirements-test.lock $(VENV)/.runtime
	$(BIN)/pip install --quiet --requirement requirements-test.lock
	touch $@

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

install: $(VENV)/.runtime
	@echo 'Installed. Next: source $(BIN)/activate; check: python -m utils.doctor'

demo: $(VENV)/.runtime
	$(BIN)/python examples/run_demo.py

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks cpu

# A round of a cell takes about a minute: BENCH_ARGS="--minutes 9 --cells qwen3_600m_pretrain" ends in time.
BENCH_ARGS ?=
bench-gpu: $(VENV)/.runtime
	$(BIN)/python -m benchmarks gpu --resume $(BENCH_ARGS)

pictures: $(VENV)/.test
	$(BIN)/python examples/pictures.py

interrupted-run: $(VENV)/.test
	$(BIN)/python examples/interrupted_run.py
	$(BIN)/python -m benchmarks.figures.loss_plot

figures: recipes-table
	$(BIN)/python examples/demo_figures.py
	$(BIN)/python examples/recipe_schemas.py
	$(BIN)/python examples/settings_tables.py
	$(BIN)/python -m benchmarks.figures.exactness
	$(BIN)/python -m benchmarks.figures.interruptions
	$(BIN)/python -m benchmarks.figures.staging
	$(BIN)/python -m benchmarks.figures.speed
	$(BIN)/python -m benchmarks.figures.speed_plot
	$(BIN)/python -m benchmarks.figures.loss_plot
	$(BIN)/python -m benchmarks.figures.memory
	$(BIN)/python -m benchmarks.figures.float8
	$(BIN)/python -m benchmarks.figures.models

recipes-table:
	$(BIN)/python examples/recipe_forecasts.py
	$(BIN)/python examples/recipes_table.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.sh' .ci/run | xargs $(BIN)/shellcheck
	git ls-files | xargs $(BIN)/codespell
	$(BIN)/hadolint Dockerfile

$(DOCS)/.docs: requirements-docs.lock
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --requirement requirements-docs.lock
	touch $@

site: $(DOCS)/.docs
	$(DOCS)/bin/python examples/site_pages.py
	$(DOCS)/bin/zensical build --clean --strict

# Jobs wait for Slurm half of their time, so they run beside the other tests; each output in one piece.
test: lint
	$(MAKE) --jobs 2 --output-sync=target test-rest test-slurm

test-rest: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --durations=15 --ignore=tests/slurm $(PYTEST_ARGS)

# Each of the two processes starts a cluster.
test-slurm: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --durations=10 -rs tests/slurm

# SOAK_ARGS="--minutes 3" is a trial.
SOAK_ARGS ?=
soak: $(VENV)/.test
	PYTHONPATH=.:tests/integration:tests/slurm $(BIN)/python tests/slurm/soak.py $(SOAK_ARGS)

# PYTEST_ARGS="-k LoRA" runs some rows anew; the others in the file stay.
interruptions: $(VENV)/.test
	STOKER_INTERRUPTIONS_FILE=benchmarks/results/interruptions.json \
		$(BIN)/pytest --exhaustive -m exhaustive --durations=10 tests/slurm/test_interruptions.py $(PYTEST_ARGS)

test-fast: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu" $(PYTEST_ARGS)

# With GPU_PYTHON=python3 nothing is installed: that Python needs torch, the packages of
# requirements.lock, pytest and, unless GPU_WORKERS=0, pytest-xdist. A worker needs about a core and
# a GB of the GPU's memory. To end what runs at the limit takes up to 20 s more.
GPU_PYTHON ?=
GPU_WORKERS ?= 12
GPU_LIMIT_S ?= 220
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/.test)
	$(or $(GPU_PYTHON),$(BIN)/python) -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU"'
	TORCHINDUCTOR_COMPILE_THREADS=2 timeout --foreground --signal=INT --kill-after=20 $(GPU_LIMIT_S) \
	  $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu $(if $(filter-out 0,$(GPU_WORKERS)),-n $(GPU_WORKERS) --dist worksteal) \
	  --at-once -rsfE --tb=short --durations=10 -o faulthandler_timeout=120 --junitxml=test-gpu.xml $(PYTEST_ARGS) $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# The oldest transformers that pyproject.toml allows, in an environment of its own. The facts in
# tests/published are those of the locked version.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
.venv-oldest/.test: pyproject.toml requirements.lock requirements-test.lock
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install --quiet --requirement requirements-test.lock
	.venv-oldest/bin/pip install --quiet 'transformers~=$(OLDEST).0'
	touch $@

test-oldest: .venv-oldest/.test
	.venv-oldest/bin/pytest -n 2 --dist worksteal -m "not gpu" --ignore=tests/slurm --ignore=tests/published $(PYTEST_ARGS)

# One at a time: kills and time limits are among them.
test-exhaustive: $(VENV)/.test interruptions
	$(BIN)/pytest -s --exhaustive --durations=10 tests/exactness $(PYTEST_ARGS)
	$(BIN)/pytest --exhaustive -m exhaustive tests/unit tests/integration tests/published $(PYTEST_ARGS)

lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet torch==2.13.0
	$(VENV)-lock/bin/pip install --quiet .
	$(VENV)-lock/bin/pip freeze --exclude stoker | sed "s/+cpu$$//" > requirements.lock
	$(VENV)-lock/bin/pip install --quiet '.[deepspeed,test]'
	(echo '-r requirements.lock'; $(VENV)-lock/bin/pip freeze --exclude stoker | sed "s/+cpu$$//" | grep -vxFf requirements.lock) > requirements-test.lock
	rm -r $(VENV)-lock

lock-docs:
	$(PYTHON) -m venv $(DOCS)-lock
	$(DOCS)-lock/bin/pip install --quiet zensical==0.0.73
	$(DOCS)-lock/bin/pip freeze > requirements-docs.lock
	rm -r $(DOCS)-lock
