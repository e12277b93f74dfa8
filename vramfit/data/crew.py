"""Processes that tally the parts of large files side by side (a thread would wait for the interpreter's lock).

Each is `python -m vramfit.data.crew`: a pickled Part on standard input, a pickled Tally or DataError on standard
output, until the input ends. Both ends are this program, so pickles are safe here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vramfit.data.tally import Part, Tally, tally_of
from vramfit.errors import VramfitError

MOST_PROCESSES: Final = 8
_ROOT: Final = Path(__file__).parent.parent.parent


class CrewLost(Exception):
    """A process could not start, or ended before it answered."""


class Crew:
    """`processes` that wait for parts; use it in a `with`, which ends them."""

    def __init__(self, processes: int) -> None:
        # Tallies are compared by hash, so all of them hash with one seed; nobody outside can know it.
        seed = int.from_bytes(os.urandom(4), "little")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._processes += (_started(seed) for _ in range(processes))
        except OSError:
            self.close()
            raise CrewLost from None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tallies(self, parts: list[Part]) -> Iterator[Tally]:
        """One tally per part, in their order. Raises DataError for the first part that has one, and CrewLost."""
        from concurrent.futures import ThreadPoolExecutor

        free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            free.put(process)

        def ask(part: Part) -> Tally | VramfitError:
            process = free.get()
            try:
                return _answer(process, part)
            finally:
                free.put(process)

        with ThreadPoolExecutor(len(self._processes), "survey") as threads:
            for answer in threads.map(ask, parts):
                if isinstance(answer, VramfitError):
                    self.close()  # or the parts under way would be waited for
                    raise answer
                yield answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not sent yet has no reader any more
                    pipe.close()  # type: ignore[union-attr]


def _started(seed: int) -> subprocess.Popen[bytes]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: nothing in the working folder can stand in for a module.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "vramfit.data.crew"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": str(seed), "PYTHONUTF8": "1"},
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )


def _answer(process: subprocess.Popen[bytes], part: Part) -> Tally | VramfitError:
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(part, process.stdin)
        process.stdin.flush()
        answer: Tally | VramfitError = pickle.load(process.stdout)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        raise CrewLost from None
    return answer


def processors() -> int:
    """How many processes this one may keep busy."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, MOST_PROCESSES)


def main() -> None:
    """Answer one part after the other."""
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            part = pickle.load(asked)
        except EOFError:
            return
        answer: Tally | VramfitError
        try:
            answer = tally_of(part)
        except VramfitError as error:
            answer = error
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


if __name__ == "__main__":
    main()
