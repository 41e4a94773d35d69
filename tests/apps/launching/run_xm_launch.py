"""Run t5x/scripts/xm_launch.py with the real XManager, up to the call that would submit the job; print that call.

It runs in the environment with the clients of clouds. Only the account, the project, and the call are stand-ins.
"""

import json
import runpy
import sys
from pathlib import Path
from unittest import mock

from google.cloud import aiplatform
from xmanager.cloud import auth, build_image, docker_lib

CALLS, DOCKERFILES = [], []


def build(path: str, dockerfile: str, image: str, pull_image: bool) -> str:
    DOCKERFILES.append(Path(dockerfile).read_text())
    return image


class CustomJob:
    resource_name = "projects/1/locations/us-central1/customJobs/2"

    def __init__(self, **arguments):
        CALLS.append(arguments)

    def submit(self, **arguments):
        pass

    def _dashboard_uri(self):
        return "https://console.cloud.google.com"


patches = {
    (auth, "get_project_name"): lambda: "my-project",
    (auth, "get_bucket"): lambda: "my-bucket",
    (auth, "get_service_account"): lambda: "a@b.c",
    (docker_lib, "is_docker_installed"): lambda: False,
    (build_image, "build_by_dockerfile"): build,
    (aiplatform, "init"): lambda **_: None,
    (aiplatform, "CustomJob"): CustomJob,
}
for (module, name), value in patches.items():
    mock.patch.object(module, name, value).start()
out, sys.stdout = sys.stdout, sys.stderr
sys.argv = ["xm_launch.py", *sys.argv[1:]]
try:
    runpy.run_path(str(Path(__file__).parents[3] / "t5x/scripts/xm_launch.py"), run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
[call] = CALLS
[pool] = call["worker_pool_specs"]
print(
    json.dumps(
        {
            "title": call["display_name"],
            "machine": pool.machine_spec.machine_type,
            "accelerator": pool.machine_spec.accelerator_type.name,
            "cores": pool.machine_spec.accelerator_count,
            "image": pool.container_spec.image_uri,
            "args": list(pool.container_spec.args),
            "dockerfiles": DOCKERFILES,
        }
    ),
    file=out,
)
