"""The noise of every mode on real text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from tests.bench.report import Section

from dskquant.comparison import compare_modes, encode_text
from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions
from dskquant.modes import LADDER

TOKENS = 4096


def measure(store: Path) -> Section:
    """SmolLM2 on the Python language reference, which comes with every Python."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = encode_text(store, text, TOKENS)
    rows = []
    for group, title in ((128, "dynamic 8-bit"), (0, "float")):
        options = CompileOptions(activation_group=group)
        qualities = compare_modes(store, load_engine("openvino"), tokens, LADDER, options, progress=lambda *_: None)
        for quality in qualities:
            cells = [quality.mode.value, title, f"{quality.perplexity:.2f}", f"{quality.mean_kl:.5f}"]
            rows.append([*cells, f"{quality.p99_kl:.4f}", f"{quality.agreement:.1%}"])
    return Section(
        "Noise",
        f"SmolLM2-135M-Instruct (Q4_1 source), group 64, {TOKENS} tokens of the Python language "
        f"reference in windows of "
        "512, 8-bit KV cache, against FP32. Activations are those of INT4 and INT8.",
        ["mode", "activations", "perplexity", "mean KL", "p99 KL", "top-1 same"],
        rows,
    )
