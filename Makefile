# `make VERB TARGET=name` runs scripts/VERB.py; `make` alone lists the verbs. A new verb is a new module there.
# Variables given to make reach the verbs through the environment, never through a shell's text.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
PYTHON := .venv/bin/python
VERBS := $(shell grep -lE '^    cli\.run\(main\)$$' scripts/*.py | sed -E 's|scripts/(.*)\.py|\1|; s|_|-|g')

.PHONY: help setup engine $(VERBS)

help: .venv/.ready
	@$(PYTHON) -m scripts

$(VERBS): .venv/.ready
	@$(PYTHON) -m scripts.$(subst -,_,$@)

# Everything a fresh machine needs: Python packages, and a Docker engine where there is none.
setup: .venv/.ready engine

engine:
	@scripts/install-engine.sh

.venv/.ready: scripts/requirements.lock scripts/setup-python.sh
	@scripts/setup-python.sh

.DEFAULT:
	@echo "make: no verb '$@'; there are: setup engine $(VERBS)" >&2; exit 2
