"""The command line. `app` is what the console script runs; every command has a file of its own."""

from patrickstar.cli.app import app, build_app

__all__ = ["app", "build_app"]
