"""autokern: an auto-tuning run-time dispatcher for Gaussian processes on PyTorch.

Only public names live here; `docs/design.md` describes the packages behind them.
"""

import contextlib as _contextlib
import io as _io
import sys as _sys
from typing import Any as _Any

from autokern.core.releases import __version__ as __version__
from autokern.system import start as _start

if _start.only_helps():  # this process prints help or versions, and ends
    _sys.meta_path.insert(0, _start.Later())
else:
    try:
        with (
            _start.importing(),
            _contextlib.redirect_stdout(_io.StringIO()),
        ):  # KeOps prints on standard output where CUDA is missing
            from autokern import covariance, linalg
            from autokern.core.decision import Decision
            from autokern.core.errors import (
                AutokernError,
                AutokernWarning,
                MemoryBudgetError,
                ProfileError,
                RanksError,
                SettingsError,
            )
            from autokern.core.problem import Problem
            from autokern.core.releases.known import Status
            from autokern.evaluation.calibrate import calibrate
            from autokern.evaluation.compared import Compared, compare
            from autokern.evaluation.compared import load_ipython_extension as load_ipython_extension
            from autokern.evaluation.served import Served, explain
            from autokern.hooks.install import disable, enable, enabled, is_enabled, status
            from autokern.model import libraries as _libraries  # noqa: F401  (before any hook is installed)
            from autokern.runtime.api import Explanation, op, profile
            from autokern.runtime.dispatch import stats, using
            from autokern.runtime.ranks import ranks
            from autokern.tuning.profile import Profile
    except KeyboardInterrupt:
        if _start.is_command_line():  # no traceback of modules that the user does not know
            raise SystemExit(130) from None
        raise
    except (AttributeError, ImportError, KeyError, TypeError) as _error:  # a library lacks a name that autokern imports
        _reason = f"it does not fit the installed libraries: {type(_error).__name__}: {_error}"

        def __getattr__(name: str) -> _Any:
            if name in __all__:
                from autokern.core.errors import AutokernError

                raise AutokernError(_reason)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AutokernError", "AutokernWarning", "Compared", "Decision", "Explanation", "MemoryBudgetError", "Problem",
    "Profile", "ProfileError", "RanksError", "Served", "SettingsError", "Status", "calibrate", "compare", "covariance",
    "disable", "enable", "enabled", "explain", "is_enabled", "linalg", "op", "profile", "ranks", "stats", "status",
    "using",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
