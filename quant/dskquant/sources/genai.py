"""A directory of the model builder of onnxruntime-genai: genai_config.json, an ONNX decoder, the tokenizer.

Its weights are read back to floats, whatever they were quantized to. What no configuration tells, the epsilon of the
norms and the frequencies of the rotary positions, is taken from the graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, Shape
from dskquant.errors import SourceError
from dskquant.fields import Fields
from dskquant.rope import DEFAULT_THETA, divided_frequencies
from dskquant.sources.directory import SPECIAL_TOKENS, copy_tokenizer, read_json
from dskquant.sources.genai_graph import NORMS, GenaiGraph, Weight
from dskquant.sources.protocol import SourceTensor, refuse_differences

GENAI_CONFIG = "genai_config.json"
ATTENTION = ("GroupQueryAttention",)
NO_WINDOW = -1
LAYER = re.compile(r"(model\.layers\.\d+\.)self_attn\.(.+)")
PROJECTION = re.compile(r"\.([qkv])_proj\.")
JOINED = ".qkv_proj."
ANGLE_TOLERANCE = 1e-3
"""Radians at the last position, up to which frequencies are those of a round base."""

Float64 = NDArray[np.float64]


class GenaiSource:
    """Raises SourceError, naming the file, for anything in the directory that cannot be used."""

    kind = "onnxruntime-genai"

    def __init__(self, directory: Path) -> None:
        self.path = directory
        model = _object(read_json(directory / GENAI_CONFIG), "model", directory)
        self._graph = GenaiGraph(directory / _file_name(_object(model, "decoder", directory), directory))
        self.config: dict[str, Any] = self._read_config(model)
        self.decoder: DecoderConfig = read_decoder(self.config, str(directory / GENAI_CONFIG))
        self._check_attention()

    @property
    def generation_config(self) -> dict[str, Any]:
        tokens = Fields(self.config, str(self.path / GENAI_CONFIG))
        # The builder adds the tokens of the tokenizer, which may lie beyond what the model can make.
        made = {
            key: [token for token in tokens.token_ids(key) if token < self.decoder.vocab_size] for key in SPECIAL_TOKENS
        }
        return {key: ids if len(ids) > 1 else ids[0] for key, ids in made.items() if ids}

    def write_tokenizer(self, store: Path) -> None:
        copy_tokenizer(self.path, store)

    def check_tensors(self, expected: Mapping[str, Shape]) -> None:
        found = {name: self._find(name) for name in expected}
        present = {name: weight.shape for name, weight in found.items() if weight is not None}
        used = {key for name in expected for key in self._keys(name)}
        others = {name: weight.shape for name, weight in self._graph.weights.items() if name not in used}
        refuse_differences(str(self._graph.path), present | others, expected, {LM_HEAD})

    def tensor(self, name: str) -> SourceTensor:
        weight = self._find(name)
        if weight is None:
            raise SourceError(f"{self._graph.path}: {name} is missing")
        origin = f"{self._graph.path}: {name}"
        return SourceTensor(origin, weight.shape, weight.dtype, weight.dtype, weight.rows, None)

    def _read_config(self, model: dict[str, Any]) -> dict[str, Any]:
        """As the config.json of the model that the builder was given, where that can be told."""
        sizes = _object(model, "decoder", self.path)
        weights, window = self._graph.weights, int(self._graph.setting(ATTENTION, "local_window_size", NO_WINDOW))
        up = weights.get("model.layers.0.mlp.up_proj.weight")
        if up is None:
            raise SourceError(f"{self._graph.path}: model.layers.0.mlp.up_proj is missing")
        has_bias = any(f"model.layers.0.attn.{one}_proj.bias" in weights for one in ("qkv", "q", "o"))
        fields = Fields(sizes, f"{self.path / GENAI_CONFIG}: model.decoder")
        return {
            "model_type": model.get("type"),
            "hidden_size": sizes.get("hidden_size"),
            "intermediate_size": up.shape[0],
            "num_hidden_layers": sizes.get("num_hidden_layers"),
            "num_attention_heads": sizes.get("num_attention_heads"),
            "num_key_value_heads": sizes.get("num_key_value_heads"),
            "head_dim": sizes.get("head_size"),
            "vocab_size": model.get("vocab_size"),
            "max_position_embeddings": model.get("context_length"),
            "rms_norm_eps": float(f"{self._graph.setting(NORMS, 'epsilon', 1e-5):.7g}"),  # a float32 in the file
            "hidden_act": "silu",
            "attention_bias": has_bias,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in weights,
            "sliding_window": None if window == NO_WINDOW else window,
            "use_sliding_window": window != NO_WINDOW,
            "tie_word_embeddings": EMBEDDING not in weights,  # tokens are looked up in lm_head then
            "rope_parameters": self._rope_parameters(fields.count("head_size")),
            **{key: model[key] for key in SPECIAL_TOKENS if model.get(key) is not None},
        }

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        cosines, sines = (self._graph.array(name).astype(np.float64) for name in ("cos_cache", "sin_cache"))
        if cosines.shape != sines.shape or cosines.shape[1:] != (head_dim // 2,) or len(cosines) < 2:
            raise SourceError(
                f"{self._graph.path}: cos_cache {list(cosines.shape)}, sin_cache {list(sines.shape)}: "
                f"[positions, {head_dim // 2}] is needed; angles that depend on the length are not supported"
            )
        turns = sines.any(axis=0) & (cosines[0] > 0)  # from an angle of 0 on
        if not (turns.all() and np.isfinite([cosines, sines]).all()):
            raise SourceError(
                f"{self._graph.path}: cos_cache and sin_cache are no cosines and sines of rotary positions"
            )
        return rope_parameters(cosines, sines)

    def _check_attention(self) -> None:
        wanted = {"do_rotary": 1.0, "rotary_interleaved": 0.0, "softcap": 0.0, "scale": self.decoder.head_dim**-0.5}
        for attribute, value in wanted.items():
            found = self._graph.setting(ATTENTION, attribute, value if attribute == "scale" else 0.0)
            if not np.isclose(found, value, rtol=1e-5):
                raise SourceError(f"{self._graph.path}: {attribute} of attention is {found:g}; supported: {value:g}")

    def _find(self, name: str) -> Weight | None:
        key = next((key for key in self._keys(name) if key in self._graph.weights), None)
        if key is None:
            return None
        weight = self._graph.weights[key]
        return self._part_of(weight, name) if JOINED in key else weight

    def _part_of(self, joined: Weight, name: str) -> Weight:
        """The rows of projection `name`; all where they are not as many as expected, for the caller to tell."""
        queries, keys = (heads * self.decoder.head_dim for heads in (self.decoder.num_heads, self.decoder.num_kv_heads))
        if joined.shape[0] != queries + 2 * keys:
            return joined
        places = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}
        return joined.part(*places[PROJECTION.findall(name)[0]])

    def _keys(self, name: str) -> tuple[str, ...]:
        """What the graph may call the weight with the Hugging Face name `name`."""
        if name == EMBEDDING:
            return (EMBEDDING, LM_HEAD)
        if name == FINAL_NORM:
            return (f"model.layers.{self.decoder.num_layers}.final_norm_layernorm.weight",)
        layer = LAYER.fullmatch(name)
        if layer is None:
            return (name,)
        key = "".join((layer[1], "attn.", layer[2]))
        if PROJECTION.search(name):
            return (key, PROJECTION.sub(JOINED, key))
        return (key.replace("_norm.", "_norm.layernorm."),)


def rope_parameters(cosines: Float64, sines: Float64) -> dict[str, Any]:
    """What turns positions into these angles [positions, pairs], in the terms of a Hugging Face configuration.

    A base where one explains them; else one divisor for each pair.
    """
    frequencies = _frequencies(np.arctan2(sines, cosines))
    pairs, factor = len(frequencies), float(np.hypot(cosines[0], sines[0]).mean())
    exponents = np.arange(pairs) / pairs
    base = float(np.round(frequencies[-1] ** (-1 / exponents[-1]))) if pairs > 1 else DEFAULT_THETA
    off = np.abs(frequencies - base**-exponents).max() * len(cosines)
    if abs(factor - 1) < ANGLE_TOLERANCE and off < ANGLE_TOLERANCE:
        return {"rope_type": "default", "rope_theta": base}
    divisors = (1 / (frequencies * DEFAULT_THETA**exponents)).tolist()
    return divided_frequencies(DEFAULT_THETA, divisors, factor, len(cosines))


def _frequencies(angles: Float64) -> Float64:
    """Radians a token of each pair, from their angles [positions, pairs] modulo a turn.

    Position 1 tells them roughly, as none is above 1; each doubling of the position halves the error that is left.
    """
    estimate: Float64 = angles[1].copy()
    position = 2
    while position < len(angles):
        error = angles[position] - estimate * position
        estimate += (error - 2 * np.pi * np.round(error / (2 * np.pi))) / position
        position *= 2
    return estimate


def _object(values: dict[str, Any], key: str, directory: Path) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise SourceError(f"{directory / GENAI_CONFIG}: {key} must be an object; only decoders of text are supported")
    return found


def _file_name(decoder: dict[str, Any], directory: Path) -> str:
    name = decoder.get("filename")
    if not isinstance(name, str) or Path(name).name != name:
        raise SourceError(f"{directory / GENAI_CONFIG}: model.decoder.filename: {name!r} is not a file beside it")
    return name
