"""Directories of real S3 and GCS servers behave as local ones do."""

import pytest

from tests.files import directory_conformance as conformance

pytestmark = pytest.mark.nightly


@pytest.fixture
def url(store, request):
    return f"{store.url}/{request.node.originalname}"


def test_files_behave_as_the_protocol_says(url):
    conformance.check_files(conformance.open_at(url))


def test_lock_is_exclusive_and_free_after_its_release(url, monkeypatch):
    conformance.check_lock(url, monkeypatch)


def test_directory_that_is_published_is_whole_or_unfinished_after_any_kill(url, monkeypatch):
    conformance.check_kills(url, monkeypatch)
