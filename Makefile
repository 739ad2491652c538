# Needs python3 (3.11 or newer) and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
# An environment may switch bytecode off; every Dagster run is a fresh interpreter and would pay for it each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup dev test bench lint format lock clean

help: ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /  make \1   /p' Makefile

setup: .venv/.installed ## set up .venv with the locked dependencies

.venv/.installed: requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pin_jobs needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`. Say which: make setup PYTHON=python3.12"; exit 1; }
	@echo "==> Creating .venv with `$(PYTHON) -V`"
	@$(PYTHON) -m venv --clear .venv \
	  || { echo "Python cannot create environments here; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "==> Installing `grep -c '^[a-z].*==' requirements-dev.txt` locked packages (half a minute, longer on a slow network)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes --compile -r requirements-dev.txt \
	  | sed -un 's/^Collecting \([^ ;]*\).*/    \1/p; s/^\(Installing collected\).*/    installing and compiling .../p'; \
	  $(BIN)/python -c 'import dagster, hatchling' || { echo "The installation failed: the messages above say why"; exit 1; }
	@echo "==> Installing pin-jobs itself"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q pin_jobs
	@touch $@

dev: setup ## run the jobs on embedded servers, with the web UI on localhost
	@exec $(BIN)/pin-jobs dev

# A server of somebody else's is one for all tests, so they take turns there.
PARALLEL := $(if $(PIN_JOBS_TEST_POSTGRES_URL),,-n auto --dist loadfile --no-loadscope-reorder)
test: setup ## run all tests (several minutes on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not alone"
	@$(BIN)/python -m pytest -m alone

bench: setup ## run the benchmarks (five to ten minutes, 3 GB of disk)
	@$(BIN)/python -m bench.history
	@$(BIN)/python -m bench.throughput

lint: setup ## check format, style, types and import direction
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format the code and apply the safe fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: ## write requirements-dev.txt anew (needs uv)
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" pyproject.toml --extra dev -o requirements-dev.txt

clean: ## remove .venv and everything built; the data of `make dev` stays
	@rm -rf .venv dist build .*_cache
