"""Training, generating and scoring, each by the path that `t5x train`, `t5x infer` and `t5x rerank` take."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x.bench import measures
from t5x.bench.workload import Workload
from t5x.inference.engine import Engine
from t5x.inference.loaded import LoadedModel
from t5x.inference.options import Decoding
from t5x.telemetry.flops import encoder_decoder_flops, generation_flops, scoring_flops
from t5x.trainer import Trainer
from t5x.trainer.trainer import summarize

Result = dict[str, Any]
LABELS = (1176, 6136)  # true and false of T5's vocabulary
_WARM_UP = 3  # steps
_BYTES = 4  # of a parameter


class Timing(NamedTuple):
    """Seconds of each step, those that compiling took, and what was seen then.

    Attributes:
      uneven: the results of a step are taken while others are computed: the mean of all counts, not the median, and
        the least means nothing.
    """

    steps: list[float]
    compiling: float
    seen: measures.Compilation
    uneven: bool = False


class Steps:
    """A trainer and its batches, compiled.

    Attributes:
      seconds: that compiling took.
      seen: while compiling.
    """

    def __init__(self, work: Workload):
        measures.check_memory(2 * _BYTES * work.layout.num_params, "A model with its gradients")
        self.trainer = Trainer(
            work.model, work.state(), work.partitioner, work.layout, jax.random.key(1), learning_rate_fn=lambda _: 1e-3
        )
        self._batches = work.batches()
        with measures.watched() as self.seen:
            self.seconds = self.trainer.compile(next(self._batches))

    def take(self, count: int, after_each: Callable[[], None] = lambda: None) -> list[float]:
        """Seconds of each of some steps, one ahead of the devices: from the end of one to the end of the next."""
        stamps = [time.perf_counter()]
        before = None
        for _ in range(count):
            metrics = self.trainer.step(next(self._batches))
            if before is not None:
                jax.block_until_ready(before)
                stamps.append(time.perf_counter())
            before = metrics
            after_each()
        jax.block_until_ready(before)
        return measures.intervals([*stamps, time.perf_counter()])

    def loss(self) -> float:
        """A token's, of one more step."""
        metrics = self.trainer.step(next(self._batches))
        return summarize([metrics])["loss_per_nonpadding_target_token"]


def train(work: Workload, steps: int | None = None) -> Result:
    """Steps of the trainer, one ahead of the devices, as the training loop takes them."""
    with measures.told_out_of_memory(_smaller("--batch, --targets, --inputs or --size")):
        taken = Steps(work)
        each = min(taken.take(_WARM_UP))
        seconds = taken.take(measures.steps_for(each, steps))
        own = {"dropout": work.dropout, "packed": work.packed, "loss": taken.loss()}
    timing = Timing(seconds, taken.seconds, taken.seen)
    del taken  # its memory is for the large product
    flops = 3 * encoder_decoder_flops(work.config, rows=work.batch, inputs=work.inputs, targets=work.targets)
    return _result(work, timing, flops, work.inputs + work.targets) | own


def generate(work: Workload, steps: int | None = None, beams: int = 1) -> Result:
    """`targets` tokens for every row, greedily or by a beam; a step is a batch."""
    options = Decoding(beams=beams)

    def call(loaded: LoadedModel, inputs: list[np.ndarray], after_batch: Callable[[int], None]) -> None:
        loaded.predictions(
            inputs, options, max_length=work.targets, max_input_length=work.inputs, batch_size=work.batch,
            rows=work.batch, after_batch=after_batch,
        )  # fmt: skip

    flops = generation_flops(work.config, rows=work.batch, inputs=work.inputs, targets=work.targets, beams=beams)
    return _result(work, _timed_batches(work, call, steps), flops, work.targets) | {"beams": beams}


def score(work: Workload, steps: int | None = None) -> Result:
    """Two logits of the first output token for every row, as rerankers take them; a step is a batch."""
    labels = LABELS if work.config.vocab_size > max(LABELS) else (2, 3)

    def call(loaded: LoadedModel, inputs: list[np.ndarray], after_batch: Callable[[int], None]) -> None:
        loaded.label_logits(
            inputs, labels, max_input_length=work.inputs, batch_size=work.batch, rows=work.batch,
            after_batch=after_batch,
        )  # fmt: skip

    flops = scoring_flops(work.config, rows=work.batch, inputs=work.inputs, labels=len(labels))
    return _result(work, _timed_batches(work, call, steps), flops, work.inputs) | {"targets": 1}


def _timed_batches(
    work: Workload, call: Callable[[LoadedModel, list[np.ndarray], Callable[[int], None]], None], steps: int | None
) -> Timing:
    measures.check_memory(_BYTES * work.layout.num_params, "A model")

    def stamps_of(batches: int) -> list[float]:
        inputs = list(work.tokens(batches * work.batch, work.inputs))
        stamps = [time.perf_counter()]
        call(loaded, inputs, lambda rows: stamps.append(time.perf_counter()))
        return stamps

    with measures.told_out_of_memory(_smaller("--batch, --inputs, --targets, --beams or --size")):
        loaded = LoadedModel(None, work.model, work.partitioner)
        loaded.engine = Engine(work.model, work.partitioner, work.params())
        with measures.watched() as seen:
            began, *ends = stamps_of(1 + _WARM_UP)
        # The first batch was compiled for.
        each = statistics.median(measures.intervals(ends))
        stamps = stamps_of(measures.steps_for(each, steps))
    return Timing(measures.intervals(stamps), max(0.0, ends[0] - began - each), seen, uneven=True)


def _result(work: Workload, timing: Timing, flops: int, tokens: int) -> Result:
    """
    Args:
      tokens: of a row, that count.
    """
    memory = measures.peak_memory()  # before the product below needs some
    gc.collect()
    times = measures.step_times(timing.steps)
    each = times["step_ms"] / 1e3
    if timing.uneven:
        each = statistics.mean(timing.steps)
        del times["step_ms_min"], times["step_ms_spread"]
    return {
        **described(work, timing.seen),
        **times,
        "sequences_per_s": work.batch / each,
        "tokens_per_s": work.batch * tokens / each,
        **measures.rates(flops, each, work.dtype),
        **memory,
        "compile_s": timing.compiling,
        "compile_cached": timing.seen.cached > 0,
        **measures.machine(),
    }


def described(work: Workload, seen: measures.Compilation) -> Result:
    """The model and its batch, as every result has them."""
    return {
        "size": work.size,
        "parameters": work.layout.num_params,
        "batch": work.batch,
        "inputs": work.inputs,
        "targets": work.targets,
        "dtype": work.dtype,
        "attention": "+".join(sorted(seen.attention)) or work.attention,
        "scan": work.scan,
    }


def _smaller(what: str) -> str:
    there = measures.available_memory()
    free = "" if there is None else f" ({there / 1e9:.1f} GB are free now)"
    return f"lower {what}{free}."
