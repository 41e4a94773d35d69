"""Encoder-decoder models."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding
from t5x._runtime.errors import UserError
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.data.vocabularies import Vocabulary
from t5x.data.vocabularies.base import FileVocabulary
from t5x.decoding.loop import per_example_logits, with_constraint
from t5x.decoding.state import is_eos
from t5x.models import losses
from t5x.models.base import BaseTransformerModel, Batch, DecoderParams, Params, best_or_all
from t5x.models.hooks import hooks_of
from t5x.network import CACHES, compute_params
from t5x.optimizers.protocol import OptimizerDef


class EncoderDecoderModel(BaseTransformerModel):
    """An encoder-decoder network with its vocabularies, loss and decoding.

    Args:
      module: a Linen module with T5X's call convention (`__call__`, `encode`, `decode`).
      input_vocabulary, output_vocabulary: of the features `inputs` and `targets`.
      optimizer_def, decode_fn, …: see `BaseTransformerModel`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from t5x.data import PassThroughVocabulary
      >>> from t5x.network import T5Config, Transformer
      >>> config = T5Config(vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16,
      ...                   num_encoder_layers=1, num_decoder_layers=1)
      >>> vocabulary = PassThroughVocabulary(32, eos_id=1)
      >>> model = EncoderDecoderModel(Transformer(config), vocabulary, vocabulary, optimizer_def=None)
      >>> shapes = model.input_shapes({"inputs": 5, "targets": 3})
      >>> params = model.get_initial_variables(jax.random.key(0), shapes)["params"]
      >>> batch = {name: jnp.ones((2, n), jnp.int32) for name, n in [
      ...     ("encoder_input_tokens", 5), ("decoder_input_tokens", 3), ("decoder_target_tokens", 3)]}
      >>> model.predict_batch(params, batch).shape, model.score_batch(params, batch).shape
      ((2, 3), (2,))
    """

    FEATURE_CONVERTER_CLS: Callable[..., Any] = EncDecFeatureConverter
    _MODULE_INPUTS = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    _OPTIONAL_INPUTS = ("encoder_segment_ids", "decoder_segment_ids", "encoder_positions", "decoder_positions")
    _decode_fn: Callable

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: OptimizerDef | None,
        decode_fn: Callable = decoding.beam_search,
        feature_converter_cls: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | DecoderParams | None = None,
    ):
        super().__init__(
            module, input_vocabulary, output_vocabulary, optimizer_def, decode_fn, label_smoothing, z_loss,
            loss_normalizing_factor, feature_converter_cls, default_decoder_params,
        )  # fmt: skip
        self._set_special_tokens()

    def _set_special_tokens(self) -> None:
        """Make the feature converter use the start and padding tokens of the network; check the vocabularies."""
        for vocabulary in (self.input_vocabulary, self.output_vocabulary) if self.pad_id else ():
            if isinstance(vocabulary, FileVocabulary) and vocabulary.pad_id != self.pad_id:
                raise UserError(
                    f"network.T5Config.pad_token_id is {self.pad_id}, but the vocabulary pads with "
                    f"{vocabulary.pad_id}. Set vocabularies.{type(vocabulary).__name__}.pad_id = {self.pad_id}."
                )
        tokens = {name: i for name, i in (("bos_id", self.start_id), ("pad_id", self.pad_id)) if i}
        if not tokens:
            return
        converter_cls = self.FEATURE_CONVERTER_CLS
        try:
            inspect.signature(converter_cls).bind_partial(**tokens)
        except TypeError:
            raise UserError(
                f"The network has decoder_start_token_id {self.start_id} and pad_token_id {self.pad_id}, but "
                f"{converter_cls.__name__} does not take {' and '.join(tokens)}. Use a FeatureConverter of t5x.data."
            ) from None
        self.FEATURE_CONVERTER_CLS = functools.update_wrapper(
            functools.partial(converter_cls, **tokens), converter_cls, updated=()
        )

    @property
    def start_id(self) -> int:
        """The decoder's first input."""
        return getattr(getattr(self.module, "config", None), "decoder_start_token_id", 0)

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        inputs, targets = task_feature_lengths["inputs"], task_feature_lengths["targets"]
        return {"encoder_input_tokens": (1, inputs), "decoder_input_tokens": (1, targets)}

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        prompt_with_targets: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Decode a batch, see `BaseTransformerModel`.

        Args:
          prompt_with_targets: start the decodes with the row's targets, without their EOS.
        """
        inputs = batch["encoder_input_tokens"]
        return_all_decodes = return_all_decodes or self._return_all_decodes
        options = self._decode_options(batch, rng, decoder_params, num_decodes)
        prompts = batch["decoder_input_tokens"].astype(jnp.int32)
        empty = jnp.full_like(prompts, self.pad_id)
        prompts = jnp.where(is_eos(prompts, options["eos_id"]), self.pad_id, prompts) if prompt_with_targets else empty
        prompts = prompts.at[:, 0].set(self.start_id)
        hooks = hooks_of(self)
        by_slices = hooks.custom_network or hooks.custom_step
        start = self._start_decoding_by_slices if by_slices else self._start_decoding
        tokens_to_logits, cache = start(params, inputs, empty, options)
        forced = getattr(getattr(self.module, "config", None), "forced_bos_token_id", None)
        if forced is not None and not prompt_with_targets:
            tokens_to_logits = with_constraint(tokens_to_logits, decoding.constraints.forced_tokens([forced]))
        decodes, scores = self._decode_fn(inputs=prompts, cache=cache, tokens_to_logits=tokens_to_logits, **options)
        return best_or_all(decodes, scores, return_all_decodes)

    def _start_decoding(
        self, params: Params, inputs: jax.Array, empty: jax.Array, options: Mapping[str, Any]
    ) -> tuple[Callable, Any]:
        """Return `tokens_to_logits` and the initial cache; beams share the encoder's output."""
        variables = {"params": compute_params(self.module, params)}  # once, not in every step
        encoded = self.module.apply(variables, inputs, enable_dropout=False, method=self.module.encode)
        decode = functools.partial(self.module.apply, enable_dropout=False, decode=True, method=self.module.decode)
        # This pass creates the caches; the compiler removes the rest of its computation.
        _, caches = decode(variables, encoded, inputs, empty, empty, mutable=list(CACHES))
        per_example = {"encoded": encoded, "inputs": inputs, "cross_cache": caches["cross_cache"]}

        def step(example: dict[str, Any], state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            collections = {**variables, **caches, "cross_cache": example["cross_cache"], "cache": state.cache}
            tokens = (example["encoded"], example["inputs"], state.cur_token, state.cur_token)
            logits, changed = decode(collections, *tokens, max_decode_length=empty.shape[1], mutable=["cache"])
            return logits[:, -1, :], changed.get("cache", {})

        axes = {"encoded": 0, "inputs": 0, "cross_cache": options["cache_offset"]}
        return per_example_logits(step, per_example, axes), caches.get("cache", {})

    def _start_decoding_by_slices(
        self, params: Params, inputs: jax.Array, empty: jax.Array, options: Mapping[str, Any]
    ) -> tuple[Callable, Any]:
        """Return the same for any network with T5X's call convention, by `_compute_logits_from_slice`."""
        cache, _ = self._compute_kv_cache(params, None, inputs, empty)
        apply: Callable[..., Any] = self.module.apply
        encoded = apply({"params": params}, inputs, enable_dropout=False, method=self.module.encode)
        encoded, inputs = (jnp.repeat(x, options["num_decodes"], axis=0) for x in (encoded, inputs))
        tokens_to_logits = functools.partial(
            self._compute_logits_from_slice, params=params, encoded_inputs=encoded, raw_inputs=inputs,
            max_decode_length=empty.shape[1],
        )  # fmt: skip
        return tokens_to_logits, cache

    def _compute_kv_cache(
        self, params: Params, encoded_inputs: jax.Array | None, encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array, prefill_decoder_prompt: bool = False,
    ) -> tuple[Any, None]:  # fmt: skip
        """Return an empty cache, for models that call `decode_fn` themselves, and where to start: None, the beginning.

        Args:
          encoded_inputs, prefill_decoder_prompt: T5X's, not used; prompts are decoded from the beginning.
        """
        tokens = jnp.ones_like(decoder_input_tokens)
        _, created = self.module.apply(
            {"params": params}, jnp.ones_like(encoder_input_tokens), tokens, tokens, decode=True, enable_dropout=False,
            mutable=["cache"],
        )  # fmt: skip
        return created["cache"], None

    def _compute_logits_from_slice(
        self,
        decoding_state: decoding.DecodingState,
        params: Params,
        encoded_inputs: jax.Array,
        raw_inputs: jax.Array,
        max_decode_length: int,
    ) -> tuple[jax.Array, Any]:
        """Return the logits of the next tokens and the new cache: `tokens_to_logits` for decoding in subclasses.

        Args:
          encoded_inputs, raw_inputs: the encoder's output and inputs, repeated for every decode of an example.
        """
        token = decoding_state.cur_token
        logits, changed = self.module.apply(
            {"params": params, "cache": decoding_state.cache}, encoded_inputs, raw_inputs, token, token,
            enable_dropout=False, decode=True, max_decode_length=max_decode_length, mutable=["cache"],
            method=self.module.decode,
        )  # fmt: skip
        return logits[:, -1], changed["cache"]

    def score_batch(
        self, params: Params, batch: Batch, return_intermediates: bool = False, first_logits: bool = False
    ) -> Any:
        """Score the targets of a batch, see `BaseTransformerModel`.

        Args:
          first_logits: return instead the logits of each row's target tokens at the first position, float32 [batch,
            targets]. With the targets `true` and `false`, monoT5 ranks by these.
        """
        if not first_logits:
            return super().score_batch(params, batch, return_intermediates)
        return self.first_logits(params, batch["encoder_input_tokens"], batch["decoder_target_tokens"])

    def first_logits(
        self,
        params: Params,
        inputs: jax.Array,
        tokens: jax.Array,
        dropout_rng: jax.Array | None = None,
        fp8_scales: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Return the logits of `tokens`, int [batch, n], at the first output position, float32 [batch, n].

        Args:
          params: parameters of the module.
          inputs: int [batch, length].
          tokens: int [batch, n].
          dropout_rng: turns dropout on.
          fp8_scales: see `loss_fn`.
          options: further arguments of the module's `encode` and `decode`.
        """
        start = jnp.full((inputs.shape[0], 1), self.start_id, jnp.int32)
        real = jnp.full_like(start, self.pad_id + 1)
        can_select = hooks_of(self).takes_logits_of
        options |= {"enable_dropout": dropout_rng is not None}

        def first_position(module: nn.Module) -> jax.Array:
            selected = {"logits_of": tokens} if can_select else {}
            encoded = module.encode(inputs, **options)
            return module.decode(encoded, inputs, start, real, **options, **selected)[:, 0]

        rngs = None if dropout_rng is None else {"dropout": dropout_rng}
        apply: Callable[..., Any] = self.module.apply
        logits = apply(self._variables(params, fp8_scales), rngs=rngs, method=first_position)
        return logits if can_select else jnp.take_along_axis(logits, tokens, axis=-1)
