"""Texts of quant configs that must be refused: what each is, and how it is told what is wrong with it.

The last column is the field as the details of an RPC name it.
"""

from __future__ import annotations

from dskd.quant_config import MAX_BYTES, MAX_LAYER_RULES

MODEL = "tiny"
"""It serves."""

RULE = '[[layers]]\nmatch = "*"\nprecision = "int8"\n'
FOR_MODEL = f'model = "{MODEL}"\n'

BAD_CONFIGS = {
    # no TOML, or not yet
    "empty": ("", "model: is missing", "model"),
    "a comment alone": ("# to do\n", "model: is missing", "model"),
    "half a key": (f"{FOR_MODEL}prec", "Expected '=' after a key", "config"),
    "half a text": (f'{FOR_MODEL}precision = "int', r"Unterminated string|Illegal character|Expected", "config"),
    "half a table": (f"{FOR_MODEL}[params", r"Expected '\]'", "config"),
    "half a list of tables": (f"{FOR_MODEL}{RULE}[[layers]", r"Expected '\]\]'", "config"),
    "JSON": ('{"model": "tiny"}', "Invalid statement", "config"),
    "YAML": ("model: tiny\n", "Expected '=' after a key", "config"),
    "a byte order mark": (f"\ufeff{FOR_MODEL}", "Invalid statement", "config"),
    "a NUL": (f"{FOR_MODEL}\0", r"Invalid statement|Illegal character|Found invalid character", "config"),
    "a control character": (f"{FOR_MODEL}# \x07", "Illegal character|Found invalid character", "config"),
    "thousands of brackets": ("a = " + "[" * 100_000, "nested", "config"),
    "a key twice": (FOR_MODEL * 2, "Cannot overwrite a value", "config"),
    "a table twice": (f'{FOR_MODEL}[params]\nfile = "x"\n[params]\n', "Cannot declare .* twice", "config"),
    "a number of 5,000 digits": (f"{FOR_MODEL}precision = {'9' * 5_000}", "", "config"),
    # keys
    "a misspelled key": (
        f'{FOR_MODEL}precison = "int8"\n', r"precison: unknown key; did you mean 'precision'\?", "precison"),
    "a misspelled key of a set": (
        f'{FOR_MODEL}[params]\nfile = "x"\nsha265 = ""\n', r"params\.sha265: unknown key; did you mean 'sha256'\?",
        "params.sha265"),
    "a misspelled key of a rule": (
        f'{FOR_MODEL}{RULE}mach = "*"\n', r"layers\[0\]\.mach: unknown key; did you mean 'match'\?", "layers[0].mach"),
    "a table of another file": (
        f"{FOR_MODEL}[scheduler]\n", "scheduler: unknown key; known: in_flight, layers, model",
        "scheduler"),
    "a key of half a megabyte": ("k" * 500_000 + " = 1\n", "k{50}", "model"),
    "no file of the set": (f"{FOR_MODEL}[params]\n", r"params\.file: is missing", "params.file"),
    "no pattern of a rule": (
        f'{FOR_MODEL}[[layers]]\nprecision = "int8"\n', r"layers\[0\]\.match: is missing", "layers[0].match"),
    # types
    "a model that is a number": ("model = 5\n", "model = 5: allowed: a string", "model"),
    "a model without a name": ('model = ""\n', "model: the name of a model is needed", "model"),
    "a precision that is a number": (f"{FOR_MODEL}precision = 8\n", 'precision = 8: allowed: "int4"', "precision"),
    "a precision that is a list": (f'{FOR_MODEL}precision = ["int8"]\n', "precision = .*allowed", "precision"),
    "a precision that is a date": (f"{FOR_MODEL}precision = 1979-05-27\n", "precision = 1979-05-27: all", "precision"),
    "a precision that is infinite": (f"{FOR_MODEL}precision = inf\n", "precision = inf: allowed", "precision"),
    "a set that is a text": (f'{FOR_MODEL}params = "x"\n', 'params = "x": allowed: a table', "params"),
    "a set that is a number": (f"{FOR_MODEL}[params]\nfile = 1\n", r"params\.file = 1: allowed: a path", "params.file"),
    "a set without a name": (f'{FOR_MODEL}[params]\nfile = ""\n', r'params\.file = "": allowed: a path', "params.file"),
    "rules that are a table": (f'{FOR_MODEL}[layers]\nmatch = "*"\n', "layers = .*allowed: a list", "layers"),
    "rules that are texts": (f'{FOR_MODEL}layers = ["*"]\n', r'layers\[0\] = "\*": allowed: a table', "layers[0]"),
    # values
    "an unknown precision": (
        f'{FOR_MODEL}precision = "int3"\n', 'precision = "int3": allowed: "int4", "int8", "fp16", "fp32"', "precision"),
    "a precision that layers cannot have": (
        f'{FOR_MODEL}[[layers]]\nmatch = "*"\nprecision = "fp16"\n',
        r'layers\[0\]\.precision = "fp16": allowed: "int4", "int8"', "layers[0].precision"),
    "an unknown way in flight": (f'{FOR_MODEL}in_flight = "later"\n', 'in_flight = "later": allowed', "in_flight"),
    "half a digest": (
        f'{FOR_MODEL}[params]\nfile = "x"\nsha256 = "{"a" * 63}"\n', r"params\.sha256: allowed: 64 hexadecimal digits",
        "params.sha256"),
    "a path with a NUL": (
        f'{FOR_MODEL}[params]\nfile = "a\\u0000b"\n', r"params\.file: a path has no NUL", "params.file"),
    "the home of nobody": (
        f'{FOR_MODEL}[params]\nfile = "~nobody-of-that-name/x"\n', r"params\.file = .*home", "params.file"),
    # sizes
    "one rule too many": (
        FOR_MODEL + RULE * (MAX_LAYER_RULES + 1), f"layers: {MAX_LAYER_RULES + 1} rules; at most {MAX_LAYER_RULES}",
        "layers"),
    "a byte too many": ("#" * (MAX_BYTES + 1), r"512\.0 KiB", "config"),
}  # fmt: skip
