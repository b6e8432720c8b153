"""``python -m accelerate_commopt``: runs a script, or asks questions and writes a file."""

import sys

from accelerate_commopt import questions, runner

if __name__ == "__main__":
    if sys.argv[1:2] == ["config"]:
        sys.exit(questions.main(sys.argv[2:]))
    sys.exit(runner.main())
