"""What the command `patrickstar` and `python -m patrickstar` run."""

from patrickstar.cli import app


def main() -> None:
    """Run the command line."""
    app(prog_name="patrickstar")


if __name__ == "__main__":
    main()
