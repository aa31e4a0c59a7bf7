"""Watch the imports of this process (`autokern_watch`), and run the ``sitecustomize`` that this file hides.

`autokern run` puts the folder of this file in front of ``PYTHONPATH``, and Python imports ``sitecustomize`` when it
starts. The syntax is that of Python 3.6, because a program may start other versions of Python.
"""

import importlib.machinery
import os
import sys

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


if __name__ == "sitecustomize":
    import autokern_watch  # type: ignore[import-not-found]  # noqa: F401

    if "_AUTOKERN_FIRST_CALL" in os.environ:
        import autokern_first_call  # type: ignore[import-not-found]  # noqa: F401

    _run_the_next()
