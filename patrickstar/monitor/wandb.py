"""A run of Weights & Biases; the extra `wandb`.

Where it goes is W&B's business: `WANDB_MODE=offline` keeps it in the folder `wandb` until
`wandb sync`, and `WANDB_DIR` names another folder. A run that the script has begun itself is used,
and left open for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patrickstar.errors import ConfigError
from patrickstar.monitor.monitor import Event, needed


class WeightsAndBiases:
    """Logs into a run of `project`.

    Args:
        group: of the run.
        team: the entity that it belongs to.

    Raises:
        ConfigError: the library is not installed or will not begin a run.
    """

    def __init__(self, project: str, group: str | None = None, team: str | None = None) -> None:
        library: Any = needed("wandb", "wandb", "wandb")
        self._is_ours = library.run is None
        try:
            self._run = library.init(project=project, group=group, entity=team)
        except library.errors.Error as error:
            raise ConfigError(
                f"wandb would not begin a run ({error}); log in with `wandb login`, or set the "
                "environment variable WANDB_MODE=offline to keep the run on this machine"
            ) from error

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._run.log({name: value}, step=samples)

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()
