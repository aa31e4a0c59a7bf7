"""A clock that only functions move, and comparisons by it in place of the timer's: what takes how long is made up."""

from collections.abc import Callable
from typing import Any

from autokern.tuning.profile import Timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.noise, self.disturbed = 0.001, 0.0  # what comparisons tell of themselves
        self.compared: list[tuple[str, ...]] = []  # the names of each comparison

    def takes(self, seconds: Callable[[], float], call: Callable[[Any], Any] = lambda a: 2 * a, times: int = 1) -> Any:
        """A candidate that calls a function so often, and takes so many seconds beside."""

        def run(a: Any) -> Any:
            self.now += seconds()
            for _ in range(times):
                out = call(a)
            return out

        return run

    def of(self, call: Callable[[], Any]) -> float:
        before = self.now
        call()
        return round(self.now - before, 6)

    def compare(self, calls: dict[str, Callable[[], Any]], **_: Any) -> dict[str, Timing]:
        """Timings as the timer tells them, in microseconds."""
        self.compared.append(tuple(calls))
        seconds = {name: self.of(call) for name, call in calls.items()}
        stock = next(iter(seconds.values()))
        more = {"noise": self.noise, "rounds": 5, "disturbed": self.disturbed}
        return {name: Timing(1e-6 * s, s / stock, **more) for name, s in seconds.items()}
