# Everything runs in .venv, which `make` builds on first use. PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
BIN := .venv/bin
# Else every process of a test run compiles the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-oldest test-against faults horovod lint docs docs-test site site-test dist keras-tests keras-examples topology-check engines bench bench-workers bench-checkpoints bench-watching bench-input equivalence chaos clean

train: .venv/ready
	$(BIN)/python -m tfdist.train

# Three files of tests at a time, since some wait more than they compute; those of a file stay together, since they share
# what is slow to set up. Large tables are divided, see tests/support/scheduling.py.
test: .venv/ready horovod
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder

# Every cell of every table, and `faults`; then the speed beside the newest release, if there is one. PART=2/6 runs a sixth;
# `.test-parts` (not in git) records which parts passed on which commit.
RELEASE = $(shell git describe --tags --abbrev=0 2>/dev/null)
test-all: .venv/ready .venv-engines/ready horovod
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m 'not topology' $(if $(PART),--part=$(PART))
	$(if $(PART),,$(if $(RELEASE),$(BIN)/python benchmarks/bench.py --against=$(RELEASE)))

# The tests that notice soonest that something has moved.
FIRST_TO_NOTICE = tests/keras_bridge/test_keras_internals.py tests/keras_bridge/test_keras_interface.py \
  tests/train/test_train_command.py tests/checkpoints/test_old_runs.py

# The oldest supported versions.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest $(FIRST_TO_NOTICE)

# Versions to come, or any other: a table of the tests that fail with them only, and of private names that are gone.
# Their environment is made anew each time, since `.venv-against` does not say which versions it is of.
test-against: .venv/ready
	@test -n "$(KERAS_VERSION)" || \
	  { echo "usage: make test-against KERAS_VERSION=3.15.1 [TENSORFLOW_VERSION=2.21.0]"; exit 2; }
	rm -rf .venv-against
	$(PYTHON) -m venv .venv-against
	.venv-against/bin/python -m pip install --quiet --editable '.[test]'
	@# Beside tfdist's own limits, which pip reports as a conflict.
	.venv-against/bin/python -m pip install --quiet 'keras==$(KERAS_VERSION)' \
	  $(if $(TENSORFLOW_VERSION),'tensorflow==$(TENSORFLOW_VERSION)')
	$(BIN)/python .ci/against.py .venv-against/bin/python $(FIRST_TO_NOTICE)

# The long ones: processes that are killed, stopped and cut off in mid-run. `make test-all` has more of them.
faults: .venv/ready horovod
	$(BIN)/python -m pytest -m "faults and not whole"

# Ray, KerasTuner, Optuna, KerasHub, MLflow and wandb, beside TensorFlow in an environment of their own.
engines: .venv/ready .venv-engines/ready
	$(BIN)/python -m pytest -m engines tests/engines tests/examples

# Keras' own tests of fit, evaluate, predict and callbacks: by Keras itself, and answered by tfdist on one device and on
# two replicas, which fail where they do not pass what Keras does. KERAS is a checkout of Keras of the installed version.
KERAS_TESTS = $(addprefix $(abspath $(KERAS))/keras/src/,trainers/trainer_test.py callbacks)
keras-tests: .venv/ready
	test -d "$(KERAS)/keras/src" || { echo "usage: make keras-tests KERAS=path/to/a/checkout/of/keras"; exit 2; }
	passed=$$(mktemp); status=0; for strategy in keras default mirrored; do \
	  PYTHONPATH=tests:. $(BIN)/python -m pytest -q --tb=short -c /dev/null -p no:cacheprovider --noconftest \
	    --rootdir=$(abspath $(KERAS)) --import-mode=importlib -p support.keras_own_tests \
	    --strategy=$$strategy --passed=$$passed $(KERAS_TESTS) || status=1; \
	done; rm -f $$passed; exit $$status

# Unmodified examples of keras.io, on data that are made up: tests/support/keras_examples.py tells where they are had.
keras-examples: .venv/ready
	test -d "$(SOURCE)" || { echo "usage: make keras-examples SOURCE=path/to/keras_io"; exit 2; }
	$(BIN)/python tests/support/keras_examples.py $(SOURCE)

# Programs for TPUs and GPUs that are not here: compiled for them, and whole trainings on an emulated mesh. The compilers
# are installed into a cache folder of their own, a gigabyte each.
topology-check: .venv/ready .venv-tpu/ready
	$(BIN)/python -m tfdist.topology --install=tpu
	$(BIN)/python -m tfdist.topology --install=cuda
	for part in v5e-1] v5e-8] h100x4]; do $(BIN)/python -m pytest -m topology tests/topology/test_compiling.py -k "$$part" \
	  || exit 1; done  # each model leaves 200 MB behind
	$(BIN)/python -m pytest -m topology tests/topology tests/step/test_tpu_traces.py --deselect tests/topology/test_compiling.py

# Two minutes the first time, nothing afterwards.
horovod: .venv/ready
	$(BIN)/python -m tfdist.horovod_build

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page that is made from what is beside the fields.
docs: .venv/ready
	$(BIN)/python docs/make_fields.py > docs/fields.md

