"""``python -m commopt.cli``."""

import sys

from commopt.cli import main

sys.exit(main())
