"""Witness: a thread that tells the other ranks of a job that this one runs, and says which of them does not.

It alone speaks to the job's store, so that no other thread waits for a store whose process is stopped.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

_SLACK = 3.0
"""Intervals between two signs of life that are compared."""


class Sign(NamedTuple):
    """What a rank said last: number of the sign, collective that it is in or was in last, a note, and that of it."""

    beat: int
    call: int
    noted: int
    note: str


class Witness:
    """Signs of life of all ranks, one each `interval` seconds; the store is for this thread alone."""

    def __init__(self, store: Any, rank: int, size: int, interval: float) -> None:
        self._store, self._rank, self._size, self._interval = store, rank, size, interval
        self.call, self._note, self._beat = 0, (0, ""), 0
        self._wake, self._asked, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._ended = False
        self._found: list[tuple[Sign, Sign]] = []
        self._thread = threading.Thread(target=self._run, name="autokern-witness", daemon=True)
        self._sign()
        self._thread.start()

    def note(self, text: str) -> None:
        """Tell the others something at once; the first note of a collective stays."""
        if self._note[0] != self.call or not self._note[1]:
            self._note = self.call, text
        self._wake.set()

    def signs(self) -> list[tuple[Sign, Sign]] | None:
        """Return the last signs of each rank and those of some intervals later; None where the store is silent."""
        self._answered.clear()
        self._asked.set()
        self._wake.set()
        answered = self._answered.wait((_SLACK + 2) * self._interval + 2.0)
        return self._found if answered else None

    def told(self, error: BaseException | None) -> str:
        """Return in words which ranks the present collective waits for in vain, and tell them to the others."""
        signs = self.signs()
        if signs is None:
            return "rank 0, or the process that keeps the job's store, does not answer"
        others = [rank for rank in range(self._size) if rank != self._rank]
        last = {rank: signs[rank][1] for rank in others}
        notes = {rank: sign.note for rank, sign in last.items() if sign.noted == self.call or sign.note == "left"}
        words = {rank: note for rank, note in notes.items() if note.startswith("failed")}
        passed = next((note for note in notes.values() if note.startswith("lost ")), "")
        if words:
            told = "; ".join(f"rank {rank} {note}" for rank, note in words.items())
        elif passed:
            told = passed.removeprefix("lost ")
        elif left := [rank for rank, note in notes.items() if note == "left"]:
            told = f"{_named(left)} ended before the others did"
        elif silent := [rank for rank in others if signs[rank][0].beat == last[rank].beat]:
            told = f"{_named(silent)} died or stands still"
        elif late := [rank for rank in others if last[rank].call < self.call]:
            told = f"{_named(late)} did not come: it runs something else, or hangs"
        else:
            told = f"the connection broke ({error})"
        self.note(f"lost {told}")
        return told

    def close(self, note: str) -> None:
        """Leave a last note and end."""
        self.note(note)
        self._ended = True
        self._wake.set()
        self._thread.join(2 * self._interval + 1.0)

    def _sign(self) -> None:
        self._beat += 1
        noted, note = self._note
        self._store.set(f"sign/{self._rank}", f"{self._beat} {self.call} {noted} {note}".encode())

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(self._interval)
                ended = self._ended
                self._wake.clear()
                self._sign()
                if self._asked.is_set():
                    self._asked.clear()
                    before = self._read()
                    time.sleep(_SLACK * self._interval)
                    self._sign()
                    time.sleep(self._interval / 4)
                    self._found = list(zip(before, self._read(), strict=True))
                    self._answered.set()
                if ended:
                    return
        except Exception:  # the store is gone: whoever asks gets no answer
            return

    def _read(self) -> list[Sign]:
        found = []
        for text in self._store.multi_get([f"sign/{rank}" for rank in range(self._size)]):
            beat, call, noted, note = text.decode().split(" ", 3)
            found.append(Sign(int(beat), int(call), int(noted), note))
        return found


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
