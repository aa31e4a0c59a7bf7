"""``python -m autokern``: the command line."""

import sys

from autokern.cli import main

sys.exit(main())
