"""How a command fails: one paragraph on standard error, and the exit code that tells why.

1: it failed; 2: the command line or the config is wrong; 130: it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from patrickstar.errors import ConfigError, PatrickStarError


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn what users can do wrong into a message and an exit code; `debug` lets it through."""
    try:
        yield
    except PatrickStarError as error:
        if debug:
            raise
        print(f"patrickstar: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("patrickstar: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
