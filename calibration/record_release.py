"""Record releases of the libraries, after the suites passed on them: fingerprints of what autokern hooks or relies on.

    python calibration/record_release.py FOLDER_OR_WHEEL ...   adds releases to autokern/core/releases/known.json
    ... --without 'gpytorch.models.exact_*'                    leaves out modules on which hooks do not fit a release
    python calibration/record_release.py --check               says whether what is installed is recorded

Sources are compiled, not imported, by every Python that is found (python3.10 to python3.19 on the PATH, those given by
`--python`, and the one that runs this), so one machine records for all of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "autokern" / "core" / "releases" / "known.json"
FINGERPRINTS = ROOT / "autokern" / "core" / "releases" / "recorded.py"
LIBRARIES = ("gpytorch", "linear_operator", "botorch", "torch")
MODULES = {
    "gpytorch.kernels.*": "", "gpytorch.means.*": "", "gpytorch.constraints.*": "", "gpytorch.priors.*": "",
    "gpytorch.likelihoods.likelihood": "", "gpytorch.likelihoods.gaussian_likelihood": "",
    "gpytorch.likelihoods.hadamard_gaussian_likelihood": "", "gpytorch.likelihoods.multitask_gaussian_likelihood": "",
    "gpytorch.likelihoods.noise_models": "", "gpytorch.mlls.exact_marginal_log_likelihood": "",
    "gpytorch.mlls.inducing_point_kernel_added_loss_term": "",
    "gpytorch.mlls.leave_one_out_pseudo_likelihood": "", "gpytorch.mlls.marginal_log_likelihood": "",
    "gpytorch.models.exact_*": "", "gpytorch.models.gp": "",
    "gpytorch.module": "", "gpytorch.variational.variational_strategy": "",
    "gpytorch.distributions.distribution": "", "gpytorch.distributions.multi*": "",
    "gpytorch.lazy.*": "", "gpytorch.functions.*": "", "gpytorch.utils.memoize": "",
    "linear_operator.operators._linear_operator": "", "linear_operator.operators.*_linear_operator": "",
    "linear_operator.operators.*_representation_tree": "",
    "linear_operator.functions": "", "linear_operator.functions.*": "", "linear_operator.utils.*": "",
    "botorch.generation.gen": "get_reasons_against_fast_path|_get_f_np_wrapper",
    "botorch.models.kernels.categorical": "", "botorch.models.kernels.positive_index": "",
    "botorch.models.kernels.linear_truncated_fidelity": "", "botorch.models.kernels.downsampling": "",
    "botorch.models.kernels.exponential_decay": "",
    "botorch.models.transforms.input": "", "botorch.models.transforms.utils": "",
    "botorch.models.utils.priors": "", "botorch.models.multitask": "",
    "botorch.models.gp_regression": "", "botorch.models.model": "Model.*", "botorch.optim.closures.*": "",
    "botorch.optim.optimize": "_optimize_acqf", "botorch.optim.utils.common": "_handle_numerical_errors",
    "botorch.optim.utils.numpy_utils": "as_ndarray", "botorch.utils.context_managers": "zero_grad_ctx",
    "torch.distributions.transforms": "Transform.*|_InverseTransform.*|ExpTransform.*",
    "torch.distributions.[bdghlntmu]*":
        "*.log_prob|MultivariateNormal.mean|*lazy_property*|_batch_mahalanobis|_sum_rightmost",
    "torch.nn.modules.activation": "Softplus.*", "torch.functional": "broadcast_shapes",
    "torch.optim.optimizer": "*._use_grad|Optimizer.add_param_group|Optimizer.*state_dict|Optimizer.zero_grad",
    "torch._compile": "",
    "torch.nn.modules.module": "Module.train|Module.eval|Module._*call_impl",
    "torch.utils._contextlib": "",
}  # fmt: skip
"""Modules that are recorded, and which functions of each: patterns, empty for all."""
CONDITIONAL = ("gpytorch.likelihoods.likelihood:Likelihood.",)
"""What a library defines only where another package is installed."""


def sources(path: Path) -> dict[str, dict[str, str]]:
    """Return the sources of a folder or wheel by library and module, of those modules that are recorded."""
    found: dict[str, dict[str, str]] = {}
    if path.is_dir():
        files = {str(file.relative_to(path)): file for name in LIBRARIES for file in path.glob(f"{name}/**/*.py")}
        read = {name: file.read_text(encoding="utf-8") for name, file in files.items() if wanted(module_of(name))}
    else:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py") and wanted(module_of(name))]
            read = {name: wheel.read(name).decode() for name in names}
    for name, text in read.items():
        module = module_of(name)
        found.setdefault(module.partition(".")[0], {})[module] = text
    return found


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def wanted(module: str) -> str | None:
    """Return the pattern of a module's functions that are recorded, None for none."""
    return next((names or "*" for pattern, names in MODULES.items() if fnmatch.fnmatchcase(module, pattern)), None)


