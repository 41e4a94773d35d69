"""The peers: what each is asked to do, as a function to be timed. Nothing here knows t5x."""

import json
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

VOCABULARY = 32128
SIZES = {  # T5 1.1: width, heads, width of the MLP, layers
    "small": (512, 6, 1024, 8),
    "base": (768, 12, 2048, 12),
    "large": (1024, 16, 2816, 24),
    "xl": (2048, 32, 5120, 24),
    "xxl": (4096, 64, 10240, 24),
}
LABELS = [1176, 6136]
CTRANSLATE2_DTYPE = "float32"


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def random_t5(size: str = "small") -> Any:
    """Hugging Face's T5 1.1 whose EOS is never the likeliest; no dropout."""
    import torch
    import transformers

    torch.manual_seed(0)
    width, heads, inner, layers = SIZES[size]
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=width, d_kv=64, d_ff=inner, num_heads=heads, num_layers=layers,
        num_decoder_layers=layers, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    config.tie_word_embeddings = False  # transformers 5 takes it for True as an argument
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 0.05)
    with torch.no_grad():
        model.lm_head.weight[1] = 0.0
    for tower in (model.encoder, model.decoder):
        tower.embed_tokens.weight = model.shared.weight
    return model


def write_model(directory: str, size: str = "small") -> None:
    """The same in files."""
    random_t5(size).save_pretrained(directory)
    path = os.path.join(directory, "config.json")
    with open(path) as file:
        config = json.load(file)
    config |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}  # transformers 5 writes them otherwise
    with open(path, "w") as file:
        json.dump(config, file)


class HuggingFace:
    """Its T5 on the GPU where there is one, with scaled dot product attention.

    Args:
      compiled: by torch.compile; generation gets a static cache, which transformers compiles then.
    """

    def __init__(self, size: str, dtype: str, *, compiled: bool, optimizer: str = "adamw"):
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = getattr(torch, dtype)
        torch.set_float32_matmul_precision("high")
        self.model = random_t5(size).to(self.device)
        self.model.set_attn_implementation("sdpa")  # transformers 5.23 reads T5's bias out of bounds for flex attention
        self.compiled = compiled
        self.optimizer = optimizer

    def tokens(self, rows: int, length: int) -> Any:
        import torch

        return torch.randint(100, 32000, (rows, length), device=self.device)

    def train(self, rows: int, inputs: int, targets: int) -> Callable[[], None]:
        """float32 weights; products in the dtype of the run."""
        import torch

        self.model.train()
        self.model.config.use_cache = False
        if self.optimizer == "adafactor":
            from transformers.optimization import Adafactor

            optimizer = Adafactor(self.model.parameters(), lr=1e-3, relative_step=False, scale_parameter=True)
        else:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device == "cuda")
        forward = torch.compile(self.model) if self.compiled else self.model
        x, y = self.tokens(rows, inputs), self.tokens(rows, targets)

        def step() -> None:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                loss = forward(input_ids=x, labels=y).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def generate(self, rows: int, inputs: int, targets: int, beams: int) -> Callable[[], None]:
        import torch

        self.model.to(self.dtype).eval()
        x = self.tokens(rows, inputs)
        static = {"cache_implementation": "static"} if self.compiled else {}

        @torch.inference_mode()
        def call() -> None:
            output = self.model.generate(
                x, max_new_tokens=targets, min_new_tokens=targets, num_beams=beams, do_sample=False, **static
            )
            assert output.shape[1] >= targets

        return call

    def score(self, rows: int, inputs: int) -> Callable[[], None]:
        """A step of the decoder, and the logits of two labels, which stay on the device."""
        import torch

        self.model.to(self.dtype).eval()
        forward = torch.compile(self.model) if self.compiled else self.model
        x, start = self.tokens(rows, inputs), torch.zeros((rows, 1), dtype=torch.long, device=self.device)

        @torch.inference_mode()
        def call() -> None:
            logits = forward(input_ids=x, decoder_input_ids=start, use_cache=False).logits
            logits[:, 0, LABELS].float()

        return call

    def encode(self, rows: int, inputs: int) -> Callable[[], None]:
        """The encoder alone; its output stays on the device."""
        import torch

        self.model = self.model.get_encoder().to(self.dtype).eval()
        forward = torch.compile(self.model) if self.compiled else self.model
        x = self.tokens(rows, inputs)

        @torch.inference_mode()
        def call() -> None:
            forward(input_ids=x)

        return call

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def mark(self) -> Any:
        """To wait for what was asked for until now."""
        import torch

        if self.device == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def peak_memory_gb(self) -> float | None:
        import torch

        return torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else None


