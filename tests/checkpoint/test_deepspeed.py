"""DeepSpeed's checkpoints are taken over to the bit, and nothing in them is run.

The folders in `tests/checkpoint/deepspeed` were written by DeepSpeed 0.19.8 itself, with
`make_deepspeed_checkpoints`; `expected.safetensors` is what DeepSpeed says it has.
"""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patrickstar.checkpoint import deepspeed, open_checkpoint
from patrickstar.checkpoint.deepspeed import import_checkpoint
from patrickstar.checkpoint.pickled import PickledTensor, TorchFile, check_opcodes
from patrickstar.checkpoint.zero_layout import ranges_of_flat_groups, ranges_of_parts
from patrickstar.errors import CheckpointError

from .make_deepspeed_checkpoints import KINDS as MADE

STORED = Path(__file__).parent / "deepspeed"
KINDS = sorted(path.name for path in STORED.iterdir())


def test_all_kinds_are_there() -> None:
    assert sorted(MADE) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_masters_and_moments_are_those_that_deepspeed_has(kind: str, tmp_path: Path) -> None:
    path, lost = import_checkpoint(STORED / kind, tmp_path)
    assert path == tmp_path / "it" and lost == []
    expected = safetensors.torch.load_file(STORED / kind / "expected.safetensors")
    with open_checkpoint(tmp_path) as found:
        assert set(found.optimizer.names()) == set(expected)
        for name, values in expected.items():
            assert torch.equal(found.optimizer.read(name), values), name
        dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
        for name in ("embed.weight", "norm.weight", "scale"):
            master = found.optimizer.read(f"master/{name}")
            assert torch.equal(found.weights.read(name), master.to(dtype)), name
        assert "head.weight" not in found.weights, "it is tied to embed.weight"
        assert found.weights["frozen.weight"].shape == (5, 5)
        assert found.weights.read("frozen.weight").abs().sum() > 0
        assert int(found.weights.read("seen")) == 3


def test_tensors_pass_through_memory_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "_BLOCK", 7)
    read: list[int] = []
    original = PickledTensor.read

    def counted(self: PickledTensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = original(self, start, stop)
        read.append(found.numel())
        return found

    monkeypatch.setattr(PickledTensor, "read", counted)
    import_checkpoint(STORED / "zero3-offload-fp32", tmp_path)
    assert max(read) == 7
    expected = safetensors.torch.load_file(STORED / "zero3-offload-fp32" / "expected.safetensors")
    with open_checkpoint(tmp_path) as found:
        assert all(torch.equal(found.optimizer.read(name), v) for name, v in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_comes_along(kind: str, tmp_path: Path) -> None:
    import_checkpoint(STORED / kind, tmp_path)
    with open_checkpoint(tmp_path) as found:
        state = found.state
    assert state["counters"] == {
        "global_steps": 3,
        "micro_steps": 3,
        "skipped_steps": 0,
        "accumulation_steps": 1,
    }
    assert state["parameters"]["scale"] == [{"rows": 1, "step": 3, "started": True}]
    assert state["scheduler"] == {"type": "WarmupLR", "state": {"last_batch_iteration": 2}}
    assert [group["weight_decay"] for group in state["optimizer"]["groups"]] == [0.01, 0.0]
    assert state["optimizer"]["type"] == "AdamW"
    assert state["client"] == {"epoch": 4, "note": {"$tuple": ["a", 1]}}


def saved(path: Path, content: Any) -> TorchFile:
    torch.save(content, path)
    return TorchFile(path)


def test_tensors_of_any_layout_are_read_in_any_range(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    content = {
        "whole": base,
        "transposed": base.t(),
        "slice": base[2:4],
        "column": base[:, 3],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base.bfloat16()),
        "ordered": collections.OrderedDict(shape=base.shape),
    }
    found = saved(tmp_path / "f.pt", content).content
    assert found["ordered"] == {"shape": (6, 10)}
    for name, tensor in content.items():
        if isinstance(tensor, torch.Tensor):
            values = found[name].read().reshape(found[name].shape)
            assert values.dtype is tensor.dtype and torch.equal(values, tensor), name
    assert torch.equal(found["whole"].read(7, 20), base.reshape(-1)[7:20])
    assert torch.equal(found["transposed"].read(7, 20), base.t().reshape(-1)[7:20])


def test_a_tensor_with_more_elements_than_the_file_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="more elements than its storage"):
        saved(tmp_path / "f.pt", torch.zeros(1).expand(1 << 40))


class Evil:
    """Pickles as a call of whatever it is given."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize(
    "call",
    [os.system, os.unlink, eval, exec, getattr, print, pickle.loads, shutil.rmtree, torch.load],
)
def test_nothing_is_called_and_the_name_is_told(call: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x")
    torch.save({"module": Evil(call, str(victim))}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="neither a tensor nor a plain container") as error:
        TorchFile(tmp_path / "f.pt")
    assert call.__name__.removeprefix("_") in str(error.value)
    assert str(tmp_path / "f.pt") in str(error.value)
    assert victim.exists()


def with_pickle(path: Path, data: bytes) -> Path:
    """A file of `torch.save` with another pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("f/data.pkl", data)
        archive.writestr("f/data/0", bytes(16))
    return path


PICKLES: dict[str, bytes] = {
    "a name of the registry of extensions": b"\x80\x02\x82\x01.",
    "an instance by INST": b"(S'x'\nios\nsystem\n.",
    "a huge memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a huge string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "huge bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0fserialization.os\x93.",
    "a module of torch": b"\x80\x04\x8c\x05torch\x8c\x02os\x93.",
    "a function of torch": b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
    "state set on a function of ours": b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2"
    b"\x93N}\x8c\x0c__defaults__)s\x86b.",
    "a class that may only be named": b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93)R.",
    "a storage that is not there": b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\0"
    b"9X\x03\0\0\0cpuK\x01tQ.",
    "a storage too long": b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\0"
    b"0X\x03\0\0\0cpuK\x05tQ.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "a stack that is empty": b"\x80\x02R.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_hostile_pickle_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"f\.pt"):
        TorchFile(with_pickle(tmp_path / "f.pt", PICKLES[kind]))


