"""Quant configs: small TOML files that say which parameter set, layer precisions and mode a model shall serve with.

    model = "smollm2"
    precision = "int4"                # optional: the mode
    in_flight = "migrate"             # optional: or "finish"

    [params]                          # optional: a parameter set; relative paths start at the file's directory
    file = "calibrated-2026-11"
    sha256 = "9f86d0..."              # optional: of its manifest.json

    [[layers]]                        # optional: linear layers that INT4 computes in another precision
    match = "*.down_proj.weight"
    precision = "int8"

They come from the watched directory, from `dskctl apply` and over RPC, and mean the same everywhere.
"""

from __future__ import annotations
