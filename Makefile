# The entry points of the project. Each target that needs the environment makes it first, once; `make help` lists them.
#   VENV=FOLDER     where the environment lives (.venv; the user's cache folder where the clone is read-only)
#   PYTHON=python3.12   the Python that it is made with, 3.11 or later (found if not said)
#   WORKERS=3       test processes side by side
#   ARGS="..."      handed on to the program of `make demo`, `make test`, `make newest`, `make soak` and `make bench`

.DEFAULT_GOAL := help
.PHONY: help setup demo test newest check format lint types docs pages-run tables pages site dist matrix soak bench bench-plan bench-run pins clean

# What a shell has set for another project must not leak into this one.
unexport PYTHONPATH PYTHONHOME
# Hundreds of processes import varlen and what the tests share; each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON

ifndef VENV
VENV := $(shell sh scripts/where venv)
endif
ifndef SCRATCH
SCRATCH := $(shell sh scripts/where scratch)
endif
WORKERS ?= 3
ARGS ?=

# Tools keep their caches where this user can write.
export RUFF_CACHE_DIR := $(SCRATCH)/.ruff_cache
export MYPY_CACHE_DIR := $(SCRATCH)/.mypy_cache
export HYPOTHESIS_STORAGE_DIRECTORY := $(SCRATCH)/.hypothesis

RUN := "$(VENV)/bin/python"
PYTEST := $(RUN) -m pytest -o cache_dir="$(SCRATCH)/.pytest_cache"

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## make the environment; every other target does so by itself
	@sh scripts/setup "$(VENV)"

demo: setup ## train on real text, padded against packed, and write report.html (under 3 minutes)
	$(RUN) -m varlen demo --output "$(SCRATCH)/report.html" $(ARGS)

test: setup ## run the tests
	$(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS)

newest: ## run the tests with the newest release of everything, of PyTorch only where it is a CPU build
	@sh scripts/setup --newest "$(VENV)-newest"
	"$(VENV)-newest/bin/python" -m pytest -o cache_dir="$(SCRATCH)/.pytest_cache" -n $(WORKERS) --dist worksteal $(ARGS)

check: format lint types docs ## format, lint, types and documentation, changing nothing

format: setup
	$(RUN) -m ruff format --check .

lint: setup
	$(RUN) -m ruff check .

types: setup
	$(RUN) -m mypy --strict

docs: pages-run tables ## run the documentation's examples, follow its links, compare its pictures and tables

pages-run: setup
	$(PYTEST) -n $(WORKERS) --dist worksteal tests/docs

tables: setup
	$(RUN) -m benchmarks.table --check
	$(RUN) -m benchmarks.strategies.page --check
	$(RUN) -m benchmarks.running.page --check
	$(RUN) -m benchmarks.gpu.page --check
	$(RUN) docs/compatibility.py --check
	$(RUN) docs/reference.py --check

pages: setup ## write into README and docs what their examples print now, and draw their pictures
	$(RUN) docs/draw.py && $(RUN) docs/pages.py && $(RUN) docs/notebooks.py && $(RUN) -m benchmarks.table && $(RUN) -m benchmarks.strategies.page \
	&& $(RUN) -m benchmarks.running.page && $(RUN) -m benchmarks.gpu.page

site: setup ## build the pages as a site for browsers, $(SCRATCH)/site/index.html
	$(RUN) docs/website.py "$(SCRATCH)/site"

dist: setup ## build the wheel and the sdist into dist/
	@mkdir -p dist && $(RUN) -c "from flit_core import buildapi; buildapi.build_wheel('dist'); buildapi.build_sdist('dist')"
	@ls dist

matrix: setup ## verify every causal family of transformers and write docs/compatibility.md (under 20 minutes)
	$(RUN) docs/compatibility.py $(ARGS)

soak: setup ## run the long tests (one and a half to two and a half hours); the summary it prints is docs/soak.md
	$(RUN) scripts/soak.py --scratch "$(SCRATCH)" $(ARGS)

bench: setup ## run peers side by side, write benchmarks/results/ and the tables of docs/benchmarks.md
	@sh benchmarks/setup_peers.sh $(abspath $(VENV))/bin/python $(abspath $(VENV))-peers
	PYTHONPATH=src "$(VENV)-peers/bin/python" -m benchmarks $(ARGS)
	$(RUN) -m benchmarks.table

bench-run: setup ## time slices and pipelines of real models and write docs/running-results.md (a quarter of an hour)
	$(RUN) -m benchmarks.running $(ARGS)
	$(RUN) -m benchmarks.running.page

bench-plan: setup ## plan and simulate every method side by side and write docs/planning-results.md (about an hour)
	$(RUN) -m benchmarks plan $(ARGS)
	$(RUN) -m benchmarks.plan.table

pins: setup ## write constraints.txt from what the environment holds now
	$(RUN) scripts/pins.py >constraints.new && mv constraints.new constraints.txt

clean: ## remove the environment and every cache
	@test ! -f "$(VENV)/varlen-ready" || rm -rf "$(VENV)"
	rm -rf "$(VENV)-newest" "$(SCRATCH)"/site
	rm -rf "$(SCRATCH)"/.ruff_cache "$(SCRATCH)"/.mypy_cache "$(SCRATCH)"/.pytest_cache "$(SCRATCH)"/.hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
