"""`python -m patrickstar` is the command `patrickstar`."""

from patrickstar.cli import app

if __name__ == "__main__":
    app(prog_name="patrickstar")
