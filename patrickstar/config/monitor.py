"""Where metrics go besides the terminal: tensorboard, wandb and csv_monitor."""

from __future__ import annotations

from patrickstar.config.key import honoured
from patrickstar.config.types import Bool, Section, Str


class Tensorboard(Section):
    """``tensorboard``."""

    enabled: Bool = honoured(False, "write TensorBoard event files")
    output_path: Str = honoured("", "folder of the event files; empty is DeepSpeed's default")
    job_name: Str = honoured("DeepSpeedJobName", "folder inside output_path")


class Wandb(Section):
    """``wandb``."""

    enabled: Bool = honoured(False, "log to Weights & Biases")
    group: Str | None = honoured(None, "the group of the run")
    team: Str | None = honoured(None, "the entity the run belongs to")
    project: Str = honoured("deepspeed", "the project")


class CsvMonitor(Section):
    """``csv_monitor``."""

    enabled: Bool = honoured(False, "write one CSV file per metric")
    output_path: Str = honoured("", "folder of the files; empty is DeepSpeed's default")
    job_name: Str = honoured("DeepSpeedJobName", "folder inside output_path")
