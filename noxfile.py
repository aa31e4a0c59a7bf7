"""Python 3.10 to 3.13 by the lowest and the newest torch: the whole suite on one pair, a selection on the others.

`nox` runs what this machine has interpreters for; `nox -s "selection-3.12(versions='lowest')"` one pair.
"""

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MAIN = "3.11"
LOWEST = ["torch==2.11.*", "gpytorch==1.15.2", "linear_operator==0.6.1"]
"""The lower bounds of pyproject.toml."""
SELECTION = [
    "tests/core", "tests/runtime/test_api.py", "tests/runtime/test_dispatch.py", "tests/cli/test_run.py",
    "tests/hooks/test_torch.py", "tests/hooks/test_repeated_changes.py",
]  # fmt: skip

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["suite", "selection"]


def _install(session: nox.Session, versions: str) -> None:
    """Install autokern with the lowest, the newest or the pinned libraries; torch first, as a build for CPUs."""
    if versions == "pinned":
        session.install("-c", "tests/constraints.txt", "-e", ".[test]")
        return
    wanted = LOWEST if versions == "lowest" else ["torch", "gpytorch", "linear_operator"]
    session.install("--extra-index-url", "https://download.pytorch.org/whl/cpu", *wanted)
    session.install("-e", ".[test]", *wanted)
    session.run("python", "-c", "import torch; assert torch.version.cuda is None, 'a build for CUDA was installed'")


def _starts(session: nox.Session) -> None:
    session.run("python", "-W", "error::FutureWarning:autokern", "-c", "import autokern.auto")
    session.run("autokern", "--help", silent=True)
    session.run("autokern", "doctor", "--json", silent=True, success_codes=[0, 1])


@nox.session(python=MAIN)
def suite(session: nox.Session) -> None:
    """All fast tests, by the pinned versions."""
    _install(session, "pinned")
    _starts(session)
    session.run("pytest", *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["lowest", "newest"])
def selection(session: nox.Session, versions: str) -> None:
    """Import, the command line and some 900 tests."""
    _install(session, versions)
    _starts(session)
    session.run("pytest", "-q", *SELECTION, *session.posargs)
