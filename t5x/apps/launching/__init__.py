"""Start a t5x command on several processes, machines or a cluster: the engines of `t5x launch`.

Each engine is a module with `add_arguments(parser)` and `launch(args, command) -> exit status`. `command` is a checked
command line of t5x: a verb and its options.
"""

ENGINES = {
    "local": "processes on this machine",
    "slurm": "a batch job of a SLURM cluster, restarted until it is done",
    "tpu_vm": "a Cloud TPU VM, created, installed, followed, and replaced when it is preempted",
    "vertex": "a custom job of Vertex AI",
}  # {module of this package: what it starts}
