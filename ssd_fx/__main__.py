"""`python -m ssd_fx` is the command `ssd-fx`."""

import sys

from ssd_fx.cli import main

sys.exit(main())
