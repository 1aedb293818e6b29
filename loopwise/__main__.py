"""``python -m loopwise``."""

from loopwise.cli import main

main()
