# Two commands on a fresh machine with Python and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-out

FAMILIES := .venv-families
TYPES := types-linux types-darwin types-win32

.PHONY: demo test wheel release site picture readme browser servers ray pythons lowest trust gpu families check lint style $(TYPES) bench bench-remote bench-huge bench-batch bench-quantised bench-layouts bench-lora bench-delta bench-resume fuzz samples clean

# torch is pinned in constraints.txt, so that pip takes one known build instead of the newest with
# gigabytes of CUDA packages.
$(VENV)/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable .
	@touch $@

$(VENV)/ready: $(VENV)/demo-ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[dev]'
	@touch $@

demo: $(VENV)/demo-ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh sample_ckpts/demo.sh $(DEMO)

# Bytecode is kept, also where PYTHONDONTWRITEBYTECODE is set: else each process that a test starts
# compiles the package, which doubles its time, and each worker rewrites all tests.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode

# At most five minutes of the processor; what took most of them is printed at the end.
test: $(VENV)/ready
	$(BYTECODE) CKPTCONV_COSTS=12 $(BIN)/python -m pytest -q -n auto --dist worksteal

PYTHONS ?= 3.10 3.13
LOWEST ?= 3.10 3.11

# The tests that need no torch, each Python in an environment of its own; one that is not here is
# told of and left out.
pythons:
	$(PYTHON) tests/helpers/pythons.py $(PYTHONS)

# The same with the lowest dependencies that pyproject.toml allows.
lowest:
	$(PYTHON) tests/helpers/pythons.py --lowest $(LOWEST)

