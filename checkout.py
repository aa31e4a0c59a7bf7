"""From a checkout: `checkout.py demo` shows what autokern saves here, `checkout.py test` runs the tests.

Both set up everything themselves: in the virtual environment that runs this file, else in one of their own, `.venv`.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOTORCH = sys.version_info >= (3, 11)  # which BoTorch needs
PROGRAM = HERE / "calibration" / "whole" / ("bo_logei.py" if BOTORCH else "gp_product.py")


def environment() -> Path:
    """Return the folder of commands of a virtual environment, which is made if it is not there."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.executable).parent
    folder = HERE / ".venv"
    if not folder.exists():
        print(f"making a virtual environment in {folder}", flush=True)
        venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def main(arguments: list[str]) -> int:
    """Set up, and run a small program off and on, or the tests."""
    if arguments[:1] not in (["demo"], ["test"]):
        print(__doc__, file=sys.stderr)
        return 2
    commands, testing = environment(), arguments[0] == "test"
    python, pins = str(commands / "python"), str(HERE / "tests" / "constraints.txt")
    what = ["-e", f"{HERE}[test]"] if testing else [str(HERE), *(["botorch"] if BOTORCH else [])]
    print("installing autokern and what it needs, some minutes at the first time", flush=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", pins, *what], check=True)
    if testing:
        return subprocess.run([python, "-m", "pytest", *arguments[1:]], cwd=HERE, check=False).returncode
    autokern = [python, "-P" if sys.version_info >= (3, 11) else "-B", "-m", "autokern"]  # the installed package
    subprocess.run([*autokern, "calibrate"], check=False)
    return subprocess.run([*autokern, "compare", "--budget", "60", "--", str(PROGRAM)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
