# Every target works on a fresh clone: what it needs goes into .venv, once.
#   PYTHON=python3.12 make lab   another Python than python3 (3.11 or later)
#   TORCH=cuda make lab          torch with CUDA although nvidia-smi does not answer; TORCH=cpu: without
# To choose again, remove .venv.
PYTHON ?= python3
TORCH ?= auto
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Long tests come first (tests/conftest.py), and whoever is done takes over half of what the other has left.
# What is tried again, browser and killed processes alone, is named in the summary.
BOTH_CORES := -n 2 --dist worksteal -r fER

define CHECK_PYTHON
import sys
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("labkit needs Python 3.11 or later, this is %s: try PYTHON=python3.12 make ..." % version)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("This Python lacks its venv module. Debian, Ubuntu: sudo apt install python%s-venv" % version)
endef
export CHECK_PYTHON

# Silence costs at most five seconds, name lookup included.
define CHECK_WHEELS
import signal, urllib.request
signal.alarm(5)
urllib.request.urlopen("$(CPU_WHEELS)/torch/", timeout=5)
endef
export CHECK_WHEELS

.PHONY: help lab voila test quick test-slow lint bench gpu frameworks hub

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

lab: .venv/lab ## open JupyterLab on the start notebook
	@$(PY) -m jupyterlab --ServerApp.ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
		$$([ "$$(id -u)" != 0 ] || echo --allow-root)

# Voilà's pages ask for icons from outside, which the notebooks do not need: voila.json tells the browser not to.
voila: .venv/voila ## show the notebooks as pages without code
	@$(PY) -m voila notebooks

test: lint ## check style and types, then run all tests
	$(PY) -m pytest $(BOTH_CORES)

quick: lint ## check style and types, then the mathematics alone
	$(PY) -m pytest $(BOTH_CORES) -m "not browser and not notebook and not processes and not panels and not slow"

test-slow: .venv/test ## run the tests that take minutes
	$(PY) -m pytest -m slow tests/workers

lint: .venv/test ## check style and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

bench: .venv/test ## measure how fast the labs answer
	$(PY) -m tests.bench

gpu: .venv/test ## run the tests that need a GPU, skipped where there is none
	$(PY) -m pytest tests/gpu

frameworks: .venv/lab ## audit real frameworks, in two environments of 1.5 GB each
	$(PY) examples/frameworks

hub: .venv/hub ## ten learners on one JupyterHub: memory and waiting times (needs npm)
	PATH="$$PWD/.venv/hub/node_modules/.bin:$$PATH" $(PY) -m tests.bench.hub

.venv/bin/pip:
	@"$(PYTHON)" -c "$$CHECK_PYTHON"
	"$(PYTHON)" -m venv .venv

# On Linux the default torch brings gigabytes of CUDA, so without a GPU PyTorch's own CPU wheels come first.
# JupyterLab's announcements are off: they open with a question and look for news outside.
.venv/lab: requirements.txt pyproject.toml | .venv/bin/pip
	@if [ "$(TORCH)" = cuda ] || { [ "$(TORCH)" != cpu ] && nvidia-smi -L; } >/dev/null 2>&1; then \
		echo "torch: with CUDA"; \
	elif { $(PY) -c "$$CHECK_WHEELS"; } 2>/dev/null; then \
		$(PIP) install --extra-index-url $(CPU_WHEELS) "$$(grep ^torch== requirements.txt)" || true; \
	else \
		echo "torch: $(CPU_WHEELS) cannot be reached, so pip's default torch"; \
	fi
	$(PIP) install -r requirements.txt -e .
	-@$(PY) -m jupyter labextension disable @jupyterlab/apputils-extension:announcements >/dev/null 2>&1
	@touch $@

.venv/test: .venv/lab
	$(PIP) install -r requirements.txt -e '.[test]'
	@touch $@

.venv/voila: .venv/lab
	$(PIP) install -r requirements.txt -e '.[voila]' voila==0.5.13  # as tested
	@touch $@

.venv/hub: .venv/test
	$(PIP) install jupyterhub==6.1.1  # as tested
	npm install --silent --prefix $@ configurable-http-proxy
