"""One client's model as files that need none of this code: safetensors, ``torch.export``, ONNX."""

import contextlib
import hashlib
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, replacing, write_json
from benchmark.predict.client_model import ClientModel
from benchmark.predict.files import decoding_of
from benchmark.predict.graph import ClientGraph
from benchmark.run.phases import quiet
from benchmark.shipped import version

if TYPE_CHECKING:
    from torch.export import ExportedProgram

GRAPH, TRAINED, ABOUT, ONNX = "model.pt2", "model.safetensors", "model.json", "model.onnx"
#: How each is loaded in Python.
LOAD = {
    TRAINED: f"safetensors.torch.load_file('{TRAINED}'): what was trained, without the frozen backbone",
    GRAPH: f"torch.export.load('{GRAPH}').module()(images)",
    ONNX: f"onnxruntime.InferenceSession('{ONNX}').run(None, {{'images': images}})",
}
#: How far logits of the graph may be from the client's, of a made-up batch.
CLOSE = 1e-5
#: What a user of a graph with draws must know.
DRAWS = (
    "a batch has the draws of the first step of the run's evaluation, row i those of the client's test image i (modulo "
    "{}); give images one by one for answers that do not depend on their place"
)
#: Packages that ONNX files are written with.
NEEDED = ("onnx", "onnxscript")


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse to export into a folder that holds something.

    Raises:
        ConfigurationError: it does, and nothing is to be written over; or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder; give one to write the model's files into")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty; give another folder, or --overwrite")


def check_onnx() -> None:
    """Refuse to write ONNX without the packages for it.

    Raises:
        ConfigurationError: one is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise ConfigurationError(
            f"writing ONNX needs {' and '.join(NEEDED)}: pip install 'federated-prompt-benchmark[onnx]'"
        )


def export(model: ClientModel, folder: Path, about: dict[str, Any], onnx: bool = False) -> list[Path]:
    """Write a client's model into a folder. Of an older export there all stays, or else ``model.json`` is away.

    The graph computes in the precision of the parameters, also of a run whose steps are under autocast.

    Args:
        model: the client's.
        folder: made where it is missing.
        about: further entries of ``model.json``, such as the run.
        onnx: also write ``model.onnx``.

    Returns:
        What was written.

    Raises:
        ConfigurationError: the method cannot be written as a graph, or the graph gives other logits; a file cannot be
            written.
    """
    from safetensors.torch import save

    model = model.without_autocast()
    program = _program(model)
    _check(program, model)
    described = _described(model) | about
    trained = {name: value.to("cpu", copy=True).contiguous() for name, value in model.trained().items()}
    contents: dict[str, Callable[[BinaryIO], Any]] = {
        TRAINED: lambda stream: stream.write(save(trained)),
        GRAPH: lambda stream: torch.export.save(program, stream),
    }
    if onnx:
        content = _onnx(program, described)
        contents[ONNX] = lambda stream: stream.write(content)
    make_folder(folder)
    made = {name: folder / name for name in contents}
    with contextlib.ExitStack() as written:
        for name, write in contents.items():
            write(written.enter_context(replacing(made[name])))
        # All are whole beside those of an older export, which are replaced from here on.
        for name in (ABOUT, ONNX):
            (folder / name).unlink(missing_ok=True)
    files = {name: {"sha256": _sha256(path), "bytes": path.stat().st_size} for name, path in made.items()}
    write_json(folder / ABOUT, described | {"how_to_load": {name: LOAD[name] for name in made}, "files": files})
    return [*made.values(), folder / ABOUT]


def _program(model: ClientModel) -> "ExportedProgram":
    """Trace the client's model for batches of any size."""
    example = torch.zeros(2, 3, *model.facts.image_size, dtype=torch.uint8, device=model.method.device)
    batch = {0: torch.export.Dim("batch")}
    try:
        with model.working(), quiet():
            graph = ClientGraph(model)
            graph(example)  # what is made once and kept must be no tensor of a trace
            return torch.export.export(graph, (example,), dynamic_shapes=(batch,))
    except ConfigurationError:
        raise
    except Exception as error:  # of whatever a method's own code meets while it is traced
        said = next(iter(str(error).strip().splitlines()), "")[:300]
        raise ConfigurationError(
            f"{type(model.method).__name__} cannot be exported: torch.export does not follow its code "
            f"({type(error).__name__}: {said}); `benchmark predict` uses it as it is"
        ) from error


def _check(program: "ExportedProgram", model: ClientModel) -> None:
    """Refuse a graph whose logits are not the client's."""
    generator = torch.Generator().manual_seed(0)
    graph = program.module()
    for count in {1, min(3, model.step)}:
        shape = (count, 3, *model.facts.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        expected = model.logits(images)
        with model.working():
            away = (graph(images.to(model.method.device)).cpu() - expected).abs().max().item()
        if not away <= CLOSE * max(1.0, expected.abs().max().item()):
            raise ConfigurationError(
                f"{type(model.method).__name__} cannot be exported: as a graph its logits differ by {away:.2g}; "
                "`benchmark predict` uses it as it is"
            )


def _onnx(program: "ExportedProgram", described: dict[str, Any]) -> bytes:
    """Write the graph as ONNX, with what is known of the model as metadata: each entry's value is JSON."""
    check_onnx()
    try:
        with quiet():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=["logits"]
            )
        proto = made.model_proto  # type: ignore[union-attr]
        for name, value in described.items():
            proto.metadata_props.add(key=name, value=json.dumps(value))
        content: bytes = proto.SerializeToString()
    except Exception as error:  # of whatever operation ONNX has no word for
        said = next(iter(str(error).strip().splitlines()), "")[:300]
        raise ConfigurationError(
            f"the model cannot be written as ONNX ({type(error).__name__}: {said}); leave --onnx, {GRAPH} holds it"
        ) from error
    return content


def _described(model: ClientModel) -> dict[str, Any]:
    method, (height, width) = model.method, model.facts.image_size
    from_files = asdict(decoding_of(model.facts)) if model.facts.decoding or height == width else None
    transform = method.simulation.images.pool.transform
    backbone = next((part for part in (getattr(method, "backbone", None), getattr(method, "clip", None)) if part), None)
    return {
        "method": type(method).__name__,
        "client": model.name,
        "client_number": model.client,
        "point": model.point,
        "rounds": method.server.finished_rounds,
        "class_names": list(model.class_names),
        "input": {
            "layout": "NCHW",
            "type": "uint8",
            "size": [3, height, width],
            "from_files": from_files,
            "inside": {
                "size": getattr(transform, "size", None) or height,
                "mean_and_std": getattr(transform, "statistics", None),
            },
        },
        "output": "logits [N, classes]; softmax gives probabilities",
        "precision": {
            "graph": str(method.simulation.parameters.first.dtype).removeprefix("torch."),
            "run": str(method.trainer.precision),
        },
        "backbone": {"class": type(backbone).__name__, "frozen_hash": method.frozen_hash},
        "draws": DRAWS.format(model.step) if model.draws else None,
        "versions": {
            "federated-prompt-benchmark": version(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "timm", "safetensors")},
        },
        "written": time.strftime("%Y-%m-%d"),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
