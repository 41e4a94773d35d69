"""`t5x launch`: starts a t5x command on several processes, machines or a cluster.

Each engine is a module with `add_arguments(parser)` and `launch(args, command) -> exit status`. `command` is a checked
command line of t5x: a verb and its options.
"""

ENGINES = {
    "local": "processes on this machine",
    "slurm": "a batch job of a SLURM cluster, restarted until it is done",
    "tpu_vm": "a Cloud TPU VM, created, installed, followed, and replaced when it is preempted",
    "gke": "a JobSet on a Kubernetes cluster with TPUs or GPUs",
    "skypilot": "a managed job of SkyPilot, on the cheapest machines of your clouds",
    "vertex": "a custom job of Vertex AI",
}  # the modules of this package, and what each starts
