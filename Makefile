# Everything a newcomer needs: `make demo` and `make test` install what they use into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_SEEN := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PIP := $(PIP_SEEN) --quiet
# Of the tests: one more than cores, since many only wait; more than four help little.
PROCESSES ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); [ $$cores -ge 4 ] && echo 4 || echo $$((cores + 1)))
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup

# Workers start in a third less time from bytecode; some images forbid Python to write any.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test slow quick check lint workflows types docs dist bench guard fuzz clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## Install, and watch PPO learn to land on the moon: two minutes (DEMO_ARGS=--help for options)
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: $(VENV)/.dev  ## Install, and run the tests: twelve minutes on two cores
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

slow: $(VENV)/.dev  ## Run those that take long: laws over the other transport, examples that learn, campaigns of faults, Kubernetes, Ray
	$(PYTEST) -m slow $(PYTEST_ARGS)

quick: $(VENV)/.dev  ## Run the quick tests: laws, codecs, supervisor, one real run for each transport
	$(PYTEST) -m quick $(PYTEST_ARGS)

check: lint types docs test slow  ## Format, lint, types, docs, architecture, all tests: what CI runs

lint: workflows $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

workflows: $(VENV)/.dev
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet --no-progress .github

types: $(VENV)/.dev
	$(BIN)/mypy

fuzz: $(VENV)/.dev  ## Feed nonsense to the codecs for a while (SECONDS=60)
	$(BIN)/python scripts/fuzz $(or $(SECONDS),60)

docs: $(VENV)/.dev  ## Build the site into site/, offline; dead links are errors (`python -m http.server -d site` shows it)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # Not --quiet: that would also count no warnings.

dist: $(VENV)/.dev  ## Build the wheel and the sdist into dist/, and check what PyPI would show
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/.dev  ## Install peers, and measure them beside ClusterEnv (BENCH_ARGS=--quick for five minutes)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

guard: $(VENV)/.dev  ## Check that nothing has become a third slower, in half a minute
	$(BIN)/python -m benchmarks.guard

clean:  ## Remove what the targets above made
	rm -rf $(VENV) .bench .matrix dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Installing ClusterEnv into $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) swig
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) -e ".[box2d]"
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "Installing what the demo needs: torch, which is large, and matplotlib ..."
	$(PIP_SEEN) torch
	$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing what the tests need (torch and EnvPool among them) ..."
	$(PIP) torch==2.13.0
	$(PIP) -e ".[dev,docs,notebook,torch,envpool,bench,sb3,mujoco,atari,examples,video,fuzz,ray,minari,progress]"
	@touch $@
