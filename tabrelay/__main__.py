"""`python -m tabrelay` is the command `tabrelay`."""

from __future__ import annotations

import sys

from tabrelay.cli import main

if __name__ == "__main__":
    sys.exit(main())