@pytest.mark.parametrize("wrong", ["compressed", "truncated", "no zip", "no pickle", "empty"])
def test_what_torch_did_not_write_is_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    if wrong == "compressed":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("f/data.pkl", bytes(10_000))
    elif wrong == "truncated":
        torch.save(torch.zeros(1000), path)
        path.write_bytes(path.read_bytes()[:2000])
    elif wrong == "no pickle":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("f/data/0", b"x")
    else:
        path.write_bytes(b"" if wrong == "empty" else pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"f\.pt"):
        TorchFile(path)


def test_the_pickles_of_torch_have_only_known_opcodes() -> None:
    for path in STORED.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            data = archive.read(name)
        check_opcodes(data)
        assert len(list(pickletools.genops(data))) > 50


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_damage_does_anything_but_fail_with_the_one_error(tmp_path: Path, data: Any) -> None:
    original = STORED / "zero1-bf16/it/mp_rank_00_model_states.pt"
    content = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "f.pt"
    path.write_bytes(content)
    try:
        TorchFile(path).close()
    except CheckpointError as error:
        message = str(error)
    else:
        message = str(path)
    assert str(path) in message


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero3-fp32"])
def test_a_file_that_is_missing_is_noticed(kind: str, tmp_path: Path) -> None:
    for name in sorted(path.name for path in (STORED / kind / "it").iterdir()):
        copy = tmp_path / name
        shutil.copytree(STORED / kind, copy)
        (copy / "it" / name).unlink()
        with pytest.raises(CheckpointError, match="missing"):
            import_checkpoint(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flipped_bits_in_a_tensor_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(STORED / "zero2-bf16", tmp_path / "c")
    path = tmp_path / "c/it/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda i: i.file_size if "/data/" in i.filename else 0)
        place = info.header_offset + 30 + len(info.filename) + 100
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum") as error:
        import_checkpoint(tmp_path / "c", tmp_path / "out")
    assert str(path) in str(error.value)


def test_a_record_before_the_beginning_is_refused(tmp_path: Path) -> None:
    content = bytearray(with_pickle(tmp_path / "f.pt", b"\x80\x02].").read_bytes())
    end = content.rfind(b"PK\x05\x06")  # says where the directory is, too far by one
    content[end + 16] += 1
    (tmp_path / "f.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not where it should be"):
        TorchFile(tmp_path / "f.pt")


def test_opening_one_as_ours_says_what_it_is() -> None:
    with pytest.raises(CheckpointError, match=r"take it over first with .*import-checkpoint"):
        open_checkpoint(STORED / "zero1-bf16")


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STORED / "zero1-bf16", tmp_path / "c")
    folder = tmp_path / "c/it"
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor or pipeline parallelism"):
        import_checkpoint(tmp_path / "c", tmp_path / "out")


def rewritten(kind: str, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a stored checkpoint whose model states are changed, by torch itself."""
    shutil.copytree(STORED / kind, tmp_path / "c")
    path = tmp_path / "c/it/mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    return tmp_path / "c"


def test_client_state_that_grows_without_end_is_left_out(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        value: list[Any] = [0]
        for _ in range(60):
            value = [value, value]
        content["bomb"] = value

    _, lost = import_checkpoint(rewritten("zero1-bf16", tmp_path, change), tmp_path / "out")
    assert lost == ["client state 'bomb'"]


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["param_shapes"][0]["embed.weight"] = torch.Size([11, 500])

    folder = rewritten("zero2-fp32", tmp_path, change)
    with pytest.raises(CheckpointError, match="elements too short"):
        import_checkpoint(folder, tmp_path / "out")


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_layout_is_put_together_again(tmp_path: Path, data: Any) -> None:
    """Flat tensors are made as ZeRO makes them, from parameters of random shapes."""
    world = data.draw(st.integers(1, 4))
    shape = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    groups = [
        {f"p{g}.{i}": data.draw(shape) for i in range(data.draw(st.integers(1, 4)))}
        for g in range(data.draw(st.integers(1, 3)))
    ]
    values = {n: torch.randn(s) for group in groups for n, s in group.items()}
    flats: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in groups:
        flat = torch.cat([values[name].reshape(-1) for name in group])
        flat = torch.cat([flat, torch.full((-flat.numel() % (2 * world),), 9.0)])
        for rank, part in enumerate(flat.chunk(world)):
            flats[rank].append(part.clone())
    parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for value in values.values():
        length = -(-value.numel() // world)
        padded = torch.cat([value.reshape(-1), torch.full((length * world - value.numel(),), 9.0)])
        for rank in range(world):
            parts[rank].append(padded[rank * length : (rank + 1) * length])
    sub = [list(torch.split(torch.cat(part), 7)) for part in parts]
    cloned = [[tensor.clone() for tensor in process] for process in sub]
    content = saved(tmp_path / "f.pt", {"flats": flats, "parts": cloned})
    for found in (
        ranges_of_flat_groups(groups, content.content["flats"], None),
        ranges_of_parts(groups, content.content["parts"]),
    ):
        for name, value in values.items():
            pieces = [r.flat.read(r.start, r.stop) for r in found[name]]
            assert torch.equal(torch.cat(pieces), value.reshape(-1)), name
    content.close()
