"""Training, generation, scoring and encoding, through the code paths of `t5x train`, `t5x infer` and `t5x rerank`."""

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.bench import measures
from benchmarks.bench.workload import Workload
from t5x.checkpoints.formats.source import Source
from t5x.inference.engine import Engine
from t5x.inference.generation import Decoding
from t5x.inference.loaded import LoadedModel
from t5x.network import compute_params
from t5x.network.flops import encoder_decoder_flops, encoder_flops, generation_flops, scoring_flops
from t5x.trainer import Trainer
from t5x.trainer.trainer import summarize

Result = dict[str, Any]
LABELS = (1176, 6136)  # `true` and `false` in T5's vocabulary
_WARM_UP = 3  # steps
_BYTES = 4  # per parameter


class Timing(NamedTuple):
    """Seconds of each step and of compilation, and what was observed while compiling.

    Attributes:
      uneven: whether results of a step are fetched while others are computed. Then rates follow from the mean, and
        the minimum is meaningless.
    """

    steps: list[float]
    compiling: float
    seen: measures.Compilation
    uneven: bool = False


class Steps:
    """A compiled trainer and its batches.

    Attributes:
      seconds: compilation time.
      seen: what was observed while compiling.
    """

    def __init__(self, work: Workload):
        measures.check_memory(2 * _BYTES * work.layout.num_params, "A model with its gradients")
        self.trainer = Trainer(
            work.model, work.state(), work.partitioner, [], None, work.layout.shardings, jax.random.key(1),
            learning_rate_fn=lambda _: 1e-3, num_microbatches=work.microbatches,
        )  # fmt: skip
        self._batches = work.batches()
        with measures.watch_compilation() as self.seen:
            self.seconds = self.trainer.compile_train(next(self._batches))

    def take(self, count: int, after_each: Callable[[], None] = lambda: None) -> list[float]:
        """Run `count` steps, one ahead of the devices; return the seconds from the end of each to the next."""
        return _run_ahead(lambda: self.trainer.step(next(self._batches)), count, after_each)

    def loss(self) -> float:
        """Run one more step; return its loss per token."""
        metrics = self.trainer.step(next(self._batches))
        return summarize([metrics])["loss_per_nonpadding_target_token"]


def _run_ahead(start: Callable[[], Any], count: int, after_each: Callable[[], None] = lambda: None) -> list[float]:
    """Start `count` steps, one ahead of the devices; return the seconds from the end of each to the next."""
    stamps = [time.perf_counter()]
    before = None
    for _ in range(count):
        result = start()
        if before is not None:
            jax.block_until_ready(before)
            stamps.append(time.perf_counter())
        before = result
        after_each()
    jax.block_until_ready(before)
    return measures.intervals([*stamps, time.perf_counter()])


def train(work: Workload, steps: int | None = None) -> Result:
    """Measure training steps, one ahead of the devices, as in the training loop."""
    with measures.explain_out_of_memory("--batch, --targets, --inputs or --size"):
        runner = Steps(work)
        each = min(runner.take(_WARM_UP))
        seconds = runner.take(measures.steps_for(each, steps))
        own = {name: getattr(work, name) for name in ("matmul", "dropout", "remat", "microbatches", "packed")}
        own["loss"] = runner.loss()
    timing = Timing(seconds, runner.seconds, runner.seen)
    del runner  # frees memory for the large matmul
    flops = 3 * encoder_decoder_flops(work.config, rows=work.batch, inputs=work.inputs, targets=work.targets)
    return _result(work, timing, flops, work.inputs + work.targets) | own


def generate(work: Workload, steps: int | None = None, beams: int = 1) -> Result:
    """Measure the generation of `targets` tokens for every row, greedily or with beam search; a step is a batch."""
    timing = _time_batches(work, steps, LoadedModel.predictions, Decoding(beams=beams), max_length=work.targets)
    flops = generation_flops(work.config, rows=work.batch, inputs=work.inputs, targets=work.targets, beams=beams)
    return _result(work, timing, flops, work.targets) | {"beams": beams}


