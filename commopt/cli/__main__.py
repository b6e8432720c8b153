"""``python -m commopt.cli``."""

import sys

from commopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
