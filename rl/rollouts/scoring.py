"""Scoring with a time limit per sample, in a worker process that can be killed.

A reward function is somebody's code: it may loop for ever, in Python (an alarm in the
worker's main thread interrupts it) or in C (the worker is killed and started again).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

from rl.errors import RunError
from rl.rollouts.rubric import Rubric, failed_score
from rl.types import Rollout, Score

GRACE_S = 1.0
"""How much longer than its limit a sample may take before its worker is killed."""
START_S = 120.0
"""Within this a worker has imported the rubric's module."""


class _TimeLimit(BaseException):
    """Raised by the alarm; not an Exception, so that a reward's own `except` cannot swallow it."""


class ScoringWorker:
    """Scores rollouts one after another in a process of its own.

    Args:
        time_limit_s: longest time one rollout's score may take.
    """

    def __init__(self, *, rubric: Rubric, time_limit_s: float) -> None:
        self.rubric = rubric
        self.time_limit_s = time_limit_s
        self._worker: _Worker | None = None

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """A score for each rollout, in order; one that takes too long is a failed score.

        Raises:
            RunError: the worker cannot be started, as the rubric cannot be loaded in it.
            TimeoutError: the worker did not start within `START_S`.
        """
        scores: list[Score] = []
        while len(scores) < len(rollouts):
            worker = self._worker or self._start()
            ended = False
            try:
                worker.connection.send(list(rollouts[len(scores) :]))
                while len(scores) < len(rollouts) and worker.connection.poll(self.time_limit_s + GRACE_S):
                    scores.append(worker.connection.recv())
            except (EOFError, BrokenPipeError, ConnectionResetError):
                ended = True
            if len(scores) < len(rollouts):
                reason = "its reward function ended the scoring process" if ended else self._too_long()
                scores.append(failed_score(reason, rollout=rollouts[len(scores)]))
                self.close()
        return scores

    def start(self) -> None:
        """Start the worker now rather than at the first score; idempotent. Raises as `score` does."""
        if self._worker is None:
            self._start()

    def close(self) -> None:
        """End the worker; idempotent."""
        if self._worker is not None:
            self._worker.connection.close()
            self._worker.process.kill()
            self._worker.process.join()
            self._worker = None

    def _too_long(self) -> str:
        return f"its score took longer than time_limit_s={self.time_limit_s:g}"

    def _start(self) -> _Worker:
        # Spawned, not forked: the actor's process has threads and loaded runtimes.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self.rubric, self.time_limit_s), name="scoring", daemon=True
        )
        process.start()
        theirs.close()
        try:
            if not ours.poll(START_S):
                raise TimeoutError(f"the scoring process did not start within {START_S:g} s")
            ours.recv()
        except (EOFError, ConnectionResetError) as error:
            process.join(GRACE_S)
            raise RunError(
                f"the scoring process ended while loading the rubric (exit code {process.exitcode}); "
                "its own error is on stderr"
            ) from error
        else:
            self._worker = _Worker(process=process, connection=ours)
            return self._worker
        finally:
            if self._worker is None:
                ours.close()
                process.kill()
                process.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection


def _serve(connection: Connection, rubric: Rubric, time_limit_s: float) -> None:
    """The worker's loop; it ends when its parent is gone (the pipe closes)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send("ready")
        while True:
            for rollout in connection.recv():
                connection.send(score_within(rubric, rollout, time_limit_s))


def score_within(rubric: Rubric, rollout: Rollout, time_limit_s: float) -> Score:
    """The score, or a failed one if it took too long; for a process's main thread alone (an alarm)."""
    started = time.monotonic()
    previous = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        return rubric.score(rollout)
    except _TimeLimit:
        took_s = time.monotonic() - started
        reason = f"its score took longer than time_limit_s={time_limit_s:g} (stopped after {took_s:.1f} s)"
        return failed_score(reason, rollout=rollout)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise _TimeLimit
