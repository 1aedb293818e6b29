"""``python -m loopwise``."""

from loopwise.cli import main

if __name__ == "__main__":
    main()