def version_of(library: str, path: Path) -> str:
    """Return the version by the metadata of a folder or the name of a wheel."""
    if path.is_file():
        return path.name.split("-")[1]
    found = [re.fullmatch(rf"{library}-(.+)\.dist-info", entry.name) for entry in path.iterdir()]
    versions = [match[1] for match in found if match]
    if len(versions) != 1:
        raise SystemExit(f"{path} has no metadata of {library}, or several")
    return versions[0].partition("+")[0]


def interpreters(given: list[str]) -> list[str]:
    """Return one interpreter for each version of Python."""
    found: dict[str, str] = {}
    for python in (sys.executable, *given, *(shutil.which(f"python3.{minor}") for minor in range(10, 20))):
        asked = [python or "", "-c", "import sys; print(sys.version_info[:2])"]
        run = subprocess.run(asked, capture_output=True, text=True, check=False) if python else None
        if python and run and run.returncode == 0:  # some are names only
            found.setdefault(run.stdout, python)
    return list(found.values())


DUMP = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("fingerprints", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = {name: list(module.definitions(text, name)) for name, text in json.load(sys.stdin).items()}
json.dump(["%d.%d" % sys.version_info[:2], found], sys.stdout)
"""


def compiled(python: str, texts: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the version of an interpreter, and what it finds in sources."""
    asked = [python, "-I", "-W", "ignore", "-c", DUMP, str(FINGERPRINTS)]
    run = subprocess.run(asked, input=json.dumps(texts), capture_output=True, text=True, check=True)
    version, found = json.loads(run.stdout)
    return version, found


def release(texts: dict[str, str], pythons: list[str]) -> tuple[set[str], dict[str, dict[str, set[str]]]]:
    """Return the versions of Python, and the fingerprints of a release by module and name."""
    marks: dict[str, dict[str, set[str]]] = {module: {} for module in texts}
    versions = set()
    for python in pythons:
        version, found = compiled(python, texts)
        versions.add(version)
        for module, functions in found.items():
            for name, code, syntax in functions:
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in (wanted(module) or "").split("|")):
                    marks[module].setdefault(name, set()).update((code, syntax))
    return versions, marks


def added(table: dict[str, Any], library: str, version: str, marks: dict[str, dict[str, set[str]]]) -> None:
    """Add a release to a table."""
    within = set(table["within"].split())
    before = [one for one in table["releases"].get(library, ()) if one != version]
    for module, names in marks.items():
        known = table["code"].setdefault(module, {})
        fresh = not known
        within.update(mark for name, marks in names.items() if "<" in name for mark in marks)
        for name in known.keys() | {name for name in names if "<" not in name}:
            had, has = set(known.get(name, "").split()), names.get(name, set())
            sometimes = f"{module}:{name}".startswith(CONDITIONAL) or (not fresh and before and not (had and has))
            known[name] = " ".join(sorted(had | has | ({"?"} if sometimes else set())))
        table["code"][module] = dict(sorted(known.items()))
    table["within"] = " ".join(sorted(within))
    table["releases"][library] = sorted([*before, version], key=lambda text: [int(n) for n in re.findall(r"\d+", text)])


def written(table: dict[str, Any]) -> str:
    """Return the text of a table: a line for each module."""
    lines = [f"  {json.dumps(module)}: {json.dumps(names)}" for module, names in sorted(table["code"].items()) if names]
    head = f'{{\n"releases": {json.dumps(table["releases"], sort_keys=True)},\n"python": {json.dumps(table["python"])},'
    return f'{head}\n"within": {json.dumps(table["within"])},\n"code": {{\n' + ",\n".join(lines) + "\n}\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders with installed libraries, or wheels")
    parser.add_argument("--python", action="append", default=[], help="another interpreter")
    parser.add_argument("--without", action="append", default=[], metavar="MODULE", help="stays unknown: stock runs")
    parser.add_argument("--fresh", action="store_true", help="forget the releases that are recorded")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    empty: dict[str, Any] = {"releases": {}, "python": [], "within": "", "code": {}}
    table = empty if asked.fresh else json.loads(TABLE.read_text(encoding="utf-8"))
    before, paths = written(table), asked.paths
    if asked.check:
        origins = [importlib.util.find_spec(name) for name in LIBRARIES]
        paths = sorted({Path(str(spec.origin)).parent.parent for spec in origins if spec is not None})
    for path in paths:
        for library, texts in sorted(sources(path).items()):
            version = version_of(library, path)
            versions, marks = release(texts, [sys.executable] if asked.check else interpreters(asked.python))
            fits = {
                module: names
                for module, names in marks.items()
                if not any(fnmatch.fnmatchcase(module, pattern) for pattern in asked.without)
            }
            added(table, library, version, fits)
            table["python"] = sorted({*table["python"], *versions}, key=lambda text: int(text.partition(".")[2]))
            print(f"{library} {version}, Python {', '.join(sorted(versions))}")
    if not asked.check:
        TABLE.write_text(written(table), encoding="utf-8")
    elif written(table) != before:
        raise SystemExit("the installed releases are not recorded; run the suites, then this script with their folder")


if __name__ == "__main__":
    main()
