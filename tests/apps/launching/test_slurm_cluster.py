"""`t5x launch slurm` on a real SLURM: what is requeued, what is not, and how a requeued run ends."""

import pytest

from tests.apps.launching import slurm_harness
from tests.apps.launching.slurm_cluster import missing

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing()), reason=f"needs a SLURM cluster: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster():
    with slurm_harness.running_cluster() as started:
        yield started


def test_errors_and_cancelled_jobs_are_final(cluster):
    slurm_harness.run_final_ends(cluster)


def test_the_time_limit_requeues(cluster):
    slurm_harness.run_into_time_limit(cluster)


def test_a_failed_node_requeues(cluster):
    slurm_harness.run_through_failed_node(cluster)


def test_a_run_whose_node_dies_ends_as_an_undisturbed_one(cluster):
    expected = slurm_harness.train_undisturbed(cluster)
    slurm_harness.train_with_dead_node(cluster).assert_same(expected)
