"""Enable autokern in this process as soon as it imports gpytorch or linear_operator; until then import nothing.

`autokern run` puts the folder of this file in front of ``PYTHONPATH``, and Python imports ``sitecustomize`` when it
starts. The ``sitecustomize`` that this file hides is run, too. The syntax is that of Python 3.6, because a program may
start other versions of Python.
"""

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # not imported from `typing`: every process pays for an import here
if TYPE_CHECKING:
    from typing import Any

_LIBRARIES = ("linear_operator", "gpytorch")
_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    """Run the ``sitecustomize`` behind this folder on `sys.path`, if any, in place of this module.

    It is the program's own, or another autokern's. Modules in front of this folder are not run.
    """
    paths = [os.path.abspath(path or os.curdir) for path in sys.path]
    behind = sys.path[paths.index(_HERE) + 1 :] if _HERE in paths else sys.path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        from importlib._bootstrap import module_from_spec  # importing importlib.util is slow

        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _enable() -> None:
    """Enable autokern, if the importable package is the one that this file belongs to."""
    package = os.path.dirname(os.path.dirname(_HERE))
    import importlib.util
    import warnings

    spec = importlib.util.find_spec("autokern")
    if spec is None or not spec.origin or os.path.dirname(os.path.abspath(spec.origin)) != package:
        return
    try:
        import autokern.auto  # noqa: F401
    except Exception as error:  # the program's import goes on
        warnings.warn(f"autokern stays off in this process: {error!r}", stacklevel=2)


def _is_under_way(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


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
            others = [other for other in _LIBRARIES if other != name]
            if self in sys.meta_path and not any(map(_is_under_way, others)):
                sys.meta_path.remove(self)
                _enable()

        spec.loader.exec_module = exec_module
        return spec


if __name__ == "sitecustomize":
    if os.environ.get("AUTOKERN", "").strip().lower() not in ("0", "false", "off", "no"):
        sys.meta_path.insert(0, _Watch())
    _run_the_next()
