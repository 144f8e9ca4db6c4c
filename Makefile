# `make demo` and `make test` need nothing but Python 3.11 and pip: they make a virtual environment of their own.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow test-mutation test-peft docs space test-space style quality install clean

$(BIN)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(BIN)/installed-demo $@

# The demonstration needs less than the tests do, and so is there sooner.
$(BIN)/installed-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,plots]"
	touch $@

install: $(BIN)/installed

demo: $(BIN)/installed-demo
	$(BIN)/python examples/cil.py --use_cpu

test: install
	$(BIN)/python -m pytest -n 2

# All tests, and which branches of the package they go through.
test-slow: install
	$(BIN)/python -m pytest -n 2 --cov --cov-report=
	$(BIN)/python -m pytest -m slow --cov --cov-append --cov-report=term-missing:skip-covered --cov-fail-under=95

# Changes the code in 300 places, one at a time, and sees whether the tests notice.
test-mutation: install
	$(BIN)/python tests/mutation.py --count 300 --seed 3 --out examples/benchmarks/results/mutation.json

# PEFT's own tests on LuCA: downloads PEFT's sdist into the user's cache.
test-peft: install
	$(BIN)/python -m pytest -m slow tests/tuner/test_upstream.py

# The pages of docs/ as a site, in site/. It needs no network; a page or a name that is missing is an error.
docs: install
	$(BIN)/python docs/_site.py

# The demonstration in a browser. gradio asks for an older Pillow than constraints.txt has, so that it has its own place.
.venv-space/installed: examples/space/requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-space
	grep -v '^pillow=' constraints.txt > .venv-space/constraints.txt
	.venv-space/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-space/constraints.txt \
		-e . -r examples/space/requirements.txt
	touch $@

space: .venv-space/installed
	.venv-space/bin/python examples/space/app.py

# Needs a Chromium: apt-get install chromium.
test-space: .venv-space/installed
	.venv-space/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-space/constraints.txt \
		pytest pytest-xdist playwright
	.venv-space/bin/python -m pytest -m slow tests/test_space.py

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-space out site build dist *.egg-info
