# Everyday commands. Each sets up .venv first, which costs nothing when it is up to date.

PYTHON ?= python3
BIN := .venv/bin
EXTRAS := --extra serve --extra cpu --extra trl --extra load --extra demo --extra dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-sglang setup-verl check docs format test test-rest test-all test-unit test-load test-vllm test-sglang test-verl test-ray test-slow test-verl-slow demo site dist pictures \
  loadtest compare chaos lock clean

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Make .venv what requirements/ says
	@command -v $(PYTHON) >/dev/null || { \
	  echo "setup: no $(PYTHON) here; on Debian 12 or newer: apt-get install python3 python3-venv git make" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py

setup-sglang: setup ## Make .venv-sglang what requirements/sglang.txt says: SGLang on CPU, for tests
	@$(PYTHON) scripts/setup.py sglang

setup-verl: setup ## Make .venv-verl what requirements/verl.txt says: verl's trainer on CPU, for tests
	@$(PYTHON) scripts/setup.py verl

demo: setup ## Train a tiny model with TRL against two vLLM replicas, on CPU
	@$(BIN)/python -m examples.demo

check: setup ## Format, lint, types, import contracts, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.docs --check

site: ## The documentation as a site in out/site, without a warning
	@$(PYTHON) scripts/setup.py site
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict -q

dist: setup ## Wheel and source archive in dist/, the wheel tried in an environment of its own
	@$(BIN)/python -m scripts.dist

pictures: ## The pictures of page, terminal and site in docs/images and out/pictures
	@$(PYTHON) scripts/setup.py site
	@PYTHONPATH=. $(BIN)/python -m scripts.pictures

docs: setup ## Write what is generated in docs/
	$(BIN)/python -m scripts.docs

format: setup ## Mend what format and lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One process a suite: Ray and vLLM leave state in a process that the next suite must not meet. The rest runs two suites
# side by side: each waits for engines to start half of its time.
test: setup ## Unit tests and a story on each real part: vLLM and TRL on CPU, Ray Serve, chaos
	@scripts/suites unit story ray-story

test-rest: setup setup-sglang setup-verl ## Load tests, vLLM, SGLang, Ray and verl: with `make test` all that CI runs
	@scripts/suites vllm -- sglang ray verl load

test-slow: setup setup-sglang setup-verl ## Tests that take minutes each, for releases
	@scripts/suites slow -- verl-slow

test-all: test test-rest test-slow ## Everything

test-unit: setup ## Unit tests alone
	@scripts/suites unit

test-load: setup ## Tests of load tests and tune with simulated engines
	@scripts/suites load

test-vllm: setup ## Tests with real vLLM engines, stories included
	@scripts/suites story vllm

test-sglang: setup-sglang ## Tests with real SGLang engines
	@scripts/suites sglang

test-verl: setup setup-verl ## Tests with verl's own trainer against real vLLM engines
	@scripts/suites verl

test-ray: setup ## Tests with a real Ray cluster, stories included
	@scripts/suites ray-story ray

test-verl-slow: setup setup-verl ## Tests with verl that take minutes
	@scripts/suites verl-slow

# What each scenario of `make loadtest` asks for, small enough for engines on CPU. ARGS="..." adds to it or overrides it.
SCENARIO ?= trainer
trainer_load := -u 1 --prompts 16 --samples 4
agents_load := -u 16 -r 16
open_loop_load := -u 2 --rate 2
LOAD_OUT := out/loadtest/$(SCENARIO)
LOCUST := $(BIN)/locust -f loadtests/scenarios/$(SCENARIO).py --headless -t 30s --stop-timeout 600 --only-summary --master-bind-host 127.0.0.1 \
  --prompt-tokens 64 --max-tokens 64 $($(SCENARIO)_load) --csv $(LOAD_OUT) --html $(LOAD_OUT).html \
  --figures $(LOAD_OUT).json $(ARGS)

loadtest: setup ## A load test, SCENARIO=trainer (agents, open_loop), on the demo's engines or URL=...
	@mkdir -p out/loadtest
	@$(if $(URL),$(LOCUST) --host $(URL),$(BIN)/python -m loadtests.fleet -c examples/tiny-cpu.yaml gateway.port=0 \
	  engine.log_dir=out/loadtest/engines -- $(LOCUST) --host {url})

COMPARE := --sides direct gateway vllm-router --streams 32 --rounds 2 --batch 32x8 --prompt-tokens 64 --max-tokens 64 \
  --clients 1

compare: setup ## Gateway, engines and vLLM's router side by side; VLLM_ROUTER=... is its command
	@$(BIN)/python -m loadtests.fleet -c examples/sim.yaml gateway.port=0 engine.num_replicas=2 \
	  engine.sim.decode_step_s=0.02 -- $(BIN)/python -m loadtests.studies.compare --gateway {url} --gateway-pid {pid} \
	  --engine {engines} $(COMPARE) $(ARGS)

chaos: setup ## Hurt a fleet of simulated engines in every known way and count what its clients lost
	@mkdir -p out
	@$(BIN)/python -m loadtests.chaos.campaign --json out/chaos.json
	@$(BIN)/python -m loadtests.chaos.update_table --json out/update-table.json

lock: setup ## Resolve what pyproject.toml asks for, keeping pins that fit (UPGRADE=--upgrade renews all)
	@$(BIN)/python -m scripts.lock $(EXTRAS) $(UPGRADE)

clean: ## Remove what tools left, their environments included
	rm -rf .venv .venv-sglang .venv-verl .venv-site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist *.egg-info out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
