"""`python -m steps NAME ...`: see steps/step.py."""

import sys

from steps.step import main

sys.exit(main(sys.argv[1:]))
