# Needs Python >= 3.10 and a C/C++ compiler (Inductor uses g++). Everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
# Extra flags for pip, e.g. PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU build.
PIP_FLAGS ?=
# Of torch, for "make matrix".
VERSIONS ?= 2.11.0 2.13.0 2.15.0
# For "make docs".
SITE ?= build/site
# Extra flags for pytest, e.g. PYTEST_FLAGS="-x -k store".
PYTEST_FLAGS ?=
# Processes of "make test". Each takes a GiB and more of memory.
WORKERS ?= 2
# A default test that takes longer hangs: it fails then, and every thread's traceback is printed.
HUNG_S ?= 300

# For "make paper": after so many minutes no other case begins; libjemalloc.so, as one of the rivals; extra flags for
# benchmarks/paper, e.g. "--only peaks".
MINUTES ?= 120
JEMALLOC ?=
PAPER_FLAGS ?=

# For "make gpu": the drive, where the results go, extra flags for benchmarks/gpu_parts.py (--dry-run shows what it runs).
GPU_DIR ?= demo-out/gpu
GPU_RESULTS ?= demo-out/gpu-results
GPU_FLAGS ?=

PY := $(VENV)/bin/python
GPU_PY = $(if $(wildcard $(PY)),$(PY),$(PYTHON))
STAMP := $(VENV)/.ssd_fx-installed
# What runs a model: without what the tests need. "make setup" has it too.
RUNS := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.ssd_fx-runs)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow slow-drive nightly zoo loops ways peers planted matrix wheel compatibility pages docs lint format check gpu bench paper bigger-than-memory clean

help:
	@echo "make demo      train a small GPT with Inductor and with ssd_fx, print one table (a few minutes)"
	@echo "make test      tests without the slow ones;  make test-slow: those (an hour)"
	@echo "make slow-drive  the tests of 'make test' on a drive that is slow at random (ten minutes)"
	@echo "make nightly   test-slow, slow-drive, zoo, loops, ways, peers, planted and matrix, one after the other (half a day)"
	@echo "make zoo       other people's models (an hour);  make loops: training loops, trainers, several processes (half;"
	@echo "               with EVERY_SOURCE=1 each loop under five of the places that a loaded value may come from)"
	@echo "make ways      other people's packages: TRL, PEFT, torchtitan, torchtune, DeepSpeed, torchao, diffusers"
	@echo "make matrix    the tests under torch $(VERSIONS), an environment for each (VERSIONS=...)"
	@echo "make bigger-than-memory  train what saves three times the memory that the process may have (ten minutes)"
	@echo "make planted   plant the faults of tests/planted in copies of the checkout, one by one: the tests must find each (an hour)"
	@echo "make peers     PyTorch's own test suites, stock and ours: TESTS=DIR, a checkout of pytorch (an hour)"
	@echo "make compatibility  docs/compatibility.md, of what zoo, loops, peers and matrix found"
	@echo "make pages     docs/options.md, and what programs print in the other pages"
	@echo "make wheel     the wheel, in dist/, which works without a compiler but for Inductor"
	@echo "make docs      the pages as a site, in $(SITE)/index.html"
	@echo "make lint      ruff and mypy;  make format: rewrite;  make check: lint and test"
	@echo "make gpu       on a GPU: tests, rates, bandwidth, steps (half an hour); gpu-tests, gpu-ways, gpu-pareto, gpu-fit, gpu-PART; GPU_FLAGS=--dry-run"
	@echo "make paper     the reference paper's experiments, to demo-out/paper/ (MINUTES=120; QUICK=1: tiny, ten minutes)"
	@echo "make bench     the demo at its full size;  make clean"

setup: $(STAMP)

# The native source is a prerequisite, so that a change of it rebuilds the library.
$(STAMP) $(VENV)/.ssd_fx-runs: pyproject.toml setup.py constraints.txt $(wildcard runtime/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 needed; set PYTHON=...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): with PyTorch, some minutes"
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.$(if $(filter %-installed,$@),[test])'
	@touch $@

demo: $(RUNS)
	@mkdir -p demo-out
	$(PY) benchmarks/gpt_step.py --layers 4 --width 256 --heads 4 --batch 8 --seq 256 --pairs 10 \
		--dir demo-out --json demo-out/demo.json

bench: $(RUNS)
	@mkdir -p demo-out
	$(PY) benchmarks/gpt_step.py --dir demo-out --json demo-out/bench.json

PARALLEL := $(PY) -m pytest -n $(WORKERS) --dist worksteal
NO_HANGS := -o faulthandler_timeout=$(HUNG_S) -o faulthandler_exit_on_timeout=true

test: $(STAMP)
	$(PARALLEL) $(NO_HANGS) $(PYTEST_FLAGS)

# The same tests on a drive that is slow at random, where writes outlive their handles.
slow-drive: $(STAMP)
	LD_PRELOAD=$$($(PY) -m tests.faults.faultio) $(PARALLEL) $(NO_HANGS) -p tests.faults.slow_drive $(PYTEST_FLAGS)

# Of what the suites below found, in git: no page needs all of them run at once.
RESULTS := docs/results
RECORDED := COMPATIBILITY_RESULTS=$(RESULTS)/tests.jsonl
# MKL's products then have the same bits wherever their inputs lie (docs/faq.md), and however busy the machine is.
SAME_BITS := MKL_CBWR=COMPATIBLE MKL_DYNAMIC=FALSE

