"""Events reach TensorBoard, Weights & Biases and CSV files, each by its own library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.monitor import CsvFiles, Event, Monitor, TensorBoard, WeightsAndBiases

EVENTS: list[Event] = [("Train/Samples/lr", 0.5, 4), ("Train/Samples/train_loss", 2.0, 4)]


def test_every_writer_gets_every_event_until_the_monitor_is_closed(tmp_path: Path) -> None:
    first, second = CsvFiles(tmp_path / "1"), CsvFiles(tmp_path / "2")
    monitor = Monitor([first, second])
    assert monitor.enabled and not Monitor().enabled
    monitor.write_events(EVENTS)
    monitor.close()
    monitor.close()
    monitor.write_events(EVENTS)
    for folder in (tmp_path / "1", tmp_path / "2"):
        lines = (folder / "Train_Samples_lr.csv").read_text().splitlines()
        assert lines == ["step,lr", "4,0.5"]


def test_a_run_that_goes_on_adds_rows_to_its_csv_files(tmp_path: Path) -> None:
    for samples in (4, 8):
        files = CsvFiles(tmp_path / "run")
        files.write_events([("Train/Samples/lr", samples / 8, samples)])
        files.close()
    lines = (tmp_path / "run" / "Train_Samples_lr.csv").read_text().splitlines()
    assert lines == ["step,lr", "4,0.5", "8,1.0"]


def test_csv_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"csv_monitor.*output_path"):
        CsvFiles(tmp_path / "file")
    files = CsvFiles(tmp_path / "run")
    (tmp_path / "run" / "a.csv").mkdir()
    with pytest.raises(PatrickStarError, match=r"a\.csv"):
        files.write_events([("a", 1.0, 1)])


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard, which reads the files, is not installed",
    )
    board = TensorBoard(tmp_path / "board")
    board.write_events(EVENTS)
    board.write_events([("Train/Samples/lr", 0.25, 8)])
    board.close()
    found = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(found.Tags()["scalars"]) == {name for name, _, _ in EVENTS}
    assert [(e.step, e.value) for e in found.Scalars("Train/Samples/lr")] == [(4, 0.5), (8, 0.25)]


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monitor = WeightsAndBiases("stars", group="sea", team="nobody")
    run = wandb.run
    assert (run.project, run.group, run.entity) == ("stars", "sea", "nobody")
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.25, 8)])  # 4 is complete when 8 comes
    assert run.summary["Train/Samples/train_loss"] == 2.0
    assert run.summary["Train/Samples/lr"] == 0.5 and run.step == 8

    WeightsAndBiases("other").close()  # a run that there was stays open
    assert wandb.run is run
    monitor.close()
    assert wandb.run is None
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for loaded in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}\.enabled.*patrickstar\[{name}\]"):
        TensorBoard(tmp_path) if name == "tensorboard" else WeightsAndBiases("stars")


def test_tensorboard_names_a_folder_that_it_cannot_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output_path"):
        TensorBoard(tmp_path / "file" / "board")