def score(work: Workload, steps: int | None = None) -> Result:
    """Measure two logits of the first output token for every row, as rerankers use them; a step is a batch."""
    labels = LABELS if work.config.vocab_size > max(LABELS) else (2, 3)
    timing = _time_batches(work, steps, LoadedModel.label_logits, labels)
    flops = scoring_flops(work.config, rows=work.batch, inputs=work.inputs, labels=len(labels))
    return _result(work, timing, flops, work.inputs) | {"targets": 1}


def encode(work: Workload, steps: int | None = None) -> Result:
    """Measure the encoder alone, with inputs and outputs on the devices; a step is a batch."""
    names = ("token_embedder", "encoder")
    sharding = work.partitioner.batch_sharding
    with measures.explain_out_of_memory("--batch, --inputs or --size"):
        params = compute_params(work.model.module, work.params(names))
        jitted = work.partitioner.partition(
            lambda params, tokens: work.model.module.apply(
                {"params": params}, tokens, enable_dropout=False, method="encode"
            ),
            in_axis_resources=(jax.tree.map(lambda x: x.sharding, params), sharding),
            out_axis_resources=sharding,
            large_matmuls=True,
        )
        tokens = jax.device_put(work.tokens(work.batch, work.inputs), sharding)
        began = time.perf_counter()
        with measures.watch_compilation() as seen:
            run = jitted.lower(params, tokens).compile()
        compiling = time.perf_counter() - began

        take = functools.partial(_run_ahead, functools.partial(run, params, tokens))
        seconds = take(measures.steps_for(min(take(_WARM_UP)), steps))
    used = sum(leaf.size for leaf in jax.tree.leaves(params))
    flops = encoder_flops(work.config, rows=work.batch, inputs=work.inputs)
    return _result(work, Timing(seconds, compiling, seen), flops, work.inputs) | {"targets": 0, "parameters": used}


def _time_batches(
    work: Workload, steps: int | None, method: Callable[..., Any], *arguments: Any, **options: Any
) -> Timing:
    """Time batches of a `LoadedModel` method, called with inputs and then `arguments` and `options`."""
    measures.check_memory(_BYTES * work.layout.num_params, "A model")

    def stamps_of(batches: int) -> list[float]:
        inputs = list(work.tokens(batches * work.batch, work.inputs))
        stamps = [time.perf_counter()]
        method(
            loaded, inputs, *arguments, max_input_length=work.inputs, batch_size=work.batch, rows=work.batch,
            after_batch=lambda rows: stamps.append(time.perf_counter()), **options,
        )  # fmt: skip
        return stamps

    with measures.explain_out_of_memory("--batch, --inputs, --targets, --beams or --size"):
        loaded = LoadedModel(Source("random weights", "", None, {}), work.model, work.partitioner)
        loaded.engine = Engine(work.model, work.partitioner, work.params())
        with measures.watch_compilation() as seen:
            began, *ends = stamps_of(1 + _WARM_UP)
        # The first batch includes compilation.
        each = statistics.median(measures.intervals(ends))
        stamps = stamps_of(measures.steps_for(each, steps))
    return Timing(measures.intervals(stamps), max(0.0, ends[0] - began - each), seen, uneven=True)


def _result(work: Workload, timing: Timing, flops: int, tokens: int) -> Result:
    """Return the measurements of a run.

    Args:
      tokens: tokens per row that count.
    """
    memory = measures.peak_memory()  # before the matmul below uses some
    gc.collect()
    times = measures.step_times(timing.steps)
    each = times["step_ms"] / 1e3
    if timing.uneven:
        each = statistics.mean(timing.steps)
        del times["step_ms_min"], times["step_ms_spread"]
    return {
        **describe(work, timing.seen),
        **times,
        "sequences_per_s": work.batch / each,
        "tokens_per_s": work.batch * tokens / each,
        **measures.rates(flops, each, work.dtype),
        **memory,
        "compile_s": timing.compiling,
        "compile_cached": timing.seen.cached > 0,
        **measures.machine(),
    }


def describe(work: Workload, seen: measures.Compilation) -> Result:
    """Return the model and its batch, which are part of every result."""
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
