"""Passages ranked per second on this machine's CPU: t5x, and a plain loop over Hugging Face's model.

    python benchmarks/reranking.py --candidates bm25_top100_dl19.json.gz --vocabulary DIR [--pairs 1000]

T5 1.1 small with random weights, float32, monoT5's template, 512 tokens at most; the pairs are those of the first
queries of a file for `t5x rerank --candidates`. DIR has T5's spiece.model and tokenizer.json. The loop takes pairs as
they come, 32 at a time, padded to the longest of the batch, with one step of the decoder. Both begin with texts and end
with scores, which are compared. Rounds alternate, and the best of each counts, as other programs on the machine only
slow it down; what is compiled, is compiled before. Prints JSON.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time

import contenders
import rounds

BATCH, LENGTH = 32, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", required=True)
    parser.add_argument("--vocabulary", required=True)
    parser.add_argument("--pairs", type=rounds.positive, default=1000)
    parser.add_argument("--rounds", type=rounds.positive, default=3)
    parser.add_argument("--threads", type=rounds.positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    best: dict[str, float] = {}
    scores: dict[str, list[float]] = {}
    options = {name: getattr(args, name) for name in ("candidates", "vocabulary", "pairs", "threads")}
    with tempfile.TemporaryDirectory() as directory:
        contenders.write_model(directory)
        flags = [f"--directory={directory}", *(f"--{name}={value}" for name, value in options.items())]
        calls = {
            name: functools.partial(
                rounds.run, [sys.executable, __file__, f"--measure={name}", *flags], args.threads, JAX_PLATFORMS="cpu"
            )
            for name in ("ours", "huggingface")
        }
        for contender, measured in rounds.in_turns(calls, args.rounds):
            best[contender] = max(measured["rate"], best.get(contender, 0.0))
            scores[contender] = measured["scores"]
    differ = max(abs(a - b) for a, b in zip(scores["ours"], scores["huggingface"], strict=True))
    print(json.dumps({"pairs a second": best, **rounds.ratios(best), "scores differ by": differ}, indent=1))


def measure(args: argparse.Namespace) -> None:
    pairs = read_pairs(args.candidates, args.pairs)
    call = {"ours": t5x_call, "huggingface": huggingface}[args.measure](args)
    call(pairs)  # compiles, warms up
    began = time.perf_counter()
    scores = call(pairs)
    seconds = time.perf_counter() - began
    print(json.dumps({"rate": round(len(pairs) / seconds, 2), "scores": scores}))


def read_pairs(path: str, count: int) -> list[tuple[str, str]]:
    from t5x.apps.ranking.rerank_inputs import ListWork

    work = ListWork(path, None)
    pairs = [(unit.query, text) for unit in work.units(0, len(work.sizes)) for text in unit.texts]
    return pairs[:count]


def t5x_call(args: argparse.Namespace):
    import t5x

    loaded = t5x.load(args.directory, vocabulary=os.path.join(args.vocabulary, "spiece.model"))

    def call(pairs):
        return [ranked.score for ranked in loaded.rank_pairs(pairs, max_length=LENGTH, batch_size=BATCH)]

    return call


def huggingface(args: argparse.Namespace):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.T5ForConditionalGeneration.from_pretrained(args.directory).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=os.path.join(args.vocabulary, "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
    labels = tokenizer.convert_tokens_to_ids(["▁true", "▁false"])

    @torch.inference_mode()
    def call(pairs):
        scores = []
        for start in range(0, len(pairs), BATCH):
            texts = [f"Query: {query} Document: {text} Relevant:" for query, text in pairs[start : start + BATCH]]
            inputs = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
            begin = torch.zeros((len(texts), 1), dtype=torch.long)
            logits = model(
                input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, decoder_input_ids=begin
            ).logits  # fmt: skip
            scores += torch.log_softmax(logits[:, 0, labels], -1)[:, 0].tolist()
        return scores

    return call


if __name__ == "__main__":
    with rounds.leaving_in_order():
        main()
