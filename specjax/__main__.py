"""Run the command `specjax` as `python -m specjax`."""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
