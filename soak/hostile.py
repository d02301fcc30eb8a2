"""What the readers are given: proper inputs with something changed."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from patrickstar.checkpoint import TensorSource, decode, open_checkpoint, write_checkpoint
from patrickstar.checkpoint.deepspeed import import_checkpoint
from patrickstar.checkpoint.header import parse_header
from patrickstar.checkpoint.manifest import NAME, parse_manifest
from patrickstar.config import load_config
from patrickstar.config.keys import TABLE
from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.memory.sizes import parse_bytes
from patrickstar.report.run import RunFolderError
from soak import reports

Inputs = st.SearchStrategy[Any]

STORED = Path(__file__).resolve().parent.parent / "tests" / "checkpoint" / "deepspeed"
KINDS = ("zero1-fp32", "zero2-bf16", "zero3-bf16")


@dataclass(frozen=True, eq=False)
class Reader:
    """Something that reads.

    Attributes:
        inputs: what it is given.
        errors: those it documents.
        share: of all inputs, in parts.
    """

    name: str
    read: Callable[[Any], Any]
    inputs: Inputs
    errors: tuple[type[Exception], ...]
    share: int


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "fp32", "bf16", "cpu", "nvme", "AdamW", "1GiB", "F32", "BF16", "$map"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=6)
            | st.sampled_from(["$tuple", "$map", "$bytes", "$tensor", "$float", "$counter"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[Any, Any]:
    """Values of any kind under real keys, and a few keys that are not."""
    config: dict[Any, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(TABLE)), max_size=5)):
        here: Any = config
        *parents, last = path.split(".")
        for name in parents:
            here = here.setdefault(name, {}) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here[last] = draw(VALUES)
    if draw(st.integers(0, 3)) == 0:
        config.update(draw(st.dictionaries(st.text(max_size=8), VALUES, max_size=2)))
    return config


@st.composite
def changed_json(draw: st.DrawFn, good: Any) -> Any:
    """`good` with one value somewhere in it replaced, removed or added."""
    value = json.loads(json.dumps(good))
    here = value
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return draw(VALUES)
        key = draw(st.sampled_from(keys))
        deeper = isinstance(here[key], dict | list) and here[key] and draw(st.integers(0, 3))
        if deeper:
            here = here[key]
            continue
        act = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if act == "remove":
            del here[key]
        elif act == "add" and isinstance(here, dict):
            here[draw(st.text(max_size=8))] = draw(VALUES)
        else:
            here[key] = draw(VALUES)
        return value


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with some bytes replaced, cut out, doubled or cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(0, 24))
        act = draw(st.sampled_from(["replace", "flip", "cut", "double", "end"]))
        if act == "replace":
            data[start : start + length] = draw(st.binary(max_size=24))
        elif act == "flip" and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif act == "cut":
            del data[start : start + length]
        elif act == "double":
            data[start:start] = data[start : start + length]
        else:
            del data[start:]
    return bytes(data)


def header_of(entries: Any) -> bytes:
    return json.dumps(entries).encode()


GOOD_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}
GOOD_PLAIN = {
    "lr": 1e-3,
    "betas": {"$tuple": [0.9, 0.95]},
    "seen": {"$counter": [[3, 2]]},
    "map": {"$map": [[1, {"$float": "inf"}]]},
    "state": {"$tensor": ["U8", [3], "AAEC"]},
    "raw": {"$bytes": "AAEC"},
}


def readers(folder: Path) -> list[Reader]:
    """All that there are; `folder` is for their files."""
    checkpoint = folder / "checkpoint"
    sources = [TensorSource.of("a", torch.ones(3)), TensorSource.of("b.weight", torch.eye(2))]
    state = {"counters": {"global_steps": 3}, "client": GOOD_PLAIN, "rng": []}
    write_checkpoint(checkpoint, "it", sources, sources[:1], state)
    manifest = json.loads((checkpoint / "it" / NAME).read_text())
    deepspeed, run = _deepspeed_folder(folder), reports.recorded(folder)
    error = (CheckpointError,)
    return [
        Reader("config", load_config, configs(), (ConfigError,), 20),
        Reader("config file", _config_file(folder), _texts(), (ConfigError,), 4),
        Reader("sizes", parse_bytes, st.text(max_size=12) | SCALARS, (ConfigError,), 6),
        Reader("safetensors header", _read_header, _headers(), error, 25),
        Reader("state.json", lambda d: parse_manifest(d, "it"), _manifests(manifest), error, 15),
        Reader("values in state.json", _decode, changed_json(GOOD_PLAIN) | VALUES, error, 15),
        Reader("checkpoint folder", _whole(checkpoint), _files(checkpoint), error, 4),
        Reader(
            "DeepSpeed checkpoint", _deepspeed(deepspeed, folder), _pickles(deepspeed), error, 11
        ),
        Reader("run folder and its page", reports.reading(run), _runs(run), (RunFolderError,), 6),
    ]


def _decode(value: Any) -> Any:
    return decode(value, "client_state")


def _read_header(given: tuple[bytes, int]) -> Any:
    return parse_header(given[0], given[1], "file")


def _runs(run: Path) -> Inputs:
    found: Inputs = reports.inputs(run, changed_bytes)
    return found


def _headers() -> Inputs:
    good = header_of(GOOD_HEADER)
    texts = changed_json(GOOD_HEADER).map(header_of) | changed_bytes(good) | st.binary(max_size=40)
    return st.tuples(texts, st.sampled_from([0, 39, 40, 41, 1 << 50]))


def _texts() -> Inputs:
    good = {"bf16": {"enabled": True}, "patrickstar": {"memory": {"host": "1GiB"}}}
    data = json.dumps(good).encode()
    return changed_bytes(data) | changed_json(good).map(header_of) | st.binary(max_size=40)


def _config_file(folder: Path) -> Callable[[bytes], Any]:
    path = folder / "config.json"

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        return load_config(path)

    return read


def _manifests(good: dict[str, Any]) -> Inputs:
    """With a proper checksum, so that what is inside is looked at."""

    def signed(body: Any) -> bytes:
        if isinstance(body, dict):
            body.pop("sha256", None)
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps(body).encode()

    plain = json.dumps(good).encode()
    return changed_json(good).map(signed) | changed_bytes(plain) | st.binary(max_size=40)


def _files(checkpoint: Path) -> Inputs:
    """A file of the checkpoint, and other bytes for it."""
    names = sorted(path.name for path in (checkpoint / "it").iterdir())
    return st.sampled_from(names).flatmap(
        lambda name: st.tuples(
            st.just(name),
            changed_bytes((checkpoint / "it" / name).read_bytes())
            | st.binary(max_size=64)
            | st.just(struct.pack("<Q", 1 << 40)),
        )
    )


def _whole(checkpoint: Path) -> Callable[[tuple[str, bytes]], Any]:
    originals = {path.name: path.read_bytes() for path in (checkpoint / "it").iterdir()}

    def read(given: tuple[str, bytes]) -> None:
        name, data = given
        path = checkpoint / "it" / name
        path.write_bytes(data)
        try:
            with open_checkpoint(checkpoint, "it") as opened:
                if data != originals[name]:
                    # Other bytes with the same meaning are fine in state.json alone.
                    assert name == NAME, f"{name} was changed and nobody noticed"
                for tensor in opened.weights.names():
                    opened.weights.read(tensor)
        finally:
            path.write_bytes(originals[name])

    return read


def _deepspeed_folder(folder: Path) -> Path:
    """Small checkpoints that DeepSpeed wrote, of several stages; copies that may be changed."""
    made = folder / "deepspeed"
    for kind in KINDS:
        shutil.copytree(STORED / kind / "it", made / kind / "it")
    return made


def _rezipped(original: bytes, data: bytes) -> bytes:
    """A file of `torch.save` with another pickle in it, so that the pickle itself is read."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(original)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("/data.pkl") else old.read(name))
    return out.getvalue()


def _pickle_of(original: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


def _pickles(made: Path) -> Inputs:
    """A file of a checkpoint, and other bytes for it."""
    files = {str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*.pt")}

    def changed(name: str) -> Inputs:
        inside = changed_bytes(_pickle_of(files[name])).map(lambda d: _rezipped(files[name], d))
        return st.tuples(st.just(name), inside | changed_bytes(files[name]))

    return st.sampled_from(sorted(files)).flatmap(changed)


def _deepspeed(made: Path, folder: Path) -> Callable[[tuple[str, bytes]], Any]:
    originals = {str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*.pt")}
    target = folder / "imported"

    def read(given: tuple[str, bytes]) -> None:
        name, data = given
        path = made / name
        path.write_bytes(data)
        shutil.rmtree(target, ignore_errors=True)
        try:
            import_checkpoint(made / Path(name).parts[0], target, "it")
        finally:
            path.write_bytes(originals[name])

    return read
