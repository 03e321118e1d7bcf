# `make demo` and `make test` are all a new user needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PYTEST_2 := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-fast check format package docs bench bench-gpu bench-plan images gallery surfaces soak clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## .venv with everything pinned

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[board,dev,docs,metrics,notebook,pictures,trackers]'
	touch $(READY)

demo: setup  ## train on 2 local workers and write the report, about a minute
	$(BIN)/paceline train fashion-mnist-mini --workers 2 --name demo --profile
	$(BIN)/paceline report

test-fast: setup  ## tests/unit: starts no process
	$(PYTEST_2) tests/unit

test: setup  ## the whole suite; ARGS="tests/laws -k law4" for less
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(PYTEST_2) tests/laws tests/course tests/engines tests/system tests/browser
	$(PYTEST_2) tests/unit
	$(BIN)/python -m pytest tests/ranks tests/gpu
endif

check: setup  ## lint, format, types, layers of imports, English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tools/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/python tools/check_english.py

format: setup  ## rewrite files to house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: setup  ## build the wheel and the sdist, check them, install with the lowest and the newest torch, 3 minutes
	$(BIN)/python tools/check_package.py

docs: setup  ## the site from docs/ with the API reference, in site/; works offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo open site/index.html

bench: setup  ## measure on CPUs: workers, exact sums, checkpoints, start-up, growth; rewrites bench/results, 30 minutes
	$(BIN)/python bench/workers.py
	$(BIN)/python bench/shared_cores.py
	$(BIN)/python bench/reduce.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/overhead.py --batch 128 --out bench/results/overhead_cpu.json
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/growth.py

bench-gpu: setup  ## measure on a GPU: peers, overhead, limit, time to 94%, a growing run on 64 workers; rewrites bench/results, 25 minutes
	$(BIN)/python bench/peers.py --device cuda --workers 1 --paceline-flags "--fast on" --out bench/results/peers_gpu.json
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/limit.py
	$(BIN)/python bench/speedrun.py
	$(BIN)/python bench/plan_growth.py
	$(BIN)/python bench/landscape.py

bench-plan: setup  ## compare predicted with measured speeds, also on shaped links (as root), 20 minutes; rewrites bench/results
	$(BIN)/python bench/plan.py
	$(BIN)/python bench/timing.py
	$(BIN)/python bench/timing.py --of noise --models cnn resnet:depth=8

images: setup  ## take the pictures in docs/img again, 3 minutes
	$(BIN)/python tools/screenshots.py

gallery: setup  ## write docs/gallery.md and its pictures from the results in studies/, some seconds
	$(BIN)/python tools/gallery.py

surfaces: setup  ## train and measure what the gallery shows, on a GPU, 20 minutes; rewrites studies/surfaces
	$(BIN)/python tools/surfaces.py

soak: setup  ## kill a run 50 times and compare it with an uninterrupted one, about 10 minutes; rewrites bench/results/soak.json
	$(BIN)/python bench/soak.py

clean:  ## remove .venv and caches (records in runs/ stay)
	rm -rf .venv build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
