"""Decoding and scoring on this machine: tokens a second of ours, Hugging Face and CTranslate2, in turns.

    python benchmarks/decoding.py [--ctranslate2 PYTHON] [--work greedy16,greedy1,beam4,score16] [--rounds 3]

T5 1.1 small with random weights, float32, 128 tokens in, 64 out, no early end. PYTHON has ctranslate2, transformers and
torch. Rounds alternate, and the best of each is compared, as other programs on the machine only slow it down. Prints
JSON: tokens a second (of scoring: rows a second), and the ratio of ours to each peer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

INPUTS, OUTPUTS = 128, 64
WORK = {"greedy16": (16, 1), "greedy1": (1, 1), "beam4": (16, 4), "score16": (16, 0)}
SIZES = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="without it that peer is left out")
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help="a contender: ours, huggingface or ctranslate2")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        for name in args.work.split(","):
            contender = {"ours": ours, "huggingface": huggingface, "ctranslate2": ctranslate2}[args.measure]
            if (call := contender(args.model, name, args.threads)) is not None:
                print(json.dumps({name: measure(call, name)}), flush=True)
        return
    contenders = {"ours": sys.executable, "huggingface": sys.executable}
    if args.ctranslate2:
        contenders["ctranslate2"] = args.ctranslate2
    if args.only:
        contenders = {args.only: contenders[args.only]}
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        for _ in range(args.rounds):
            for contender, python in contenders.items():
                for name, rate in run(python, contender, directory, args).items():
                    place = best.setdefault(name, {})
                    place[contender] = max(rate, place.get(contender, 0.0))
    for rates in best.values():
        for peer in set(rates) - {"ours"} if "ours" in rates else ():
            rates[f"ours / {peer}"] = round(rates["ours"] / rates[peer], 2)
    print(json.dumps(best, indent=1))


def run(python: str, contender: str, directory: str, args: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, "--measure", contender, "--model", directory, "--work", args.work]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, "--threads", str(args.threads)], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{contender} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def measure(call, name: str) -> float:
    batch, beams = WORK[name]
    call()  # compiles, warms up
    amounts = batch * (OUTPUTS if beams else 1)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return round(amounts / best, 1)


def write_model(directory: str) -> None:
    """A T5 1.1 small whose EOS is never the likeliest."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", decoder_start_token_id=0, **SIZES)
    config.tie_word_embeddings = False
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 0.05)
    with torch.no_grad():
        model.lm_head.weight[1] = 0.0
        for tower in (model.encoder, model.decoder):
            tower.embed_tokens.weight = model.shared.weight
    model.save_pretrained(directory)
    path = f"{directory}/config.json"
    with open(path) as file:
        config = json.load(file)
    config |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}  # transformers 5 writes them otherwise
    with open(path, "w") as file:
        json.dump(config, file)


def tokens(name: str):
    import numpy as np

    rng = np.random.default_rng(0)
    batch, _ = WORK[name]
    return rng.integers(100, 32000, (batch, INPUTS)), rng.integers(100, 32000, (batch, OUTPUTS))


def ours(directory: str, name: str, threads: int):
    import functools

    import jax
    import numpy as np

    import t5x
    from t5x import decoding

    loaded = t5x.load(directory, vocabulary="bytes")
    engine, model = loaded.engine, loaded.model
    inputs, targets = tokens(name)
    batch, beams = WORK[name]
    if beams == 0:
        program = engine.program(lambda params, batch, rng: model.score_batch(params, batch))
    else:
        if beams > 1:
            model.decode_fn = functools.partial(decoding.beam_search, length_penalty=1.0, early_stopping=True)
        program = engine.program(
            lambda params, batch, rng: model.predict_batch_with_aux(params, batch, rng=rng, num_decodes=beams)
        )
    examples = [{"inputs": row, "targets": out} for row, out in zip(inputs, targets, strict=True)]

    def call():
        results = engine.run(program, examples, {"inputs": INPUTS, "targets": OUTPUTS}, rows=batch)
        if beams:
            assert all(np.count_nonzero(jax.tree.leaves(result)[0]) >= OUTPUTS - 1 for result in results)

    return call


def huggingface(directory: str, name: str, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    inputs, targets = (torch.tensor(ids) for ids in tokens(name))
    _, beams = WORK[name]

    @torch.inference_mode()
    def call():
        if beams == 0:
            model(input_ids=inputs, labels=targets)
        else:
            out = model.generate(inputs, max_new_tokens=OUTPUTS, num_beams=beams, do_sample=False, early_stopping=True)
            assert out.shape[1] >= OUTPUTS

    return call


def ctranslate2(directory: str, name: str, threads: int):
    import ctranslate2

    batch, beams = WORK[name]
    if beams == 0:
        return None
    converted = f"{directory}/ctranslate2"
    if not os.path.isdir(converted):
        vocabulary = [f"t{i}" for i in range(32128)]
        converter = ctranslate2.converters.TransformersConverter(directory)
        converter.load_tokenizer = lambda *_, **__: _tokenizer(vocabulary)
        converter.convert(converted, quantization="float32")
    translator = ctranslate2.Translator(converted, "cpu", intra_threads=threads, compute_type="float32")
    rows = [[f"t{i}" for i in row] for row in tokens(name)[0]]

    def call():
        results = translator.translate_batch(
            rows, beam_size=beams, max_decoding_length=OUTPUTS, min_decoding_length=OUTPUTS, max_batch_size=batch
        )
        assert all(len(result.hypotheses[0]) >= OUTPUTS - 1 for result in results)

    return call


def _tokenizer(vocabulary: list[str]):
    """What CTranslate2's converter asks of a tokenizer."""
    import types

    return types.SimpleNamespace(
        get_vocab=lambda: {token: i for i, token in enumerate(vocabulary)},
        bos_token=None, eos_token="t1", unk_token="t2", pad_token="t0",
        convert_ids_to_tokens=lambda ids: vocabulary[ids] if isinstance(ids, int) else [vocabulary[i] for i in ids],
    )  # fmt: skip


if __name__ == "__main__":
    main()
