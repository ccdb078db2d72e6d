# `make help` lists the targets. Each works as the first command on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PRESET ?= demo
# Builds of torch: those of the package index, or `make install TORCH=cpu` for the ones without CUDA.
TORCH ?=
TORCH_INDEX := https://download.pytorch.org/whl
EVERYTHING := --constraint constraints.txt --editable '.[dev,docs,wandb,tensorboard,figures,huggingface,report]'
ENGINE ?= local
# The oldest torch that pyproject.toml allows; the interpreter of its Triton, 3.4, fails with NumPy 2.4.
FLOOR := torch==2.8.0 torchvision==0.23.0 'numpy<2.4'
FLOOR_TESTS := methods/test_contract.py benchmark/test_internals.py benchmark/backbones/test_convolution_kernels.py
FLOOR_TESTS += $(addprefix benchmark/engine/,test_recorded_step.py test_straight_line.py)

.DEFAULT_GOAL := help
# Tables: `make table1 PRESET=paper DATA_DIR=/data`. The name of a target is that of a file in configs/tables, - for _.
TABLES := $(subst _,-,$(basename $(notdir $(wildcard configs/tables/*.yaml))))
FIGURES ?= $(addprefix pfedpt_fig,4 5 6 8 9 10 11)
# A developer's loop: files of units and equations, whose tests are quick, and the contract of two methods.
FAST := methods/test_contract methods/test_alone methods/test_fedkgcoop methods/test_fedotp methods/test_variational
FAST += $(addprefix benchmark/test_,placing seeds ranges server) benchmark/config/test_yaml_files
FAST += $(addprefix benchmark/engine/test_,plans metrics straight_line)
FAST += benchmark/backbones/test_prompts benchmark/backbones/test_pixel_prompts benchmark/tables/test_paired
FAST += $(addprefix datamodules/test_,partition partition_few_shot partition_domains split_record federated manifest)
.PHONY: help install test test-fast test-slow test-gpu floor gpu-day check pfedpt-figures report reproduction bench docs clean $(TABLES)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  make TABLE          one of (benchmark configs tables/ says what each is):"
	@echo "$(TABLES)" | fold -s -w 76 | sed 's/^/    /'
	@echo "  variables: PRESET=demo|short|paper, or another of the table's"
	@echo "             DATA_DIR=folder of the data sets"
	@echo "             JOBS=runs at a time (default: one a GPU, else up to 4)"
	@echo "             TORCH=cpu with install: torch without CUDA"
	@echo "             ENGINE=local|slurm|ray, where a table's runs are done (docs/scaling.md)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "error: Python 3.11 to 3.13 is needed, this is %d.%d; name one with make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX)/$(TORCH) $(shell grep -E '^(torch|torchvision)==' constraints.txt) --no-deps)
	@# uv takes a seventh of pip's time, but does not read pip's configuration: where that names a mirror, pip goes on.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(EVERYTHING) \
	|| $(BIN)/python -m pip install --quiet --disable-pip-version-check $(EVERYTHING)
	@touch $@

install: $(STAMP) ## make .venv with everything in it

test: $(STAMP) ## run the tests, and name the slowest
	$(BIN)/python -m pytest --durations=25

test-fast: $(STAMP) ## run quick units and equations and the contract of two methods, for a developer's loop: FAST above
	$(BIN)/python -m pytest --durations=10 $(FAST:%=tests/%.py) -k "not test_contract or HeadTune or (PromptFL and not PromptFLFT)"

test-slow: $(STAMP) ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP) ## run the tests that need a GPU, which the others leave out where there is none
	$(BIN)/python -m pytest tests/methods/test_gpu.py

floor: ## make .venv-floor with the oldest torch that is allowed, and run what of torch the engine and methods lean on
	$(PYTHON) -m venv .venv-floor
	grep -vE '^(torch|torchvision|triton|numpy|cuda-|nvidia-)' constraints.txt > .venv-floor/constraints.txt
	.venv-floor/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-floor/constraints.txt $(FLOOR) pytest pytest-xdist --editable '.[privacy]'
	.venv-floor/bin/python -m pytest -n 1 $(addprefix tests/,$(FLOOR_TESTS)) -k "not test_contract or FedVPT or PFedPG or FedPGP or PFedPT"

check: $(STAMP) ## lint, types and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

$(TABLES): $(STAMP)
	$(BIN)/benchmark table $(subst -,_,$@) --preset $(PRESET) --engine $(ENGINE) $(if $(JOBS),--jobs $(JOBS)) $(if $(DATA_DIR),--data_dir "$(DATA_DIR)")

pfedpt-figures: $(STAMP) ## figures of the pFedPT paper (demo); one: FIGURES=pfedpt_fig5
	$(BIN)/benchmark figure $(FIGURES) --preset $(PRESET) $(if $(JOBS),--jobs $(JOBS)) $(if $(DATA_DIR),--data_dir "$(DATA_DIR)")

table1: ## pFedPG's Table 1 (demo); table2 to table5 likewise, other papers' below
report: $(STAMP) ## results/report.html: everything recorded, on one page that opens from disk
	$(BIN)/benchmark report

reproduction: $(STAMP) ## results/REPRODUCTION.md: every published table, and what was run of it
	$(BIN)/benchmark reproduction

bench: $(STAMP) ## speed measurements; some of them, or in so many minutes: CASES="engine vit" MINUTES=8; or AGAINST=revision
	$(BIN)/python -m benchmark.speed $(CASES) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(AGAINST),--against $(AGAINST))

gpu-day: $(STAMP) ## on a GPU, in 8 minutes: its tests, recorded steps, stacked convolutions, the targets; one table of all
	$(BIN)/python -m benchmark.speed gpu_tests recorded convolution targets --minutes $(or $(MINUTES),8)

docs: $(STAMP) ## build/site: the documentation as pages, warnings are errors
	@# Material announces its successor with each build; that is no warning about these pages.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove the environment and the built site; runs and data stay
	rm -rf $(VENV) build/site *.egg-info .pytest_cache .mypy_cache .ruff_cache
