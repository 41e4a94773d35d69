"""Small Hugging Face directories for the tests: by transformers itself, by hand, and of real weights."""

import json
import struct

import numpy as np

SIZES = {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 5}
VOCABULARY = 64

# name: (class stem, arguments of the configuration, whether lm_head gets values of its own)
FAMILIES = {
    "T5 1.0": ("T5", {}, False),
    "T5 1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, True),
    "T5 1.1, tied": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, False),
    "mT5": ("MT5", {}, True),
    "mT5, tied": ("MT5", {}, False),
    "umT5": ("UMT5", {}, True),
    "umT5, tied": ("UMT5", {}, False),
}


def model(family, **changes):
    """A transformers model of random values, ready to compute."""
    import torch
    import transformers

    stem, arguments, own_head = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY} | SIZES | changes
    made = getattr(transformers, f"{stem}ForConditionalGeneration")(
        getattr(transformers, f"{stem}Config")(**sizes, **arguments)
    )
    for parameter in made.parameters():  # norms too, which start as ones
        torch.nn.init.normal_(parameter, std=0.4)
    if own_head:
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.shared.weight))
    return made.eval()


def logits(made):
    """Logits and the decoder's last hidden states for a padded batch: ([2, 4, vocabulary], [2, 4, d_model])."""
    import torch

    inputs = torch.tensor([[5, 6, 7, 8, 1], [9, 10, 1, 0, 0]])
    targets = torch.tensor([[0, 11, 12, 13], [0, 14, 15, 16]])
    with torch.no_grad():
        output = made(
            input_ids=inputs, attention_mask=(inputs > 0).int(), decoder_input_ids=targets, output_hidden_states=True
        )
    return output.logits.numpy(), output.decoder_hidden_states[-1].numpy()


def write_safetensors(path, tensors, *, header=None):
    """Writes float32 arrays by the format's description; `header` replaces the JSON (bytes) that belongs to them."""
    entries, end = {}, 0
    for name, value in tensors.items():
        size = 4 * np.size(value)
        entries[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + size]}
        end += size
    if header is None:
        header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, np.float32).data)


def write_directory(path, tensors, config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def tiny_config(**changes):
    """config.json of a T5 1.0 of one layer each, as version 4 of transformers has it."""
    sizes = {"d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 3}
    return {"model_type": "t5", "vocab_size": 10, **sizes, "feed_forward_proj": "relu"} | changes


def tiny_tensors():
    """The tensors of `tiny_config`, named by hand."""
    rng = np.random.default_rng(0)
    shapes = {"shared.weight": (10, 4)}
    for tower, attentions in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        block = f"{tower}.block.0.layer"
        shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (32, 3)
        for i, attention in enumerate(attentions):
            shapes[f"{block}.{i}.layer_norm.weight"] = (4,)
            shapes |= {f"{block}.{i}.{attention}.{part}.weight": (6, 4) for part in "qkv"}
            shapes[f"{block}.{i}.{attention}.o.weight"] = (4, 6)
        last = len(attentions)
        shapes[f"{block}.{last}.layer_norm.weight"] = (4,)
        shapes[f"{block}.{last}.DenseReluDense.wi.weight"] = (6, 4)
        shapes[f"{block}.{last}.DenseReluDense.wo.weight"] = (4, 6)
        shapes[f"{tower}.final_layer_norm.weight"] = (4,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def real_directory(path, shared):
    """The flan-t5-small of the shared data, de-quantised to float32, as a Hugging Face directory."""
    source = shared / "flan_t5_small_titler"
    with np.load(source / "flan_t5_small_titler_int8.npz") as arrays:
        names = [name for name in arrays.files if not name.endswith(("::scale", "::zp"))]
        tensors = {}
        for name in names:
            value = arrays[name].astype(np.float32)
            if f"{name}::scale" in arrays.files:
                value = (value - arrays[f"{name}::zp"].astype(np.float32)) * arrays[f"{name}::scale"]
            tensors[name] = value.astype(np.float32)
    return write_directory(path, tensors, json.loads((source / "config.json").read_text()))
