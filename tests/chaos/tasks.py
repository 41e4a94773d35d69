"""Registers the mixture `chaos`, for a run that is killed."""

from tests.data.programs import mixed_batches

VOCABULARY = mixed_batches.VOCABULARY

mixed_batches.register("chaos", prefix="chaos_")
