"""`python -m dskctl`."""

import sys

from dskctl.cli import main

sys.exit(main())
