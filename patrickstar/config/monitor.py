"""Where metrics go besides the terminal: tensorboard, wandb, csv_monitor and comet."""

from __future__ import annotations

from patrickstar.config.key import Key, Status, accepted, honoured, within
from patrickstar.config.types import Bool, Int, Section, Str


class Tensorboard(Section):
    """``tensorboard``."""

    enabled: Bool = honoured(False, "write TensorBoard event files")
    output_path: Str = honoured("", "folder of the files; empty is the working directory")
    job_name: Str = honoured("DeepSpeedJobName", "folder inside output_path")


class Wandb(Section):
    """``wandb``."""

    enabled: Bool = honoured(False, "log to Weights & Biases")
    group: Str | None = honoured(None, "group of the run")
    team: Str | None = honoured(None, "entity that the run belongs to")
    project: Str = honoured("deepspeed", "project")


class CsvMonitor(Section):
    """``csv_monitor``."""

    enabled: Bool = honoured(False, "write a CSV file per metric")
    output_path: Str = honoured("", "folder of the files; empty is the working directory")
    job_name: Str = honoured("DeepSpeedJobName", "folder inside output_path")


OTHER_KEYS: tuple[Key, ...] = tuple(
    within(
        Key(
            "comet",
            Status.REJECTED,
            {},
            "log to Comet",
            "use `tensorboard`, `wandb` or `csv_monitor`",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "log to Comet"),
            accepted("samples_log_interval", Int, 100, "samples between two records"),
            accepted("project", Str | None, None, "project"),
            accepted("workspace", Str | None, None, "workspace"),
            accepted("api_key", Str | None, None, "key of the interface"),
            accepted("experiment_name", Str | None, None, "name of the experiment"),
            accepted("experiment_key", Str | None, None, "key of the experiment"),
            accepted("online", Bool | None, None, "send records at once"),
            accepted("mode", Str | None, None, "get, create or get_or_create"),
        ),
    )
)
