"""The version of t5x and where it is installed."""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the directory t5x/