zoo: $(STAMP)
	$(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test,zoo]'
	$(SAME_BITS) $(RECORDED) $(PY) -m pytest -m "" tests/zoo $(PYTEST_FLAGS)

loops: $(STAMP)
	$(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test,trainers]'
	EVERY_SOURCE=$(EVERY_SOURCE) $(RECORDED) $(PY) -m pytest -m "" tests/loops tests/trainers tests/distributed $(PYTEST_FLAGS)

# The pages that the code makes; tests compare them.
pages: $(STAMP)
	$(PY) docs/options.py > docs/options.md
	$(PY) examples/excerpts.py --write

# A link that leads nowhere, or a page in no part of the navigation, fails. Needs no network but for the packages.
docs: $(STAMP)
	$(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(PY) -m sphinx -q -W --keep-going -c docs -d build/doctrees . $(SITE)
	@echo $(SITE)/index.html

# The last one that torchtune 0.6.1 imports from.
TORCHAO := torchao==0.10.0

# Other people's packages, about 2 GB of them. DeepSpeed is built beside the torch that is there; none of its own kernels.
ways: $(STAMP)
	$(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test,trainers,ways]' wheel ninja
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-build-isolation deepspeed
	$(SAME_BITS) $(RECORDED) $(PY) -m pytest -m "" tests/ways --ignore tests/ways/test_torchtune.py $(PYTEST_FLAGS)
	$(PY) -m pip install --quiet $(PIP_FLAGS) --no-deps --upgrade --target build/torchao $(TORCHAO)
	PYTHONPATH=build/torchao $(SAME_BITS) $(RECORDED) $(PY) -m pytest -m "" tests/ways/test_torchtune.py $(PYTEST_FLAGS)

# For every Python 3, in dist/; tried without a compiler.
wheel: $(STAMP)
	rm -rf dist
	$(PY) -m pip wheel --quiet $(PIP_FLAGS) --no-deps -w dist .
	$(PY) -m tests.wheel dist/*.whl

compatibility: $(STAMP)
	$(PY) -m tests.compatibility $(RESULTS) --tidy > docs/compatibility.md

matrix:
	$(PYTHON) -m tests.matrix $(VERSIONS) --results $(RESULTS)/matrix.jsonl --pip "$(PIP_FLAGS)" --pytest "$(PYTEST_FLAGS)"

# PAPER_FLAGS="--json-dir docs/results/paper --more" goes on with the results there instead.
paper: $(STAMP)
	@mkdir -p demo-out/paper
	$(PY) benchmarks/paper --dir demo-out --json-dir demo-out/paper $(if $(QUICK),--quick,--minutes $(MINUTES)) \
		$(if $(JEMALLOC),--jemalloc $(JEMALLOC)) $(PAPER_FLAGS)

planted: $(STAMP)
	$(PY) -m tests.planted --results $(RESULTS)/planted.jsonl
	$(PY) -m tests.planted --table $(RESULTS)/planted.jsonl > $(RESULTS)/planted.md

bigger-than-memory: $(STAMP)
	@mkdir -p demo-out
	$(PY) benchmarks/bigger_than_memory.py --dir demo-out --json demo-out/bigger.json

# Of its requirements those that it needs for what is compared; the others would change the environment.
LLM_ANALYSIS := llm-analysis==0.2.2 "fire<0.6" termcolor six

# Without TESTS it says how to get PyTorch's tests.
peers: $(STAMP)
	@mkdir -p demo-out
	rm -rf demo-out/peers
	$(PY) -m pip install --quiet $(PIP_FLAGS) --no-deps --upgrade --target demo-out/peers/llm-analysis $(LLM_ANALYSIS)
	PEERS_RESULTS=$(RESULTS)/peers.jsonl PYTHONPATH=demo-out/peers/llm-analysis \
		$(PY) -m pytest -m peers tests/peers $(PYTEST_FLAGS)
	$(PY) -m tests.peers.run $(addprefix --tests ,$(TESTS)) --results $(RESULTS)/peers.jsonl
	$(PY) -m tests.peers.results $(RESULTS)/peers.jsonl

# All that CI has no time for, one suite after the other. A suite that fails does not stop those after it.
nightly:
	$(MAKE) --keep-going test-slow slow-drive zoo loops ways peers planted matrix VERSIONS="$(firstword $(filter 2.13%,$(VERSIONS)) $(VERSIONS))"

test-slow: $(STAMP)
	$(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test,docs]'
	$(SAME_BITS) $(PY) -m pytest -m slow --ignore tests/loops --ignore tests/trainers --ignore tests/ways --ignore tests/distributed --ignore tests/zoo \
		$(PYTEST_FLAGS)

# Runs in .venv if there is one, else with $(PYTHON) as it is: a GPU machine often has its torch already, and no network.
# "make gpu-info", "make gpu-bandwidth", ...: one part, of those that benchmarks/gpu_parts.py lists.
gpu:
	PYTHONPATH=. $(GPU_PY) benchmarks/gpu_parts.py --dir $(GPU_DIR) --out $(GPU_RESULTS) $(GPU_FLAGS)

gpu-%:
	PYTHONPATH=. $(GPU_PY) benchmarks/gpu_parts.py --dir $(GPU_DIR) --out $(GPU_RESULTS) $(GPU_FLAGS) $*

lint: $(STAMP)
	bash -n .ci/run
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy examples benchmarks
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

check: lint test

clean:
	rm -rf build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runtime/native/_iopool*.so
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
