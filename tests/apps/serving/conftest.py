"""One server with a tiny model for all tests of a module."""

import pytest

from tests.apps.serving.servers import Server, serving
from tests.inference.models import byte_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return byte_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Server:
    with serving(model, tmp_path_factory.mktemp("server")) as made:
        yield made
