"""The `t5x` command: the parser, the table of verbs, and the verbs of the core."""
