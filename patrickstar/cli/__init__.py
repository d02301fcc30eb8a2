"""The command line. `app` is what `patrickstar.__main__` runs; every command has its own file."""

from patrickstar.cli.app import app, build_app

__all__ = ["app", "build_app"]
