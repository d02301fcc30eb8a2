"""What the command `patrickstar` and `python -m patrickstar` run.

OpenMP reads its environment when torch is imported, so what it is to know is said before that.
"""

import os


def main() -> None:
    """Run the command line."""
    # By default OpenMP threads spin while they wait for each other. Where a transfer thread or
    # another process has taken a core from one of them, the others burn theirs: on two cores that
    # other work kept busy, a step of gpt-25m took 16 to 20 s, and 1.5 to 5 s with this.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from patrickstar.cli import app

    app(prog_name="patrickstar")


if __name__ == "__main__":
    main()
