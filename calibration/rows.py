"""Rows and words for the figures that `end_to_end.py` measures: functions of the results in `end_to_end.json`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autokern.core.output import duration

KERNELS = {"rbf": "RBF", "matern52": "Matérn 5/2"}
COUNTS = {1: "one process", 2: "two processes", 4: "four processes"}
README_SIZES = (100, 1000, 4000)

Results = Mapping[str, Any]


class Row(NamedTuple):
    """One comparison as text; `headline` rows go to docs/figures.md."""

    what: str
    off: str
    on: str
    faster: str
    agreement: str
    headline: bool = False


def factor(figure: Results) -> str:
    """Return the median of the paired ratios with its quartiles."""
    low, high = figure["quartiles"]
    return f"{figure['ratio']:.2f}× ({low:.2f}–{high:.2f})"


def sentence(figure: Results) -> str:
    return f"off {duration(figure['off'])}, on {duration(figure['on'])}, {factor(figure)} faster"


def per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def rates(figure: Results) -> str:
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


def both(errors: Results) -> str:
    """Return the errors under autokern and in stock."""
    return f"{slashed(errors['on'])} (stock {slashed(errors['off'])})"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def compared(what: str, figure: Results, agreement: str, headline: bool = False) -> Row:
    return Row(what, duration(figure["off"]), duration(figure["on"]), factor(figure), agreement, headline)


def training_rows(figures: Results) -> Iterator[Row]:
    for case in figures["cases"]:
        kernel, n, dtype, against = case["kernel"], case["n"], case["dtype"], case["against_default"]
        on, default = (slashed(case["agreement"][side]) for side in ("on", "default"))
        headline = (kernel, dtype) == ("matern52", "float64") and n in README_SIZES
        what = f"training step, n = {n:,}, {KERNELS[kernel]}, {dtype}"
        yield compared(what, against, f"loss / gradient {on} (stock {default})", headline)


def diabetes_rows(figures: Results) -> Iterator[Row]:
    for case in figures["cases"]:
        what = f"training step, diabetes, {KERNELS[case['kernel']]}, {case['dtype']}"
        yield compared(what, case, f"loss {small(case['loss_difference'])}")


def processes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of processes and size, in steps per second of all processes together."""
    for case in figures["cases"]:
        processes, n = case["processes"], case["n"]
        what = f"{COUNTS.get(processes, f'{processes} processes')}, training steps, n = {n:,}"
        off, on = (per_second(case["rate"][side]) for side in ("off", "on"))
        yield Row(what, off, on, factor(case), "", (processes, n) == (2, 100))


