"""`t5x serve`: its arguments and the call of its entry point."""

import argparse
import dataclasses
import importlib.util
import os

from t5x.errors import UserError
from t5x.verbs.arguments import add_import, add_model, given_options, import_modules
from t5x.verbs.interrupts import Terminated
from t5x.verbs.verb_parser import VerbParser

_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")


def define(parser: VerbParser) -> None:
    parser.add_argument(
        "models", metavar="DIR", nargs="+",
        help="a checkpoint, or a MODEL_DIR; NAME=DIR sets its name (default: the directory's)",
    )  # fmt: skip
    place = parser.add_argument_group("where")
    place.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    place.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1, this machine only")
    access = parser.add_argument_group("access")
    access.add_argument("--token_file", metavar="FILE", help="bearer token (or set T5X_SERVE_TOKEN)")
    access.add_argument("--without_token", action="store_true", help="allow anyone who can connect, with --host")
    access.add_argument("--tls_cert", metavar="FILE", help="certificate chain, for HTTPS")
    access.add_argument("--tls_key", metavar="FILE", help="private key of the certificate")
    batches = parser.add_argument_group("batches")
    batches.add_argument("--batch_size", type=int, metavar="N", help="rows of every batch (8 on CPUs, else 32)")
    batches.add_argument("--max_wait_ms", type=float, metavar="N", help="longest wait for more requests (200)")
    batches.add_argument(
        "--warm_up", type=lambda text: tuple(text.split(",")), metavar="A,B",
        help="compile before ready: generate, rank, embed, score",
    )  # fmt: skip
    model = parser.add_argument_group("models")
    add_model(model)
    add_import(model)
    model.add_argument("--reload_period", type=float, metavar="N", help="seconds between looks for a checkpoint (30)")
    model.add_argument("--template", metavar="T", help="of rankers, as in `t5x rerank` (default: the checkpoint's)")
    model.add_argument("--labels", metavar="A,B", help="of rankers: the words for relevant and irrelevant")
    limits = parser.add_topic("limits", "limits of requests")
    limits.add_argument("--max_queue", type=int, metavar="N", help="requests in progress; more get status 429 (128)")
    limits.add_argument("--max_body_mb", type=float, metavar="N", help="megabytes of a request (4)")
    limits.add_argument("--max_documents", type=int, metavar="N", help="strings of a request (1000)")
    limits.add_argument("--max_input_length", type=int, metavar="N", help="tokens of an input (512)")
    limits.add_argument("--max_length", type=int, metavar="N", help="generated tokens (512)")
    limits.add_argument("--max_beams", type=int, metavar="N", help="beams, and outputs of a prompt (8)")
    limits.add_argument("--timeout", type=float, metavar="N", help="seconds for a request (120)")
    limits.add_argument("--body_timeout", type=float, metavar="N", help="seconds for a body to arrive (10)")
    limits.add_argument("--drain_seconds", type=float, metavar="N", help="seconds that SIGTERM waits for requests (60)")
    parser.set_help(
        "Serve models over HTTP: completions, embeddings, reranking, answers, scores, and a page to try them. SIGTERM "
        "answers accepted requests first; SIGHUP reloads the models.",
        """
        t5x serve google/flan-t5-small --port 8000
        t5x serve titles=runs/titles castorini/monot5-base-msmarco --host 0.0.0.0 --token_file token.txt
        """,
    )


def run(args: argparse.Namespace) -> None:
    if missing := [name for name in _EXTRA if importlib.util.find_spec(name) is None]:
        needed = " and ".join(missing)
        raise UserError(f"`t5x serve` needs {needed}. Run `pip install -e '.[serve]'` in the checkout of t5x.")
    from t5x.serving.security import read_token
    from t5x.serving.settings import LOOPBACK, Settings

    directories = _named(args.models)
    token = read_token(args.token_file)
    if args.host not in LOOPBACK and token is None and not args.without_token:
        raise UserError(
            f"--host {args.host} lets other machines connect: pass --token_file FILE or set T5X_SERVE_TOKEN, or allow "
            "anyone with --without_token."
        )
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UserError("--tls_cert and --tls_key are needed together.")
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port is {args.port}: it must be 0 to 65535.")
    settings = Settings(**given_options(args, [field.name for field in dataclasses.fields(Settings)]))
    import_modules(args)
    from t5x.serving.server import serve

    serve(
        directories, settings, host=args.host, port=args.port, token=token, tls_cert=args.tls_cert,
        tls_key=args.tls_key, **given_options(args, ("vocabulary", "dtype")),
    )  # fmt: skip
    raise Terminated(0)  # ends at once, even if a model is being compiled


def _named(models: list[str]) -> dict[str, str]:
    """Return {name: directory}."""
    named: dict[str, str] = {}
    for given in models:
        name, separator, directory = given.partition("=")
        if not separator or "/" in name:
            name, directory = os.path.basename(given.rstrip("/").partition("@")[0]), given
        if not name or not directory:
            raise UserError(f"{given!r} is not a model: pass DIR or NAME=DIR.")
        if name in named:
            raise UserError(f"Two models have the name {name}: pass NAME=DIR for one of them.")
        named[name] = directory
    return named
