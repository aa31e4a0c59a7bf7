"""Print how many scenarios there are, how many differ from stock, and in what: ``python tests/differential/report.py``.

With ``PYTHONPATH`` set to another copy of autokern, that copy is judged.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import time
import warnings

import autokern


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of scenarios, with wildcards")
    parser.add_argument("--one-host", action="store_true", help="each scenario with one of the recorded profiles only")
    parser.add_argument("--slowest", type=int, default=0, help="print so many of the slowest scenarios")
    asked = parser.parse_args()
    logging.getLogger("autokern").disabled = True
    warnings.simplefilter("ignore")
    import scenarios  # noqa: F401
    from judge import judged
    from table import TABLE

    chosen = [one for name, one in TABLE.items() if any(fnmatch.fnmatch(name, p) for p in asked.patterns)]
    print(f"autokern of {autokern.__path__[0]}")
    started, times, wrong, runs = time.process_time(), [], 0, 0
    for scenario in chosen:
        before = time.process_time()
        made, found = judged(scenario, both=not asked.one_host)
        times.append((time.process_time() - before, scenario.name, made))
        runs += made
        wrong += bool(found)
        for way, texts in found.items():
            for text in texts[:3]:
                print(f"{scenario.name} [{way}]: {text}", flush=True)
    for seconds, name, made in sorted(times, reverse=True)[: asked.slowest]:
        print(f"{seconds:6.2f} s, {made} runs: {name}")
    print(f"{len(chosen)} scenarios, {runs} runs, {time.process_time() - started:.0f} s; {wrong} scenarios differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