def co2_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for some sizes along the stream, and one for the whole."""
    checks = {check["n"]: check for check in figures["checks"]}
    for case in figures["at"]:
        agreement = forecast_agreement([checks[case["n"]]]) if case["n"] in checks else ""
        yield compared(f"CO₂ stream, update at n = {case['n']:,}", case, agreement)
    off, on = (figures["total"][side] for side in ("off", "on"))
    what = f"CO₂ stream, n from {figures['start']:,} to {figures['last']:,}"
    yield Row(what, duration(off), duration(on), f"{off / on:.2f}×", forecast_agreement(figures["checks"]), True)


def forecast_agreement(checks: Sequence[Results]) -> str:
    """Return the largest errors of mean and variance against an exact refit, under autokern and in stock."""
    parts = ("mean", "variance")
    worst = {side: {part: max(check[side][part] for check in checks) for part in parts} for side in ("on", "off")}
    return f"forecast {both(worst)}"


def cg_rows(figures: Results) -> Iterator[Row]:
    largest = max(case["n"] for case in figures["cases"])
    for case in figures["cases"]:
        what = f"{figures['iterations']} CG iterations, n = {case['n']:,}, {case['dtype']}"
        headline = (case["n"], case["dtype"]) == (largest, "float64")
        yield compared(what, case, f"iterate {small(case['difference'])}", headline)


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def needs(figures: Results) -> str:
    return f"needs {figures['stock_needs_bytes'] / 2**30:,.0f} GiB"


def matrixfree_rows(figures: Results) -> Iterator[Row]:
    """Yield rows for training and predictions without a matrix, and for each comparison with conjugate gradients."""
    child, what = figures["child"], f"no matrix, n = {figures['n']:,}, float32"
    if "failed" in child:
        yield Row(f"{what}: training", needs(figures), "failed", "", child["failed"])
    else:
        agreement = f"{mebibytes(child['bytes'])}; {child['products']:.0f} products a step"
        step = duration(statistics.mean(child["seconds"]))
        yield Row(f"training step, {what}", needs(figures), step, "", agreement, True)
        yield Row(f"{figures['points']:,} means, {what}", "", duration(child["mean_seconds"]), "", "")
        yield Row(f"{figures['variances']:,} variances, {what}", "", duration(child["variance_seconds"]), "", "")
    for case in figures["cases"]:
        what = f"no matrix against CG on it, n = {case['n']:,}, {case['dtype']}, {case['way']}"
        agreement = f"loss / gradient {slashed({name: case[name] for name in ('loss', 'gradient')})}"
        yield Row(what, "", f"{case['products']} products", "", agreement)


def refusal_rows(figures: Results) -> Iterator[Row]:
    """Yield a row with the error that a matrix larger than memory raises."""
    child = figures["child"]
    time = "failed" if "failed" in child else duration(child["seconds"])
    agreement = child.get("failed") or f"{child['error']}: {child['message']}"
    yield Row(f"to_dense, n = {figures['n']:,}", needs(figures), time, "", agreement)


def elevation_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for the terrain: training and prediction together."""
    child, what = figures["child"], f"elevation model, n = {figures['n']:,}, {figures['steps']} steps and predictions"
    if "failed" in child:
        yield Row(what, needs(figures), "failed", "", child["failed"])
        return
    part, error, stock = child["part"], child["rmse"], figures.get("stock", {})
    exact = f"exact on {part['n']:,}: {part['rmse']:.0f} m, mean: {error['trivial']:.0f} m"
    seconds, faster = child["training_seconds"] + child["prediction_seconds"], ""
    if "rmse" in stock:
        most = stock["training_seconds"] + stock["prediction_seconds"]
        off, faster = duration(most), f"{most / seconds:.2f}×"
        exact = f"stock: {stock['bytes'] / 2**30:.1f} GiB, {stock['rmse']['all']:.0f} m; {exact}"
    elif "steps" in stock:
        off = f"> {duration(stock['training_seconds'])}, after {stock['steps']} steps"
        own = child["training_seconds"] / figures["steps"]
        faster = f"{stock['training_seconds'] / stock['steps'] / own:.1f}× a step"
    else:
        off = f"> {stock['limit']:.0f} s" if "not done" in stock.get("failed", "") else needs(figures)
    agreement = f"{mebibytes(child['bytes'])}; RMSE {error['all']:.0f} m ({exact})"
    yield Row(what, off, duration(seconds), faster, agreement, True)


def posterior_rows(figures: Results) -> Iterator[Row]:
    for case in figures["cases"]:
        which, fast = "first" if case["first"] else "later", ", fast_pred_var" if case["fast"] else ""
        what = f"{which} prediction, {figures['points']} points, n = {case['n']:,}{fast}"
        yield compared(what, case, both(case["error"]), case["n"] == 1000 and not case["fast"])


def points_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of test points; where stock's joint matrix does not fit, its size."""
    for case in figures["cases"]:
        on = case["sides"]["on"]
        seconds, mebibytes = (statistics.median(one[what] for one in on) for what in ("seconds", "mebibytes"))
        agreement = f"{mebibytes:.0f} MiB; {small(max(one['error'] for one in on))}"
        fits = "ratio" in case
        off, faster = (duration(case["off"]), factor(case)) if fits else (needs(case), "")
        last = case is figures["cases"][-1]
        yield Row(f"{case['m']:,} test points, n = {case['n']}", off, duration(seconds), faster, agreement, last)


def fantasies_rows(figures: Results) -> Iterator[Row]:
    for case in figures["cases"]:
        what = f"update by {several(case['q'], 'point')}, n = {case['n']:,}"
        yield compared(what, case, both(case["error"]), (case["q"], case["n"]) == (1, 800))


def acquisition_rows(figures: Results) -> Iterator[Row]:
    for case in figures["cases"]:
        agreement = f"{small(case['difference']['value'])} / {small(case['difference']['gradient'])}"
        what = f"{case['function']} and gradient, n = {case['n']}, {several(case['restarts'], 'restart')}"
        yield compared(what, case, agreement, case["restarts"] == 5)


ROWS: Mapping[str, Callable[[Results], Iterator[Row]]] = {
    "training": training_rows,
    "diabetes": diabetes_rows,
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
