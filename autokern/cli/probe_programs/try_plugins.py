"""The outcome of running the candidates of each plugin once, as JSON."""

from __future__ import annotations

import json

from autokern.cli.plugin_check import tried


def main() -> None:
    """Run the candidates and print the outcome."""
    print(json.dumps(tried()))


if __name__ == "__main__":
    main()