# The commands that README.md and docs/ show, in a fresh environment with the wheel: half an hour on two cores.
docs-test: .venv/ready
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/docs .
	$(PYTHON) -m venv build/docs/venv
	build/docs/venv/bin/python -m pip install --quiet "$$(echo build/docs/tfdist-*.whl)[export,horovod,huggingface,sweep]"
	$(BIN)/python tests/support/docs_commands.py --bin=build/docs/venv/bin

# The pages as a site with a search, in docs/_build/. It has no fonts, scripts or styles from elsewhere.
site: .venv-site/ready
	rm -rf docs/_build docs/_generated
	.venv-site/bin/python -m sphinx -b html -W --keep-going -n -q docs docs/_build
	@echo "open docs/_build/index.html"

# The site as readers meet it, in Chromium: links, search, phones, contrast, nothing from elsewhere.
site-test: site .venv/ready
	$(BIN)/python docs/check_site.py

# The wheel and the source archive in dist/, the same bytes for the same commit, and checked.
dist: export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),1767225600)
dist: .venv-dist/ready
	rm -rf dist build/lib build/bdist.* build/dist
	.venv-dist/bin/python -m build --sdist --outdir build/dist/made .
	@# Setuptools keeps the times, owners and modes of the checkout's files.
	umask 022 && mkdir -p dist build/dist/once build/dist/again && tar -xzf build/dist/made/*.gz -C build/dist/once && \
	  name=$$(ls build/dist/once) && \
	  tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
	    -C build/dist/once -cf - $$name | gzip -n > dist/$$name.tar.gz && \
	  tar -xzf dist/$$name.tar.gz -C build/dist/again && \
	  .venv-dist/bin/python -m build --wheel --outdir dist build/dist/again/$$name
	.venv-dist/bin/python -m twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl

bench: .venv/ready
	$(BIN)/python benchmarks/bench.py

bench-checkpoints: .venv/ready
	$(BIN)/python benchmarks/bench_checkpoints.py

bench-watching: .venv/ready
	$(BIN)/python benchmarks/bench_watching.py

bench-input: .venv/ready
	$(BIN)/python benchmarks/bench_input.py

bench-workers: .venv/ready horovod
	$(BIN)/python benchmarks/bench_workers.py

# One training by tfdist and by its peers, each in its own words: an hour, once their environments are there (6 GB).
equivalence: .venv/ready horovod .venv-torch/ready .venv-jax/ready .venv-tf-keras/ready
	$(BIN)/python benchmarks/equivalence/run.py

# Three nodes of this machine, to which a fault happens every minute; then torchrun's elastic training: 45 minutes.
chaos: .venv/ready .venv-torch/ready
	$(BIN)/python benchmarks/chaos/run.py

.venv/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,horovod]'
	touch $@

.venv-oldest/ready: setup.cfg pyproject.toml
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet 'tensorflow==2.18.*' 'keras==3.12.*' --editable '.[test]'
	touch $@

.venv-engines/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --upgrade pip
	.venv-engines/bin/python -m pip install --quiet --editable . 'ray[train]==2.60.*' 'keras-tuner[bayesian]==1.4.*' \
	  'keras-hub==0.32.*' 'optuna>=5,<6' 'mlflow==3.17.*' 'wandb==0.31.*'
	touch $@

# The peers of `make equivalence`.
.venv-torch/ready: Makefile
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet 'torch==2.14.1' 'accelerate==1.15.0' 'lightning==2.6.6' \
	  'deepspeed==0.19.8'
	touch $@

.venv-jax/ready: Makefile
	$(PYTHON) -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet 'keras==3.15.1' 'jax==0.10.2'
	touch $@

.venv-tf-keras/ready: Makefile
	$(PYTHON) -m venv .venv-tf-keras
	.venv-tf-keras/bin/python -m pip install --quiet 'tensorflow-cpu==2.16.2' 'tf_keras==2.16.0'
	touch $@

# TensorFlow for TPUs, as docs/strategies.md has it installed. It starts without a TPU, and knows its kernels.
.venv-tpu/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --upgrade pip
	.venv-tpu/bin/python -m pip install --quiet --editable .
	.venv-tpu/bin/python -m pip uninstall --quiet --yes tensorflow tensorflow-cpu tensorflow-tpu
	.venv-tpu/bin/python -m pip install --quiet tensorflow-tpu==2.20.0 libtpu==0.0.14
	touch $@

# Sphinx, and what tfdist's modules need to be read; TensorFlow and Keras are not installed.
.venv-site/ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

.venv-dist/ready: Makefile
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet 'build>=1.3,<2' 'twine>=6,<7' 'check-wheel-contents>=0.6,<1'
	touch $@

clean:
	rm -rf .venv .venv-against .venv-dist .venv-engines .venv-jax .venv-oldest .venv-site .venv-tf-keras .venv-torch \
	  .venv-tpu build dist docs/_build docs/_generated *.egg-info runs
