"""What an engine did, counted."""

from __future__ import annotations

from collections import deque

import numpy as np

from loopwise.engine.kv_cache import Ints

RECENT = 4096  # ticks whose rows are remembered


class Counts:
    """Ticks, rows and tokens since an engine was made.

    Attributes:
        rows_by_recurrence: core row-steps by the recurrence they did, ``(max_depth + 1,)``.
        recent: the same of each of the last ticks.
        busy_s: time spent in ticks.
        slot_ticks: ticks of every slot in use, whether its row ran or waited.
    """

    def __init__(self, max_depth: int) -> None:
        self.ticks = self.tokens = 0
        self.prelude_rows = self.coda_passes = 0
        self.busy_s = 0.0
        self.slot_ticks = 0
        self.rows_by_recurrence: Ints = np.zeros(max_depth + 1, np.int64)
        self.recent: deque[Ints] = deque(maxlen=RECENT)

    def expected_exits(self, at: Ints, ticks: int) -> float:
        """How many of the live rows will settle within some ticks, going by those before them.

        Args:
            at: live rows by recurrences done, ``(deepest + 1,)``.
        """
        ran = np.append(self.rows_by_recurrence, np.zeros(ticks + 1, np.int64))
        done = np.nonzero(at)[0]
        now, after = ran[done + 1], ran[done + 1 + ticks]
        leave = np.divide(now - after, now, out=np.zeros(len(done)), where=now > 0)
        return float(at[done] @ leave)

    def see(self, recurrences: Ints) -> None:
        """One tick ran rows that are now at these recurrences."""
        rows = np.bincount(recurrences, minlength=len(self.rows_by_recurrence))
        self.rows_by_recurrence += rows
        self.recent.append(rows)
