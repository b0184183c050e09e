"""`dskquant convert SOURCE -o STORE`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dskquant.commands.options import (
    add_data_options,
    add_int8_options,
    data_options,
    finite,
    is_plain_source,
    kept_layers,
    modes,
    print_modes,
    refuse_options,
)
from dskquant.commands.progress import progress_bar
from dskquant.convert import ConvertOptions, convert
from dskquant.floats import NUMPY_FLOATS
from dskquant.plain.convert import LEAST_SQNR_DB, PlainOptions, convert_plain
from dskquant.scheme import GROUP_SIZES, Scheme
from dskquant.store import StoreManifest

ROWS = 64

DESCRIPTION = """\
Converts a model into a model store: a standard stateful OpenVINO IR in the dtype of the
source, the tokenizer, and a default parameter set for INT4 and INT8. Other graphs
(classifiers, encoders, detectors) become a store of the precision modes that can be made of
them, each measured against FP32 on inputs of yours.

SOURCE is one of
  a GGUF file                  every type that the gguf package can dequantize
  a Hugging Face directory     config.json and safetensors, sharded or not
  an OpenVINO IR directory     as `optimum-cli export openvino --weight-format fp16` writes it
  an onnxruntime-genai directory   as its model builder writes it: genai_config.json, model.onnx
  an ONNX file, an IR's .xml   any graph of named tensors, with --data INPUTS.npz
Architectures: Llama, Mistral, Qwen2, Qwen3. Nothing is downloaded, no pickle is read, no code of the
model is run. STORE appears complete or not at all."""

EXAMPLES = """\
examples:
  dskquant convert SmolLM2-135M-Instruct.Q4_1.gguf -o models/smollm2
  dskquant convert ~/models/Qwen2.5-0.5B-Instruct -o models/qwen --group-size 32
  dskquant convert export/ -o models/mistral --model-id mistral-7b --json
  dskquant convert classifier.onnx -o models/classifier --data inputs.npz
  dskquant convert detector.onnx -o models/detector --data inputs.npz --modes fp16,int8 --keep-float 'Conv_0,head/*'

exit status: 0 done, 1 refused (one line on stderr says why), 2 wrong usage"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "convert",
        help="make a store from a GGUF file, a Hugging Face or an OpenVINO directory, or an ONNX graph",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("-o", "--output", metavar="STORE", type=Path, required=True, help="directory to make")
    parser.add_argument("--model-id", metavar="ID", help="name in manifests (default: the name of SOURCE)")
    parser.add_argument("--force", action="store_true", help="replace STORE if it is a model store already")
    parser.add_argument("--json", action="store_true", help="print the manifest of the store as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    language = _add_language_options(parser.add_argument_group("of language models"))
    plain = _add_plain_options(parser.add_argument_group("of other graphs"))
    parser.set_defaults(run=run, language_options=language, plain_options=plain)


def _add_language_options(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [
        group.add_argument(
            "--dtype",
            choices=list(NUMPY_FLOATS),
            help="of the stored weights (default: the source's; f32 for quantized GGUF)",
        ),
        group.add_argument(
            "--group-size",
            type=int,
            choices=GROUP_SIZES,
            default=Scheme().group_size,
            help="weights that share a scale, 0: a whole channel (default: %(default)s)",
        ),
        group.add_argument("--symmetric", action="store_true", help="quantize without zero-points"),
        group.add_argument(
            "--int8-layers",
            action="append",
            default=[],
            metavar="PATTERN",
            help="linear layers that INT4 too shall compute with both planes, such as '*.down_proj.weight'; repeatable",
        ),
        group.add_argument(
            "--int8-plane",
            action="store_true",
            help='add a plane of 8-bit codes, for a daemon that holds INT8 in a copy of its own (weights = "separate")',
        ),
        group.add_argument(
            "--no-golden", action="store_true", help="do not run the FP32 reference on the golden prompts"
        ),
    ]


def _add_plain_options(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [
        *add_data_options(group, ROWS),
        group.add_argument("--modes", type=modes, help="comma-separated (default: all that can be made)"),
        *add_int8_options(group),
        group.add_argument(
            "--keep-float",
            metavar="NODE,...",
            action="append",
            default=[],
            help="layers that INT8 and INT4 leave in float, by name or pattern; `recommend` finds them; repeatable",
        ),
        group.add_argument(
            "--min-sqnr",
            metavar="DB",
            type=finite,
            default=LEAST_SQNR_DB,
            help="modes whose signal is less above their noise are not made (default: %(default)s)",
        ),
    ]


def run(options: argparse.Namespace) -> None:
    """Raises QuantError or OSError when the model cannot be converted."""
    if is_plain_source(options.source):
        refuse_options(options, options.language_options, "graphs that are no language models")
        notes = _convert_plain(options)
    else:
        refuse_options(options, options.plain_options, "language models")
        notes = _convert_language_model(options)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _convert_plain(options: argparse.Namespace) -> Sequence[str]:
    settings = PlainOptions(
        data_options(options),
        modes=options.modes,
        int8=options.int8,
        block_size=options.block_size,
        keep_float=kept_layers(options),
        min_sqnr_db=options.min_sqnr,
        name=options.model_id,
        replace=options.force,
    )
    with progress_bar(options.quiet) as progress:
        conversion = convert_plain(options.source, options.output, settings, progress)
    if options.json:
        print(json.dumps({"store": str(options.output)} | conversion.manifest.as_json(), indent=2))
    elif not options.quiet:
        print_modes(conversion.manifest)
    return conversion.notes


def _convert_language_model(options: argparse.Namespace) -> Sequence[str]:
    settings = ConvertOptions(
        dtype=options.dtype,
        model_id=options.model_id,
        scheme=Scheme(options.group_size, options.symmetric, tuple(options.int8_layers), options.int8_plane),
        golden=not options.no_golden,
        replace=options.force,
    )
    with progress_bar(options.quiet) as progress:
        conversion = convert(options.source, options.output, settings, progress)
    if options.json:
        print(json.dumps({"store": str(options.output)} | asdict(conversion.manifest), indent=2))
    elif not options.quiet:
        print(_summary(options.output, conversion.manifest))
    return conversion.notes


def _summary(store: Path, manifest: StoreManifest) -> str:
    return (
        f"{store}: {manifest.model_id}, {manifest.architecture}, {manifest.parameters / 1e6:.1f}M weights in "
        f"{manifest.dtype}, {manifest.num_layers} layers, context of {manifest.context_length} tokens"
    )
