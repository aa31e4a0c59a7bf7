"""Enable autokern in this process as soon as it imports gpytorch or linear_operator; until then import nothing.

The ``sitecustomize`` beside this file imports it in processes that a program under `autokern run` starts, and the file
of `autokern everywhere on` in all processes of an environment. The syntax is that of Python 3.6.
"""

import os
import sys

TYPE_CHECKING = False  # not imported from `typing`: every process pays for an import here
if TYPE_CHECKING:
    from typing import Any

_LIBRARIES = ("linear_operator", "gpytorch", "autokern")  # autokern imports the others: it must be whole before


def _enable() -> None:
    """Enable autokern, if the importable package is the one that this file belongs to and not a command."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import importlib.util
    import warnings

    spec = importlib.util.find_spec("autokern")
    if spec is None or not spec.origin or os.path.dirname(os.path.abspath(spec.origin)) != package:
        return
    try:
        from autokern.system.start import is_command_line

        if not is_command_line():
            import autokern.auto  # noqa: F401
    except Exception as error:  # the program's import goes on
        warnings.warn(f"autokern stays off in this process: {error!r}", stacklevel=2)


class _Watch:
    """A finder that wraps the loader of a library, and enables autokern after the library's import."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _LIBRARIES or path is not None:
            return None
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else []  # finders in front have found nothing
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, found), None)
        if not hasattr(getattr(spec, "loader", None), "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: "Any") -> None:
            execute(module)
            others = [getattr(sys.modules.get(other), "__spec__", None) for other in _LIBRARIES if other != name]
            if self in sys.meta_path and not any(getattr(spec, "_initializing", False) for spec in others):
                sys.meta_path.remove(self)
                _enable()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("AUTOKERN", "").strip().lower() not in ("0", "false", "off", "no"):
    sys.meta_path.insert(0, _Watch())
