# make demo: from a bare checkout with Python 3.10 or newer to a trained, thresholded, scored ensemble; installs the core.
# make test, make lint, make docs, make sbom (bill of materials): what .ci/run calls. make audit: known vulnerabilities.
# make settings: docs/settings.md from the table of settings. make lock: renew requirements-lock.txt after a change of constraints.txt or of a dependency.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Written last, so an installation that was cut short is done again; newer than what it was made from, so done only then.
INSTALLED := $(VENV)/.installed
CORE := $(VENV)/.core

.PHONY: demo test test-cluster lint settings docs sbom audit lock environment

demo: $(CORE)
	$(BIN)/python -m mri_alm demo

# Two files of tests at a time, a thread each, but for those that need the machine to themselves. The package is compiled
# before: where Python is told to write no bytecode, each of the programs that tests start would compile it again.
test: environment
	$(BIN)/python -m compileall -q mri_alm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not alone"

# Two Ray nodes on this machine, which do not come up beside other programs on two cores.
test-cluster: environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone tests/training/test_train_ensemble.py

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile

settings: environment
	$(BIN)/python docs/write_settings.py

docs: environment
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@if grep -rnoE '(src|href)="(https?:)?//[^"]*\.(js|css|woff2?|png|svg)"' build/site --include='*.html'; then \
		echo "error: these pages load something from elsewhere" >&2; exit 1; fi

sbom: environment
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(BIN)/python

audit: environment
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r requirements-lock.txt

lock: environment
	$(BIN)/python docker/lock.py requirements-lock.txt requirements-core.txt

environment: $(INSTALLED)

define check
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not Python 3.10 or newer. Name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }
endef

$(INSTALLED): pyproject.toml constraints.txt requirements-lock.txt requirements-core.txt docker/install.sh
	$(check)
	PYTHON=$(PYTHON) docker/install.sh $(VENV)
	@touch $(CORE) $@

$(CORE): pyproject.toml constraints.txt requirements-core.txt docker/install.sh
	$(check)
	PYTHON=$(PYTHON) docker/install.sh $(VENV) core
	@touch $@
