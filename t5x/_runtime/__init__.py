"""What every part of t5x builds on: errors, imports of modules, logging, signals and the version."""
