"""Check specifications with the real clients: `python validate.py < {kind: [specification, …]}`.

It runs in an environment of its own (see the Makefile), because these clients have many requirements. The output is
{kind: [error or null, …]}; {kind: "skipped: …"} if the client is not installed.
"""

import copy
import json
import os
import sys
import tempfile
from typing import Any


def kubernetes_object(spec: dict[str, Any]) -> None:
    """Deserialize with the Kubernetes client, and compare what comes out, so that unknown fields are refused."""
    import kubernetes

    client = kubernetes.client.ApiClient()
    kind = {"v1": "V1", "batch/v1": "V1", "apps/v1": "V1"}[spec["apiVersion"]] + spec["kind"]

    class Response:
        data = json.dumps(spec)

    result = client.sanitize_for_serialization(_deserialize(client, Response, kind))
    _compare(spec, result, kind)


def _deserialize(client: Any, response: Any, kind: str) -> Any:
    try:
        return client.deserialize(response, kind)
    except TypeError:  # newer clients take the text and its type
        return client.deserialize(response.data, kind, "application/json")


def jobset(spec: dict[str, Any]) -> None:
    """Check with the models of JobSet's API that Kubeflow Trainer ships, and the Job in it with Kubernetes' client."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    result = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(spec)).to_dict()
    _compare(spec, result, "JobSet")
    for replicated in spec["spec"]["replicatedJobs"]:
        template = replicated["template"]
        kubernetes_object({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **template})


def _compare(given: Any, kept: Any, where: str) -> None:
    """Raise a ValueError for a field that the model dropped or changed."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or (key not in kept and value not in (None, [], {})):
                raise ValueError(f"{where} has no field {key!r}")
            _compare(value, kept.get(key, value), f"{where}.{key}")
    elif isinstance(given, list):
        if len(given) != len(kept):
            raise ValueError(f"{where} lost entries")
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            _compare(one, other, f"{where}[{index}]")
    elif given != kept:
        raise ValueError(f"{where} is {given!r}, which became {kept!r}")


def sky(spec: dict[str, Any]) -> None:
    """Load the task with SkyPilot."""
    import sky

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(spec, file)
        file.flush()
        task = sky.Task.from_yaml(file.name)
    assert task.num_nodes == spec["num_nodes"]
    for resources in task.resources:
        assert resources.use_spot == spec["resources"]["use_spot"]
        assert dict(resources.accelerators) == spec["resources"]["accelerators"], resources.accelerators


def vertex(spec: dict[str, Any]) -> None:
    """Parse as the CustomJobSpec of Vertex AI's API, which refuses unknown fields and values."""
    from google.cloud.aiplatform_v1.types import CustomJobSpec
    from google.protobuf import json_format

    json_format.ParseDict(spec, CustomJobSpec.pb(CustomJobSpec()), ignore_unknown_fields=False)


CHECKS = {"kubernetes": kubernetes_object, "jobset": jobset, "sky": sky, "vertex": vertex}


def main() -> None:
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    found: dict[str, Any] = {}
    out, sys.stdout = sys.stdout, sys.stderr
    for kind, specs in json.load(sys.stdin).items():
        errors: list[str | None] = []
        try:
            for spec in specs:
                try:
                    CHECKS[kind](spec)
                    errors.append(None)
                except ImportError:
                    raise
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
            found[kind] = errors
        except ImportError as error:
            found[kind] = f"skipped: {error}"
    print(json.dumps(found), file=out)


if __name__ == "__main__":
    main()
