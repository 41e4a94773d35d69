"""Leases on directories of real S3 and GCS servers that fail now and then."""

import threading

import pytest

from t5x._runtime.errors import UserError
from t5x.files import lease
from t5x.files.lease import Lease
from tests.object_stores import proxy

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"_TERM": 2.0, "_PERIOD": 0.2, "_POLL": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture
def url(store, request):
    store.proxy.rate, store.proxy.faults = 0.1, tuple(set(proxy.FAULTS) - {"delay"})
    return f"{store.url}/{request.node.originalname}/.lease"


def die(held: Lease, **changes: object) -> None:
    """Stop renewing a lease without releasing it, as if its holder had been killed."""
    held._stopped.set()
    held._thread.join()
    held._generation = held._file.write(lease._content(held.holder | changes), held._generation)


def test_one_program_holds_it(url):
    with Lease.acquire(url, "run") as held:
        assert lease.read_holder(url)["pid"] == held.holder["pid"]
        with pytest.raises(UserError, match=str(held.holder["pid"])):
            Lease.acquire(url, "run")
        held.check()
    assert lease.read_holder(url) is None
    Lease.acquire(url, "run").release()


def test_a_lease_of_a_silent_machine_is_taken_over_after_its_term(url):
    before = Lease.acquire(url, "run")
    die(before, machine="another")
    with Lease.acquire(url, "run") as after:
        assert after._renewed - before._renewed >= lease._TERM
        with pytest.raises(UserError, match="taken by"):
            before._renew() or before.check()
        after.check()


def test_a_lease_of_a_dead_process_here_is_taken_over_at_once(url):
    before = Lease.acquire(url, "run")
    die(before, started="0")
    with Lease.acquire(url, "run") as after:
        assert after._renewed - before._renewed < lease._TERM


def test_a_file_system_without_conditional_writes_is_watched_too():
    with Lease.acquire("memory://run/.lease", "run"), pytest.raises(UserError, match="in use"):
        Lease.acquire("memory://run/.lease", "run")
    assert lease.read_holder("memory://run/.lease") is None


def test_one_of_many_contenders_gets_the_lease(store):
    held, refused = [], []

    def take() -> None:
        try:
            held.append(Lease.acquire(f"{store.url}/race/.lease", "run"))
        except UserError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 3)
    held[0].release()


def test_a_missing_bucket_is_named(store):
    url = store.url.replace("bucket", "no-such-bucket") + "/run/.lease"
    with pytest.raises(UserError, match="no-such-bucket"):
        Lease.acquire(url, "run")
