"""Where metrics go besides the terminal: tensorboard, wandb, csv_monitor and comet.

The first rank writes `Train/Samples/` `train_loss` (the mean of its own micro-batches), `lr`,
`loss_scale` in fp16, and with `wall_clock_breakdown` `elapsed_time_ms_forward` and the like.
"""

from __future__ import annotations

from patrickstar.config.key import Key, Status, accepted, honoured, within
from patrickstar.config.types import Bool, Int, Section, Str


class Tensorboard(Section):
    """``tensorboard``."""

    enabled: Bool = honoured(
        False,
        "write TensorBoard event files",
        note="the extra `patrickstar[tensorboard]`; events have DeepSpeed's names, and "
        "`Train/Samples/train_loss` comes without a pipeline too",
    )
    output_path: Str = honoured("", "folder of the files; empty is the working directory")
    job_name: Str = honoured("DeepSpeedJobName", "folder inside output_path")


class Wandb(Section):
    """``wandb``."""

    enabled: Bool = honoured(
        False,
        "log to Weights & Biases",
        note="the extra `patrickstar[wandb]`; WANDB_MODE=offline keeps the run on this machine",
    )
    group: Str | None = honoured(None, "group of the run")
    team: Str | None = honoured(None, "entity that the run belongs to")
    project: Str = honoured("deepspeed", "project")


class CsvMonitor(Section):
    """``csv_monitor``."""

    enabled: Bool = honoured(
        False,
        "write a CSV file per metric",
        note="a run that goes on in the same folder adds rows without another header",
    )
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