# What needs real frameworks (docs/frameworks.md) and other scanners, which make test does without.
$(FAMILIES)/ready: pyproject.toml constraints.txt tests/data/families.txt tests/data/families_alone.txt
	$(PYTHON) -m venv $(FAMILIES)
	$(FAMILIES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint \
	    constraints.txt torch
	$(FAMILIES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' \
	    --requirement tests/data/families.txt
	$(FAMILIES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --requirement tests/data/families_alone.txt
	@touch $@

PEERS := $(FAMILIES)/peers

# The files that other scanners are tested with, made by their own tests; without a network, what
# needs them is skipped.
$(PEERS)/ready: $(FAMILIES)/ready tests/helpers/peer_files.py
	@rm -rf $(PEERS) && mkdir -p $(PEERS)
	git clone --quiet --depth 1 https://github.com/mmaitre314/picklescan $(PEERS)/picklescan
	git clone --quiet --depth 1 https://github.com/protectai/modelscan $(PEERS)/modelscan
	git clone --quiet --depth 1 https://github.com/trailofbits/fickling $(PEERS)/fickling
	PYTHONPATH=tests $(FAMILIES)/bin/python tests/helpers/peer_files.py collect $(PEERS) $(PEERS)/files
	@touch $@

# What needs a GPU; the other tests hide those that a host has.
gpu: $(VENV)/ready
	$(BYTECODE) CKPTCONV_GPU=1 $(BIN)/python -m pytest -q -m gpu tests

families: $(FAMILIES)/ready
	$(FAMILIES)/bin/python -m pytest -q -n auto --dist worksteal -m families tests/families
	-$(MAKE) $(PEERS)/ready
	CKPTCONV_EXAMPLES=all CKPTCONV_PEER_FILES=$(CURDIR)/$(PEERS)/files $(FAMILIES)/bin/python -m pytest -q -n auto --dist worksteal tests/live/test_fitted_models.py \
	    tests/keys/test_fitting.py tests/formats/folders/test_sharded.py tests/scan/test_files.py tests/scan/test_peers.py
	test ! -e $(PEERS)/ready || \
	    PYTHONPATH=tests $(FAMILIES)/bin/python tests/helpers/peer_files.py table $(PEERS)/files

lint: style $(TYPES)

style: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What the types are on each system. Each has a cache of its own, so they may run side by side
# (make -j2 lint), and what one has found is not thrown away by the next.
$(TYPES): types-%: $(VENV)/ready
	$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$*

# Pastes every block of the README into a shell, in a fresh clone; it installs ckptconv there.
readme: $(VENV)/ready
	$(BIN)/python -m pytest -q -m readme tests/journeys/test_docs.py

BROWSER := .venv-browser

$(BROWSER)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check selenium
	@touch $@

# The pages in a real browser. Chromium and its driver are the system's own; as root on Debian they
# are installed, elsewhere they have to be there.
browser: $(BROWSER)/ready
	@command -v chromedriver >/dev/null || { apt-get update && apt-get install -y chromium chromium-driver; }
	CKPTCONV_REQUIRE_BROWSER=1 CKPTCONV_SELENIUM=$$($(BROWSER)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
	    $(BIN)/python -m pytest -q -m browser tests/pages

SERVERS := .venv-servers
RAY := .venv-ray

# azurite is of npm; where it cannot be installed, its tests skip and say so.
$(SERVERS)/ready: tests/data/servers.txt
	$(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/data/servers.txt
	-command -v npm >/dev/null && npm install --silent --no-audit --no-fund --prefix $(SERVERS)/azurite azurite@3
	@touch $@

# The tests against real servers of objects on this host; of those, SeaweedFS and moto have to run.
servers: $(VENV)/ready $(SERVERS)/ready
	$(BYTECODE) CKPTCONV_REQUIRE_SERVERS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m servers

# A Ray cluster of two nodes on this machine, in an environment of its own.
$(RAY)/ready: pyproject.toml constraints.txt tests/data/ray.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[remote,ray]' --requirement tests/data/ray.txt
	@touch $@

ray: $(RAY)/ready $(SERVERS)/ready
	RAY_USAGE_STATS_ENABLED=0 CKPTCONV_REQUIRE_RAY=1 $(RAY)/bin/python -m pytest -q -m ray tests/batch

check: lint test

BUILD := .venv-build

$(BUILD)/ready: tools/build.txt
	$(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/build.txt
	@touch $@

# dist/ckptconv-VERSION-py3-none-any.whl, which any Python from 3.10 on installs.
wheel: $(BUILD)/ready
	$(BUILD)/bin/python -m build --wheel --outdir dist .

# Builds both, checks them, and tries each in an environment of its own; publishes nothing.
release: $(BUILD)/ready
	$(BUILD)/bin/python tools/release.py dist

SITE := .venv-site

$(SITE)/ready: pyproject.toml tools/site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/site.txt --editable .
	@touch $@

# The documentation as a website, in site-out; a link that leads nowhere is an error (but with
# --quiet, which hides it).
site: $(SITE)/ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --site-dir site-out

# docs/terminal.svg, of commands that are run for it
picture: $(VENV)/demo-ready
	$(BIN)/python tools/terminal_picture.py docs/terminal.svg

bench: $(VENV)/ready
	$(BIN)/python bench/bench.py

# One huge checkpoint: a terabyte of holes in 1,000 files, up to a million tensors; 8 GB of disk.
bench-huge: $(VENV)/ready
	$(BIN)/python bench/huge.py

# Over a network: rates against obstore on SeaweedFS on this machine, and requests.
bench-remote: $(VENV)/ready $(SERVERS)/ready
	$(BIN)/python bench/remote.py

# Many small files, a finished batch, two processes against one.
bench-batch: $(VENV)/ready
	$(BIN)/python bench/batch.py

# Dequantising: schemes against cp of the output.
bench-quantised: $(VENV)/ready
	$(BIN)/python bench/quantised.py

# Tensor rules against cp of the input, and against a conversion without rules.
bench-layouts: $(VENV)/ready
	$(BIN)/python bench/tensor_rules.py

bench-delta: $(VENV)/ready
	$(BIN)/python bench/disk_delta.py

# Optimizer states against cp of the same bytes.
bench-resume: $(VENV)/ready
	$(BIN)/python bench/resume.py

bench-lora: $(FAMILIES)/ready
	$(FAMILIES)/bin/python bench/lora.py

# What docs/trust.md promises and `make test` only samples, but for the long fuzz; the figures are
# printed at the end. Crash safety needs strace, or STRACE= to skip it.
STRACE ?= 1
EXAMPLES ?= all
PROOFS ?= trust or property
trust: $(VENV)/ready
	$(BYTECODE) CKPTCONV_REQUIRE_STRACE=$(STRACE) CKPTCONV_EXAMPLES=$(EXAMPLES) \
	    $(BIN)/python -m pytest -q -n auto --dist worksteal -m "$(PROOFS)"

SECONDS ?= 600

# What it finds lies in fuzz-finds/; docs/maintainers/fuzzing.md tells how to try a find again.
fuzz: $(VENV)/ready
	PYTHONPATH=tests:tests/trust $(BIN)/python -m fuzzing --seconds $(SECONDS) $(FUZZ)

samples: $(VENV)/ready
	$(BIN)/python sample_ckpts/make_samples.py

clean:
	rm -rf $(VENV) $(FAMILIES) $(BROWSER) $(SERVERS) $(RAY) $(BUILD) $(SITE) dist site-out .venv-3.* .venv-lowest-* $(DEMO) bench-out .pytest_cache \
	    .mypy_cache .ruff_cache .hypothesis fuzz-finds
