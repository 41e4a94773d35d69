"""The parser of the installed Google Cloud CLI, without a connection or an account."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PARSE = """
import json, sys
sys.path[:0] = [f"{sys.argv[1]}/lib", f"{sys.argv[1]}/lib/third_party"]
from googlecloudsdk import gcloud_main
from googlecloudsdk.generated_clients.apis.tpu.v2 import tpu_v2_messages as api
parser = gcloud_main.CreateCLI([])._CLI__parser
for words in json.load(sys.stdin):
    parser.parse_args(words)  # exits with status 2 and a message
states = {"node": api.Node.StateValueValuesEnum, "queue": api.QueuedResourceState.StateValueValuesEnum}
print(json.dumps({name: sorted(enum.to_dict()) for name, enum in states.items()}))
"""


def parse_commands(commands: list[list[str]], config: Path) -> dict[str, list[str]]:
    """Parse commands with the parser of the installed gcloud, offline; return the states that its API has."""
    program = shutil.which("gcloud")
    root = Path(program).resolve().parents[1] if program else Path("/nonexistent")
    if not (root / "lib/googlecloudsdk").is_dir():
        pytest.skip("the Google Cloud CLI is not installed: its parser checks our commands")
    python = root / "platform/bundledpythonunix/bin/python3"
    done = subprocess.run(
        [python if python.exists() else sys.executable, "-c", _PARSE, root],
        input=json.dumps([words[1:] for words in commands]), capture_output=True, text=True, timeout=120,
        env={**os.environ, "CLOUDSDK_CONFIG": str(config), "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
