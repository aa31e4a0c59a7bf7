"""Every comparison of `end_to_end.json` as one row of text, and how its figures are written.

Everything here is a function of the results; nothing is measured. May import no other file of this folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

KERNELS = {"rbf": "RBF", "matern52": "Matérn 5/2"}
COUNTS = {1: "one process", 2: "two processes", 4: "four processes"}
README_SIZES = (100, 1000, 4000)

Results = Mapping[str, Any]


class Row(NamedTuple):
    """One comparison as text; `headline` rows go to the README."""

    what: str
    off: str
    on: str
    faster: str
    agreement: str
    headline: bool


def duration(seconds: float) -> str:
    """Return a time to three digits with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            value = seconds / size
            return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
    raise AssertionError


def factor(figure: Results) -> str:
    """Return the median of the paired ratios with its quartiles."""
    low, high = figure["quartiles"]
    return f"{figure['ratio']:.2f}× ({low:.2f}–{high:.2f})"


def sentence(figure: Results) -> str:
    """Return one comparison in words."""
    return f"off {duration(figure['off'])}, on {duration(figure['on'])}, {factor(figure)} faster"


def per_second(rate: float) -> str:
    """Return a number of steps per second."""
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def rates(figure: Results) -> str:
    """Return a comparison of steps per second in words."""
    off, on = (per_second(figure["rate"][side]) for side in ("off", "on"))
    return f"off {off}, on {on}, {factor(figure)} faster"


def small(value: float | None) -> str:
    """Return an error to one digit; one that is not finite is None in the JSON."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.0e}" if value else "0"


def slashed(errors: Results) -> str:
    """Return errors to one digit, a slash between them."""
    return " / ".join(map(small, errors.values()))


def training_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each trained model against stock with default settings."""
    for case in figures["cases"]:
        kernel, n, dtype, against = case["kernel"], case["n"], case["dtype"], case["against_default"]
        what = f"training step, n = {n:,}, {KERNELS[kernel]}, {dtype}"
        on, default = (slashed(case["agreement"][side]) for side in ("on", "default"))
        headline = (kernel, dtype) == ("matern52", "float64") and n in README_SIZES
        times = duration(against["off"]), duration(against["on"])
        yield Row(what, *times, factor(against), f"loss / gradient {on} (stock {default})", headline)


def diabetes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each trained model."""
    for case in figures["cases"]:
        what = f"training step, diabetes, {KERNELS[case['kernel']]}, {case['dtype']}"
        agreement = f"loss {small(case['loss_difference'])}"
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, False)


def botorch_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size; the README has room for one."""
    for case in figures["cases"]:
        off, on = (case["evaluations"][side] for side in ("off", "on"))
        agreement = f"parameters {small(case['relative_parameter_difference'])}; {on} evaluations (stock {off})"
        what = f"BoTorch fit, n = {case['n']:,}, d = {figures['d']}"
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, case["n"] == 100)


def processes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of processes and size, in steps per second of all processes together."""
    for case in figures["cases"]:
        processes, n = case["processes"], case["n"]
        name = COUNTS.get(processes, f"{processes} processes")
        what = f"{name}, training steps, n = {n:,}"
        off, on = (per_second(case["rate"][side]) for side in ("off", "on"))
        yield Row(what, off, on, factor(case), "", (processes, n) == (2, 100))


def co2_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for some sizes along the stream, and one for the whole."""
    checks = {check["n"]: check for check in figures["checks"]}
    for case in figures["at"]:
        n = case["n"]
        agreement = forecast_agreement([checks[n]]) if n in checks else ""
        times = duration(case["off"]), duration(case["on"])
        yield Row(f"CO₂ stream, update at n = {n:,}", *times, factor(case), agreement, False)
    total = figures["total"]
    what = f"CO₂ stream, n from {figures['start']:,} to {figures['last']:,}"
    times = duration(total["off"]), duration(total["on"])
    agreement = forecast_agreement(figures["checks"])
    yield Row(what, *times, f"{total['off'] / total['on']:.2f}×", agreement, True)


def forecast_agreement(checks: Sequence[Results]) -> str:
    """Return the largest errors of mean and variance against an exact refit, under autokern and in stock."""
    on, off = (
        slashed({what: max(check[side][what] for check in checks) for what in ("mean", "variance")})
        for side in ("on", "off")
    )
    return f"forecast {on} (stock {off})"


