"""`python -m undertow` is the same as `undertow`."""

import sys

from undertow.cli import main

if __name__ == "__main__":
    sys.exit(main())
