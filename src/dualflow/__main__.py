"""``python -m dualflow`` is the command ``dualflow``."""

import sys

from dualflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
