"""`t5x launch`: starts a t5x command on several processes, machines or a cluster.

Each engine is a module with `add_arguments(parser)` and `launch(args, command) -> exit status`. `command` is a checked
command line of t5x: a verb and its options.
"""

ENGINES = {
    "local": "processes on this machine",
    "slurm": "a batch job of a SLURM cluster, restarted until it is done",
}  # the modules of this package, and what each starts
