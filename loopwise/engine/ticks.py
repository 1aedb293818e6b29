"""The tick: admit, one recurrence of every live row, logits and tokens of those that stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from loopwise.engine.counts import Counts
from loopwise.engine.request import FinishReason, TokenOutput
from loopwise.engine.rows import RowTable
from loopwise.engine.runner import Exits, Runner
from loopwise.engine.running import Choice
from loopwise.engine.sampler import LogitsError, sample
from loopwise.engine.scheduler import Scheduler
from loopwise.engine.sequence import Chunk, Sequence
from loopwise.engine.settings import EngineConfig

Heard = Callable[[Choice, TokenOutput | None, FinishReason | None], None]


class Ticks:
    """Moves choices through scheduler and runner, one recurrence at a time.

    Args:
        heard: told of every new token, with the reason if it is the last, and, without a token,
            that a choice has ended.
        vocab_size: of the tokenizer; a head may have more rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        table: RowTable,
        runner: Runner,
        heard: Heard,
        vocab_size: int,
    ) -> None:
        self.scheduler, self.table, self.runner = scheduler, table, runner
        self.counts = Counts(config.max_depth)
        self._config, self._heard, self._vocab_size = config, heard, vocab_size
        self._in_step = config.batching != "continuous"
        # A pass through prelude, coda, head and sampling, in ticks: at few rows every layer costs
        # about the same, and what is around them about one more. Not timed, so that what runs
        # together, and with it the rounding of results, is the same in every run.
        g = runner.model.geometry
        self._pass_ticks = (g.n_prelude_layers + g.n_coda_layers + 1) / g.n_core_layers
        self._choices: dict[Sequence, Choice] = {}
        self._live: list[Chunk] = []
        self._settled: list[tuple[int, Chunk]] = []  # since which tick
        self._chunk_at: dict[int, Chunk] = {}  # by seat

    def add(self, choice: Choice) -> None:
        """Queue a choice."""
        self._choices[choice.sequence] = choice
        self.scheduler.submit(choice.sequence)

    def finish(self, choice: Choice, reason: FinishReason) -> None:
        """A choice is complete, or nobody wants it any more."""
        choice.finish_reason = reason
        self.scheduler.end(choice.sequence)
        del self._choices[choice.sequence]
        request = choice.request
        if request.finished:
            request.total_s = time.perf_counter() - request.submitted_s
        self._heard(choice, None, reason)

    def step(self) -> None:
        """One tick: admit, one recurrence of every live row, tokens of those that stop.

        What it raises ends the requests that are running; those that wait go on at the next tick.
        """
        started = time.perf_counter()
        try:
            self._enter()
            self.counts.slot_ticks += self.scheduler.running
            self._live = [c for c in self._live if not c.dropped]
            if self._live:
                self._recur()
            self._read()
        except Exception as err:  # what was half done is lost, and nothing else
            running = {c.request for c in self._choices.values() if c.sequence.slot >= 0}
            for choice in [c for c in self._choices.values() if c.request in running]:
                choice.request.error = choice.request.error or err
                self.finish(choice, "error")
            raise
        self.counts.ticks += 1
        self.counts.busy_s += time.perf_counter() - started

    def _enter(self) -> None:
        if self._in_step and (self._live or self._settled):
            return
        chunks, placements = self.scheduler.admit()
        for p in placements:
            self.table.place(p.slot, p.first, p.page)
        if not chunks:
            return
        ids: list[int] = []
        seeds = []
        for chunk in chunks:
            sequence = chunk.sequence
            choice = self._choices[sequence]
            rule = choice.request.rule
            self.table.seat(chunk.seats, sequence.slot, chunk.start, rule, choice.policy)
            ids += sequence.tokens[chunk.start : chunk.end]
            seeds += [choice.request.seed] * len(chunk.seats)
            for seat in chunk.seats.tolist():
                self._chunk_at[seat] = chunk
        self.runner.enter([c.live for c in chunks], ids, np.array(seeds, np.int64))
        self.counts.prelude_rows += len(ids)
        self._live += chunks

    def _recur(self) -> None:
        rows = [c.live for c in self._live]
        exits = self.runner.recur(rows)
        self.counts.see(self.table.r[np.concatenate(rows)])
        for left in exits:
            self._keep_logits(left)
            gone = left.seats.tolist()
            touched = {id(c): c for c in map(self._chunk_at.__getitem__, gone)}
            leaving = set(gone)
            for chunk in touched.values():
                chunk.live = np.array(
                    [s for s in chunk.live.tolist() if s not in leaving], np.int64
                )
                if not len(chunk.live):
                    self._settled.append((self.scheduler.tick, chunk))
        self._live = [c for c in self._live if len(c.live)]

    def _keep_logits(self, left: Exits) -> None:
        """The reading at the exit is the output; a prompt's last token waits for the others."""
        if left.output is None:
            return
        wanted = []
        for row, seat in zip(left.rows.tolist(), left.seats.tolist(), strict=True):
            chunk = self._chunk_at[seat]
            if seat == chunk.seats[-1] and chunk.end == len(chunk.sequence.tokens):
                wanted.append((row, self._choices[chunk.sequence]))
        if wanted:
            rows = torch.tensor([row for row, _ in wanted], device=left.output.hidden.device)
            for (_, choice), logits in zip(wanted, left.output.read(rows), strict=True):
                choice.logits = logits

    def _read(self) -> None:
        """Coda and head for chunks that have settled, once they are worth a pass."""
        self._settled = [(since, c) for since, c in self._settled if not c.dropped]
        if not self._settled:
            return
        if self._live and (self._in_step or self._others_come()):
            return
        chunks = [c for _, c in self._settled]
        self._settled = []
        unread = [c for c in chunks if not self._reads_at_exit(c)]
        last = [c for c in chunks if c.end == len(c.sequence.tokens)]
        if unread:
            wanted = [c for c in unread if c.end == len(c.sequence.tokens)]
            seats = np.array([c.seats[-1] for c in wanted], np.int64)
            logits = self.runner.read([c.seats for c in unread], seats)
            for chunk, row in zip(wanted, logits, strict=True):
                self._choices[chunk.sequence].logits = row
            self.counts.coda_passes += 1
        for chunk in chunks:
            self._note_depths(chunk)
            # A row that is no number spoils those before it in its chunk: nobody is to find them.
            sound = len(chunk.seats) == 1 or self.runner.finite(chunk.seats)
            self.scheduler.finish(chunk, sound)
        if last:
            self._sample([pair for chunk in last for pair in self._next(chunk)])

    def _next(self, chunk: Chunk) -> Iterator[tuple[Choice, int]]:
        """Choices that go on from a chunk's last token, and its depth."""
        sequence, depth = chunk.sequence, int(self.table.r[chunk.seats[-1]])
        first = self._choices[sequence]
        yield first, depth
        if chunk.end > sequence.n_prompt:
            return
        shared = self.scheduler.share(sequence)
        for source, page in shared.copies:
            self.table.copy(source, page)
        for p in shared.placements:
            self.table.place(p.slot, p.first, p.page)
        for other in map(self._choices.__getitem__, shared.sequences):
            other.logits = first.logits
            yield other, depth

    def _others_come(self) -> bool:
        """Whether settled rows had better wait for a pass together with others.

        Judged by how deep tokens went so far. Waiting for k ticks is worth it where at least as
        many are expected to settle by then, and where what stands idle meanwhile, as a share of a
        tick, is less than what a pass costs for any number of rows (``_pass_ticks``).
        """
        since = self._settled[0][0]
        left = self._config.coda_delay - (self.scheduler.tick - since)
        waiting = sum(len(c.seats) for _, c in self._settled)
        at = np.bincount(self.table.r[np.concatenate([c.live for c in self._live])])
        worth = int(self._pass_ticks * (waiting + at.sum()) / waiting)
        for k in range(1, min(left, worth) + 1):
            if self.counts.expected_exits(at, k) >= waiting:
                return True
        return False

    def _reads_at_exit(self, chunk: Chunk) -> bool:
        policy = self._choices[chunk.sequence].policy
        return self.runner.policies[policy].reads.runs_coda

    def _note_depths(self, chunk: Chunk) -> None:
        choice = self._choices[chunk.sequence]
        if choice.index == 0 and chunk.start < len(choice.request.depths):
            depths = self.table.r[chunk.seats].tolist()[: len(choice.request.depths) - chunk.start]
            choice.request.depths[chunk.start : chunk.start + len(depths)] = depths

    def _sample(self, going_on: list[tuple[Choice, int]]) -> None:
        choices, depths = map(list, zip(*going_on, strict=True))
        logits = torch.stack([c.take_logits() for c in choices])
        while choices:
            try:
                found = sample(
                    logits,
                    [c.request.params for c in choices],
                    [c.request.params.choice_seed(c.index) for c in choices],
                    [len(c.sequence.tokens) for c in choices],
                    [c.history for c in choices],
                    [c.next_forced for c in choices],
                    self._vocab_size,
                )
            except LogitsError as err:  # those rows end with it, the others are sound
                for row in err.rows:
                    choices[row].request.error = err
                    self.finish(choices[row], "error")
                keep = [i for i in range(len(choices)) if i not in err.rows]
                choices, depths = [choices[i] for i in keep], [depths[i] for i in keep]
                logits = logits[keep]
                continue
            break
        else:
            return
        rows = zip(choices, depths, found.token_ids.tolist(), found.logprobs.tolist(), strict=True)
        for row, (choice, depth, token_id, logprob) in enumerate(rows):
            self._accept(choice, token_id, depth, logprob, found.top_logprobs.get(row, ()))

    def _accept(
        self,
        choice: Choice,
        token_id: int,
        depth: int,
        logprob: float,
        top: tuple[tuple[int, float], ...],
    ) -> None:
        """A new token: show its text, and go on or end."""
        request = choice.request
        if not choice.outputs and not request.ttft_s:
            request.ttft_s = time.perf_counter() - request.submitted_s
        ended = token_id in request.end_ids
        text = "" if ended else choice.text.push(token_id)
        reason: FinishReason | None = None
        if ended or choice.text.stopped:
            reason = "stop"
        elif len(choice.outputs) + 1 >= request.max_tokens:
            reason = "length"
        if reason is not None:
            text += choice.text.flush()
        output = TokenOutput(token_id, text, depth, logprob, top)
        choice.outputs.append(output)
        self.counts.tokens += 1
        if reason is None:
            self.scheduler.append(choice.sequence, token_id)
        self._heard(choice, output, reason)
        if reason is not None:
            self.finish(choice, reason)
