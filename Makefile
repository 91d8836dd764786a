# The two commands: `make bench` and `make test`. Both set up .venv on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: bench test gallery figures policies chromium check lint words types layers docs clean

bench: $(STAMP)
	$(BIN)/attnbench run quick --budget 0.5
	$(BIN)/attnbench report latest

# Three processes on two cores: many tests wait for a process that they have started.
test: $(STAMP) chromium
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# The report of results/h200, the charts in docs/gallery, and what the README says of both.
gallery: $(STAMP)
	$(BIN)/python benchmarks/gallery.py

# What the README and results/README.md say of results/cpu.
figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py

# The policies that come with the package, chosen from the published runs. Not torch.compiled: it compiles anew for every length,
# which decoding cannot wait for.
policies: $(STAMP)
	$(BIN)/attnbench choose results/h200/*.jsonl --forbid torch.compiled -o src/attnbench/policies/h200.json
	$(BIN)/attnbench choose results/cpu/quick.jsonl results/cpu/regret-grid.jsonl --forbid torch.compiled -o src/attnbench/policies/cpu.json

# The browser tests need it; where it cannot be had, they are skipped and say so.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	{ command -v apt-get >/dev/null && test "$$(id -u)" = 0 && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } || \
	echo "no Chromium, and no right to install it: the browser tests will be skipped" >&2

# Pyright takes as long as everything else together: side by side on two cores.
check: $(STAMP)
	$(MAKE) --no-print-directory -j2 --output-sync types lint words layers docs

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/ruff format --check src tests benchmarks docs examples

# How docstrings begin, and words that are not used.
words: $(STAMP)
	$(BIN)/python docs/check_words.py

types: $(STAMP)
	$(BIN)/pyright

layers: $(STAMP)
	$(BIN)/lint-imports

# The site, in site/; a broken link or anchor, a page outside the navigation or a stale reference is an error.
docs: $(STAMP)
	$(BIN)/python docs/generate_cli.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs/cli.md: $(STAMP) FORCE
	$(BIN)/python docs/generate_cli.py

docs/charts: $(STAMP) FORCE
	$(BIN)/attnbench report results/h200/grid-gpu.jsonl --out site/report.html --png site/charts
	for chart in $@/*.svg; do cp site/charts/$$(basename $$chart) $$chart; done

FORCE:

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,jax,hf,flax,models,history,report,docs,dev]"
	touch $@

clean:
	rm -rf $(VENV) "$${XDG_CACHE_HOME:-$$HOME/.cache}/attnbench-tests" .pytest_cache .ruff_cache .hypothesis .import_linter_cache site
