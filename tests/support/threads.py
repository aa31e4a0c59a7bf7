"""Work in threads of its own, all at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any


def in_threads(work: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """Call a function in a new thread for each of its arguments; return what it returns, or raise what it raises."""
    calls = list(zip(*arguments, strict=True))
    begin = Barrier(len(calls))

    def begun(call: tuple[Any, ...]) -> Any:
        begin.wait(60)  # a thread for each of them
        return work(*call)

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begun, calls))
