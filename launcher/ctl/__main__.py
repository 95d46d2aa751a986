"""``python -m launcher.ctl``."""

import sys

from launcher.ctl import main

sys.exit(main())
