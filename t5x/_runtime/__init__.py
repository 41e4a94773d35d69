"""What every part of t5x builds on: errors, imports of modules, logging, signals, the version and where it is."""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the directory t5x/
