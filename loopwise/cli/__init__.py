"""The command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import sys

# In the order of --help.
from loopwise.cli.app import app  # isort: skip
from loopwise.cli import training, measuring, evaluating, decoding, checkpoints  # noqa: F401  # isort: skip

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of ``loopwise``."""
    sys.exit(app())
