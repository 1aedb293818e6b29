"""How far is each converted checkpoint from the published mathematics? The tests' own figures.

Runs the tests of the published formats and keeps the largest difference of a logit they see between
a small checkpoint with the published names and shapes, converted, and (naive) a float64 reference
written from the documented mathematics or (peer) the model that transformers itself builds of the
same folder. ``forward`` is one pass, ``decode`` the reference decoder token by token.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.common import finish, parser, table

TESTS = Path(__file__).parent.parent / "tests" / "hub"
WANTED_APART = 1e-3  # tests that pass with more than this show that a wrong reading would be seen
PUBLISHED = (
    "huginn",
    "retrofit",
    "ouro",
    "parcae",
    "loopformer",
    "nanbeige",
    "nanochat",
    "flt",
    "dory",
)
PLAIN = ("llama", "llama_transformers", "gguf", "smollm2")


class Recorder:
    """A pytest plugin that hears every comparison of the tests."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = defaultdict(dict)
        self.tests: dict[str, int] = defaultdict(int)
        self._made: list[tuple[Tensor, str]] = []
        self._heard: list[tuple[str, float]] = []

    def pytest_configure(self) -> None:
        from tests.hub import folders

        gap = folders.gap

        def heard(left: Tensor, right: Any) -> float:
            value = gap(left, right)
            how = next((how for made, how in self._made if made is left), None)
            if how is not None and value < WANTED_APART:
                self._heard.append((how, value))
            return value

        folders.forward = self._remembered(folders.forward, "forward")
        folders.decode = self._remembered(folders.decode, "decode")
        folders.gap = heard

    def _remembered(self, run: Callable[..., Tensor], how: str) -> Callable[..., Tensor]:
        def running(*args: Any, **named: Any) -> Tensor:
            out = run(*args, **named)
            self._made.append((out, f"{how} {str(out.dtype).removeprefix('torch.')}"))
            return out

        return running

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        outcome = yield
        report = outcome.get_result()
        if call.when == "call" and report.passed and self._heard:
            peer = "transformers" in item.nodeid or "smollm2" in item.nodeid
            name = item.path.stem.removeprefix("test_").removesuffix("_transformers")
            row = f"{name} | {'peer' if peer else 'naive'}"
            self.tests[row] += 1
            for how, value in self._heard:
                self.found[row][how] = max(value, self.found[row].get(how, 0.0))
        if call.when == "call":
            self._made.clear()
            self._heard.clear()


def main() -> None:
    options = parser(__doc__ or "", smoke=True).parse_args()
    recorder = Recorder()
    modules = PUBLISHED[:1] if options.smoke else (*PUBLISHED, *PLAIN)
    files = [str(TESTS / f"test_{name}.py") for name in modules]
    code = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *files], [recorder])
    if code:
        sys.exit(int(code))
    ways = sorted({how for row in recorder.found.values() for how in row})
    rows: list[dict[str, Any]] = []
    for name in sorted(recorder.found):
        of = recorder.found[name]
        kind, against = name.split(" | ")
        figures = {how: f"{of[how]:.1e}" if how in of else "" for how in ways}
        rows.append({"format": kind, "against": against, "tests": recorder.tests[name], **figures})
    table("Largest difference of a logit", rows)
    finish("format-parity", {"rows": rows}, options.save)


if __name__ == "__main__":
    main()
