# make demo: from a bare checkout with Python 3.10 or newer to a trained, thresholded, scored ensemble.
# make test, make lint: what .ci/run calls.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Written last, so an installation that was cut short is done again; newer than what it was made from, so done only then.
INSTALLED := $(VENV)/.installed
PIP_OUTPUT := $(if $(CI),-qq --progress-bar off)

.PHONY: demo test lint environment

demo: environment
	$(BIN)/python -m monai.bundle run --config_file configs/prostate_alm.json --run_dir runs/demo --max_epochs 7 --phantom_train 108 --phantom_test 54
	$(BIN)/python pipelines/make_phantom.py data/demo_exams --train 2 --test 2 --seed 1 --form dicom
	$(BIN)/python pipelines/score.py --model runs/demo --input data/demo_exams/studies --output runs/demo_scores
	@echo "Look at the report: open runs/demo/report.html in a browser (docs/report.md explains it)."

test: environment
	$(BIN)/python -m pytest

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile

environment: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not Python 3.10 or newer. Name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_OUTPUT) -c constraints.txt -e '.[dicom-compressed,sr,sweep,test,lint]'
	@touch $@
