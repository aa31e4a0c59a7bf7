"""``python -m autokern``: the command line."""

import sys

from autokern.cli.app import main

sys.exit(main())