# -- CTranslate2 -------------------------------------------------------------------------------------------------------


def ctranslate2(directory: str, rows: Any, outputs: int, beams: int, threads: int) -> Callable[[], None]:
    """Generation on the CPU with the model that `write_model` wrote, in `CTRANSLATE2_DTYPE`.

    Args:
      rows: of input ids.
    """
    translator = ctranslate2_translator(directory, "cpu", CTRANSLATE2_DTYPE, intra_threads=threads)
    words = ctranslate2_words(rows)
    return lambda: ctranslate2_outputs(translator, words, outputs, beams)


def ctranslate2_translator(directory: str, device: str, dtype: str, **options: Any) -> Any:
    """Convert the model that `write_model` wrote and load it."""
    import ctranslate2

    converted = os.path.join(directory, "ctranslate2")
    if not os.path.isdir(converted):
        vocabulary = [f"t{i}" for i in range(VOCABULARY)]
        converter = ctranslate2.converters.TransformersConverter(directory)
        converter.load_tokenizer = lambda *_, **__: _tokenizer(vocabulary)
        converter.convert(converted, quantization=dtype)
    return ctranslate2.Translator(converted, device, compute_type=dtype, **options)


def ctranslate2_words(rows: Any) -> list[list[str]]:
    """Rows of ids as CTranslate2 takes them."""
    return [[f"t{i}" for i in row] for row in rows]


def ctranslate2_outputs(translator: Any, words: list[list[str]], outputs: int, beams: int = 1) -> None:
    results = translator.translate_batch(
        words, beam_size=beams, max_decoding_length=outputs, min_decoding_length=outputs, max_batch_size=len(words)
    )
    assert all(len(result.hypotheses[0]) >= outputs - 1 for result in results)


def _tokenizer(vocabulary: list[str]) -> Any:
    """What CTranslate2's converter asks of a tokenizer."""
    return types.SimpleNamespace(
        get_vocab=lambda: {token: i for i, token in enumerate(vocabulary)},
        bos_token=None, eos_token="t1", unk_token="t2", pad_token="t0",
        convert_ids_to_tokens=lambda ids: vocabulary[ids] if isinstance(ids, int) else [vocabulary[i] for i in ids],
    )  # fmt: skip


# -- seqio -------------------------------------------------------------------------------------------------------------


def seqio_batches(path: str, vocabulary: str, rows: int, lengths: dict[str, int], packed: bool) -> Iterator[Any]:
    """Endless batches of a .tsv file of inputs and targets, with names in its first line."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import seqio
    import tensorflow as tf

    seqio_vocabulary = seqio.ByteVocabulary() if vocabulary == "bytes" else seqio.SentencePieceVocabulary(vocabulary)

    def pair(line: Any) -> dict[str, Any]:
        inputs, targets = tf.io.decode_csv(line, ["", ""], field_delim="\t", use_quote_delim=False)
        return {"inputs": inputs, "targets": targets}

    seqio.TaskRegistry.add(
        "pairs",
        source=seqio.TextLineDataSource({"train": path}, skip_header_lines=1),
        preprocessors=[
            lambda lines: lines.map(pair, num_parallel_calls=tf.data.AUTOTUNE),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={name: seqio.Feature(seqio_vocabulary) for name in lengths},
    )
    return seqio.get_dataset(
        "pairs", lengths, seqio.EncDecFeatureConverter(pack=packed), "train", shuffle=True, num_epochs=None, seed=0,
        batch_size=rows,
    ).as_numpy_iterator()  # fmt: skip
