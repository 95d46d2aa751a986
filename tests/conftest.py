"""What holds for every test."""

import os

# Where it is set, Python writes a line in pieces, and those of workers that share one output fall between each other.
# Users may set it, as under torchrun; the tests read whole lines.
os.environ.pop("PYTHONUNBUFFERED", None)
