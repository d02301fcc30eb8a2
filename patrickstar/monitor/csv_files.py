"""A CSV file for each name, `Train_Samples_lr.csv` for example, with the columns samples and value.

They are those of DeepSpeed's csv_monitor, but that a run which goes on in the same folder adds its
rows without another header.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.monitor.monitor import Event


class CsvFiles:
    """Appends to files in `folder`, which is made.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"csv_monitor: the folder {str(folder)!r} cannot be made ({error.strerror}); "
                "choose another csv_monitor.output_path"
            ) from error

    def write_events(self, events: Sequence[Event]) -> None:
        # Opened anew each time, so that a run that is killed leaves the rows of all its steps.
        for name, value, samples in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            try:
                with path.open("a", newline="", encoding="utf-8") as file:
                    rows = csv.writer(file)
                    if file.tell() == 0:
                        rows.writerow(["step", name.rpartition("/")[2]])
                    rows.writerow([samples, value])
            except OSError as error:
                raise PatrickStarError(
                    f"csv_monitor: {str(path)!r} cannot be written any more ({error.strerror}); "
                    "make room, or choose another csv_monitor.output_path"
                ) from error

    def close(self) -> None:
        """There is nothing to finish."""
