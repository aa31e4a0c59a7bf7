"""Portrait: a profile as text, as HTML, as a data frame and as a plot of time over size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autokern.core import shown
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem

if TYPE_CHECKING:
    from autokern.tuning.profile import Profile

__all__ = ["Portrayed"]


class Portrayed:
    """What a profile shows of itself; `Profile` inherits it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _line(self)  # type: ignore[arg-type]

    def _repr_html_(self) -> str:
        return _html(self)  # type: ignore[arg-type]

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row for each problem and candidate; times in seconds.

        Raises
        ------
        AutokernError
            If pandas is not installed.
        """
        return _frame(self)  # type: ignore[arg-type]

    def plot(self, op: str, device: str = "cpu", dtype: str = "float64", ax: Any = None) -> Any:
        """Draw the time of each candidate over the size, for the kind of problem of an op that has most sizes.

        Parameters
        ----------
        op, device, dtype : str
            Op, device kind and dtype.
        ax : matplotlib axes, optional
            Where to draw; by default new axes.

        Returns
        -------
        matplotlib axes

        Raises
        ------
        SettingsError
            If nothing of the kind was measured.
        AutokernError
            If matplotlib is not installed.
        """
        return _plot(self, op, device, dtype, ax)  # type: ignore[arg-type]


def _line(profile: Profile) -> str:
    """Return a profile in one line."""
    ops = {trial.problem.op for trial in profile.trials}
    if not ops:
        return "Profile(nothing measured)"
    when = f", last on {profile.created[:10]}" if profile.created else ""
    return (
        f"Profile({len(profile.trials)} problems of {len(ops)} ops{when}, host {profile.fingerprint[:8] or 'unknown'})"
    )


def _html(profile: Profile) -> str:
    """Return a table of ops for a notebook."""
    from autokern.tuning import summary  # it needs profiles itself

    rows = [
        (
            row.op,
            f"{row.device} {row.dtype}",
            str(row.problems),
            row.grade,
            f"{row.speedup:.2f}",
            "by size" if row.crossovers else row.fastest,
        )
        for row in summary.known(profile).ops
    ]
    columns = ("op", "on", ">problems", "grade", ">× stock", "fastest")
    bans = [f"{ban.op}.{ban.candidate} is banned on {ban.device} {ban.dtype}: {ban.reason}" for ban in profile.banned]
    return shown.table(_line(profile), columns, rows, bans)


def _frame(profile: Profile) -> Any:
    """Return a row for each problem and candidate."""
    fields = Problem.__struct_fields__
    rows = (
        {
            **{name: getattr(trial.problem, name) for name in fields},
            "candidate": name,
            "seconds": timing.seconds,
            "speedup": 1.0 / timing.ratio,
        }
        for trial in profile.trials
        for name, timing in trial.timings.items()
    )
    return shown.frame(rows, (*fields, "candidate", "seconds", "speedup"))


def _plot(profile: Profile, op: str, device: str, dtype: str, ax: Any) -> Any:
    """Draw the time of each candidate over the size, for the commonest kind of problem of an op."""
    from autokern.tuning import sweep  # it needs profiles itself

    chosen = sweep.commonest(
        t for t in profile.trials if (t.problem.op, t.problem.device, t.problem.dtype) == (op, device, dtype)
    )
    if not chosen:
        known = ", ".join(sorted({t.problem.op for t in profile.trials})) or "nothing"
        raise SettingsError(f"a plot of {op} on {device} in {dtype} was asked for; the profile knows {known}")
    ax = shown.axes(ax)
    for name in dict.fromkeys(name for trial in chosen for name in trial.timings):
        of = [trial for trial in chosen if name in trial.timings]
        sizes, seconds = [t.problem.n for t in of], [t.timings[name].seconds for t in of]
        ax.plot(sizes, seconds, marker="o", linewidth=2.5 if name == "stock" else 1.2, label=name)
    title = chosen[0].problem.family
    ax.set(xscale="log", yscale="log", xlabel="n", ylabel="seconds of a call", title=title)
    ax.legend(fontsize="small")
    return ax
