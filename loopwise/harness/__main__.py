"""``python -m loopwise.harness``: ``lm_eval`` that knows the model ``loopwise``.

``python -m loopwise.harness write-tasks OUT DATA`` writes the local tasks as files for its
``--include_path``; anything else goes to ``lm_eval`` as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loopwise.errors import LoopwiseError
from loopwise.harness.installed import harness
from loopwise.harness.model import register
from loopwise.harness.tasks import write_tasks


def main(arguments: list[str]) -> int:
    """Exit code 2 and one line on standard error for bad input."""
    try:
        if arguments[:1] == ["write-tasks"]:
            if len(arguments) != 3:
                print("usage: python -m loopwise.harness write-tasks OUT DATA", file=sys.stderr)
                return 2
            print("\n".join(write_tasks(Path(arguments[1]), Path(arguments[2]))))
            return 0
        register()
        harness("lm_eval.__main__").cli_evaluate()
    except LoopwiseError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
