"""The commands put together. What trains is passed in, so that tests can pass something smaller.

Exit codes: 0 all went well, 1 it failed, 2 the command line or the config is wrong, 130 it was
interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

import patrickstar
from patrickstar.cli.doctor import doctor_command
from patrickstar.cli.export_checkpoint import export_checkpoint
from patrickstar.cli.import_checkpoint import import_checkpoint
from patrickstar.cli.loop import Initialize
from patrickstar.cli.plan import plan
from patrickstar.cli.report import report, trace
from patrickstar.cli.train import train_command

# \b keeps the lines as they are.
_EXAMPLE = """\b
Look at this machine, train a small model, see whether a larger one fits:
  patrickstar doctor
  patrickstar train
  patrickstar plan --model gpt-1b --host-memory 4GiB --disk runs/spool
Record a run, and look at it:
  patrickstar train --record runs/first
  patrickstar report runs/first
Go on with a run of DeepSpeed's, and take its weights elsewhere:
  patrickstar import-checkpoint runs/ds --output runs/ps
  patrickstar export-checkpoint runs/ps --output weights
"""


def build_app(initialize: Initialize) -> typer.Typer:
    """The command line, training with `initialize`."""
    app = typer.Typer(
        name="patrickstar",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("train")(train_command(initialize))
    app.command("plan")(plan)
    app.command("doctor")(doctor_command(initialize))
    app.command("report")(report)
    app.command("trace")(trace)
    app.command("import-checkpoint")(import_checkpoint)
    app.command("export-checkpoint")(export_checkpoint)
    return app


def _print_version(asked: bool) -> None:
    if not asked:
        return
    typer.echo(f"patrickstar {patrickstar.__version__}")
    raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    pass


_root.__doc__ = f"Train models bigger than the memory they run in.\n\n{_EXAMPLE}"

app = build_app(patrickstar.initialize_engine)
