"""Event files for TensorBoard, by PyTorch's writer; the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError
from patrickstar.monitor.monitor import Event, needed


class TensorBoard:
    """Writes an event file into `folder`.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        library: Any = needed("torch.utils.tensorboard", "tensorboard", "tensorboard")
        try:
            self._writer = library.SummaryWriter(log_dir=str(folder))
        except OSError as error:
            raise ConfigError(
                f"tensorboard: the folder {str(folder)!r} cannot be written ({error.strerror}); "
                "choose another tensorboard.output_path"
            ) from error

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
