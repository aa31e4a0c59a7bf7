"""Portrait: a profile as HTML, as a data frame and as a plot of time over size; `Profile` shows itself by these."""

from __future__ import annotations

from typing import Any

import msgspec

from autokern.cli import summary
from autokern.cli.report.sweep import commonest
from autokern.cli.thresholds import crossovers
from autokern.core import shown
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.tuning.profile import Profile

__all__ = ["crossovers", "frame", "html", "plot"]


def html(profile: Profile) -> str:
    """Return a table of ops for a notebook."""
    rows = [
        (row.op, f"{row.device} {row.dtype}", row.measured, f"{row.speedup:.2f}",
         "by size" if row.crossovers else row.fastest)
        for row in summary.known(profile).ops
    ]  # fmt: skip
    bans = [f"{ban.op}.{ban.candidate} is banned on {ban.device} {ban.dtype}: {ban.reason}" for ban in profile.banned]
    return shown.table(repr(profile), ("op", "on", ">problems", ">× stock", "fastest"), rows, bans)


def frame(profile: Profile) -> Any:
    """Return a row for each problem and candidate."""
    fields = Problem.__struct_fields__
    rows = (
        msgspec.structs.asdict(trial.problem)
        | {"candidate": name, "seconds": timing.seconds, "speedup": 1.0 / timing.ratio}
        for trial in profile.trials
        for name, timing in trial.timings.items()
    )
    return shown.frame(rows, (*fields, "candidate", "seconds", "speedup"))


def plot(profile: Profile, op: str, device: str, dtype: str, ax: Any) -> Any:
    """Draw the time of each candidate over the size, for the commonest kind of problem of an op."""
    chosen = commonest(profile.trials, (op, dtype, device))
    if not chosen:
        known = ", ".join(sorted({t.problem.op for t in profile.trials})) or "nothing"
        raise SettingsError(f"a plot of {op} on {device} in {dtype} was asked for; the profile knows {known}")
    ax = shown.axes(ax)
    for name in dict.fromkeys(name for trial in chosen for name in trial.timings):
        of = [trial for trial in chosen if name in trial.timings]
        sizes, seconds = [t.problem.n for t in of], [t.timings[name].seconds for t in of]
        ax.plot(sizes, seconds, marker="o", linewidth=2.5 if name == "stock" else 1.2, label=name)
    ax.set(xscale="log", yscale="log", xlabel="n", ylabel="seconds of a call", title=chosen[0].problem.family)
    ax.legend(fontsize="small")
    return ax
