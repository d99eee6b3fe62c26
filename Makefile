# `make COMMAND NAME=value` is `trainyard COMMAND` from this checkout, with the variable TRAINYARD_NAME=value.
# Values reach the command through the environment; no shell expands them.
# Every command sets up .venv (scripts/setup-python.sh); setup, image and test also a Docker engine.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
TRAINYARD := .venv/bin/trainyard
COMMANDS := $(sort $(filter-out commands,$(subst _,-,$(notdir $(basename $(subst /__init__,,$(wildcard $(addprefix scripts/*/commands/,*.py */*.py))))))))

# The names of the variables on make's command line. Variables of the environment do not count.
export TRAINYARD_MAKE_VARIABLES := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
export TRAINYARD_MAKE_GOALS := $(MAKECMDGOALS)

.PHONY: help $(COMMANDS)
.NOTPARALLEL:

help: .venv/.ready
	@$(TRAINYARD) --help

$(filter-out check,$(COMMANDS)): .venv/.ready
	@$(TRAINYARD) $@

# 'trainyard check' is about a user's repository.
check: .venv/.ready
	@$(TRAINYARD) dev check

.venv/.ready: scripts/requirements.lock scripts/setup-python.sh pyproject.toml
	@scripts/setup-python.sh

.DEFAULT: .venv/.ready
	@$(TRAINYARD) $@
