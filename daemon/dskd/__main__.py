"""`python -m dskd`."""

import sys

from dskd.cli import main

sys.exit(main())