def cg_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and dtype; the largest size is the headline."""
    largest = max(case["n"] for case in figures["cases"])
    for case in figures["cases"]:
        what = f"{figures['iterations']} CG iterations, n = {case['n']:,}, {case['dtype']}"
        agreement = f"iterate {small(case['difference'])}"
        yield Row(
            what,
            duration(case["off"]),
            duration(case["on"]),
            factor(case),
            agreement,
            (case["n"], case["dtype"]) == (largest, "float64"),
        )


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / 2**20:,.0f} MiB"


def needs(figures: Results) -> str:
    """Return what stock would take."""
    return f"needs {figures['stock_needs_bytes'] / 2**30:,.0f} GiB"


def matrixfree_rows(figures: Results) -> Iterator[Row]:
    """Yield rows for training and predictions without a matrix, and for each comparison with conjugate gradients."""
    child, what = figures["child"], f"no matrix, n = {figures['n']:,}, float32"
    if "failed" in child:
        yield Row(f"{what}: training", needs(figures), "failed", "", child["failed"], False)
    else:
        agreement = f"{mebibytes(child['bytes'])}; {child['products']:.0f} products a step"
        step = duration(statistics.mean(child["seconds"]))
        yield Row(f"training step, {what}", needs(figures), step, "", agreement, True)
        yield Row(f"{figures['points']:,} means, {what}", "", duration(child["mean_seconds"]), "", "", False)
        yield Row(f"{figures['variances']:,} variances, {what}", "", duration(child["variance_seconds"]), "", "", False)
    for case in figures["cases"]:
        what = f"no matrix against CG on it, n = {case['n']:,}, {case['dtype']}, {case['way']}"
        agreement = f"loss / gradient {slashed({name: case[name] for name in ('loss', 'gradient')})}"
        yield Row(what, "", f"{case['products']} products", "", agreement, False)


def refusal_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for what was said to a matrix that cannot be had."""
    child = figures["child"]
    time = "failed" if "failed" in child else duration(child["seconds"])
    agreement = child.get("failed") or f"{child['error']}: {child['message']}"
    yield Row(f"to_dense, n = {figures['n']:,}", needs(figures), time, "", agreement, False)


def elevation_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for the terrain: training and prediction together."""
    child, what = figures["child"], f"elevation model, n = {figures['n']:,}, {figures['steps']} steps and predictions"
    if "failed" in child:
        yield Row(what, needs(figures), "failed", "", child["failed"], False)
        return
    part, error = child["part"], child["rmse"]
    agreement = (
        f"{mebibytes(child['bytes'])}; RMSE {error['all']:.0f} m (exact on {part['n']:,}: {part['rmse']:.0f} m, "
        f"mean: {error['trivial']:.0f} m)"
    )
    seconds = child["training_seconds"] + child["prediction_seconds"]
    yield Row(what, needs(figures), duration(seconds), "", agreement, True)


def posterior_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and setting, first predictions before later ones."""
    for case in figures["cases"]:
        which = "first" if case["first"] else "later"
        fast = ", fast_pred_var" if case["fast"] else ""
        what = f"{which} prediction, {figures['points']} points, n = {case['n']:,}{fast}"
        agreement = f"{slashed(case['error']['on'])} (stock {slashed(case['error']['off'])})"
        headline = case["n"] == 1000 and not case["fast"]
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, headline)


def points_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of test points; where stock's joint matrix does not fit, its size."""
    for case in figures["cases"]:
        on = case["sides"]["on"]
        seconds, mebibytes = (statistics.median(one[what] for one in on) for what in ("seconds", "mebibytes"))
        agreement = f"{mebibytes:.0f} MiB; {small(max(one['error'] for one in on))}"
        off, faster = f"needs {case['stock_needs_bytes'] / 2**30:.0f} GiB", ""
        if "ratio" in case:
            off, faster = duration(case["off"]), factor(case)
        last = case is figures["cases"][-1]
        yield Row(f"{case['m']:,} test points, n = {case['n']}", off, duration(seconds), faster, agreement, last)


def fantasies_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and number of new points."""
    for case in figures["cases"]:
        points = f"{case['q']} point{'s' * (case['q'] > 1)}"
        agreement = f"{slashed(case['error']['on'])} (stock {slashed(case['error']['off'])})"
        what = f"update by {points}, n = {case['n']:,}"
        headline = (case["q"], case["n"]) == (1, 800)
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, headline)


def acquisition_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each acquisition function and number of restarts."""
    for case in figures["cases"]:
        agreement = f"{small(case['difference']['value'])} / {small(case['difference']['gradient'])}"
        restarts = f"{case['restarts']} restart{'s' * (case['restarts'] > 1)}"
        what = f"{case['function']} and gradient, n = {case['n']}, {restarts}"
        headline = case["restarts"] == 5
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, headline)


ROWS: Mapping[str, Callable[[Results], Iterator[Row]]] = {
    "training": training_rows,
    "diabetes": diabetes_rows,
    "botorch": botorch_rows,
    "processes": processes_rows,
    "posterior": posterior_rows,
    "points": points_rows,
    "fantasies": fantasies_rows,
    "acquisition": acquisition_rows,
    "co2": co2_rows,
    "cg": cg_rows,
    "matrixfree": matrixfree_rows,
    "refusal": refusal_rows,
    "elevation": elevation_rows,
}


def rows(results: Results) -> Iterator[Row]:
    """Yield every comparison of the workloads that were run."""
    for name, yielded in ROWS.items():
        if name in results:
            yield from yielded(results[name])
