"""What a run tells about itself: printing, logging, timers and profilers."""

from __future__ import annotations

from patrickstar.config.key import UNSET, Key, Status, accepted, within
from patrickstar.config.types import Bool, Float, Int, Str

OTHER_KEYS: tuple[Key, ...] = (
    accepted(
        "dump_state",
        Bool,
        False,
        "print the engine's settings at the start",
        "print the result of `patrickstar.config.load_config`",
    ),
    accepted(
        "memory_breakdown",
        Bool,
        False,
        "print memory in use at points of an iteration",
        "`engine.memory_report()` has use, peak and budget of each tier",
    ),
    accepted(
        "log_level",
        Str,
        None,
        "level of DeepSpeed's logger",
        '`logging.getLogger("patrickstar").setLevel` sets it',
    ),
    accepted(
        "disable_python_gc",
        Bool,
        False,
        "turn the cyclic garbage collector off",
        "call `gc.disable()` if you want that",
    ),
    accepted(
        "vocabulary_size",
        Int,
        None,
        "vocabulary whose alignment is checked",
        "DeepSpeed only warns with it",
    ),
    *within(
        Key(
            "timers",
            Status.ACCEPTED,
            UNSET,
            "timers that run all the time",
            "the lines of `steps_per_print` have it, without synchronising the device",
        ),
        (
            Key("throughput", Status.ACCEPTED, {}, "samples per second", section=True),
            accepted("throughput.enabled", Bool, True, "measure it", harmless=(True,)),
            accepted("throughput.synchronized", Bool, True, "synchronise to measure"),
        ),
    ),
    *within(
        Key(
            "flops_profiler",
            Status.ACCEPTED,
            {},
            "profile one step",
            "use `torch.profiler` or `torch.utils.flop_counter`",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "profile one step"),
            accepted("recompute_fwd_factor", Float, 0.0, "share of the forward that is recomputed"),
            accepted("profile_step", Int, 1, "the step"),
            accepted("module_depth", Int, -1, "levels of modules to print"),
            accepted("top_modules", Int, 1, "modules to print per level"),
            accepted("detailed", Bool, True, "print every module"),
            accepted("output_file", Str, None, "file to print to"),
        ),
    ),
)
