"""`t5x serve`: its arguments and the call of its entry point."""

import argparse
import importlib.util
import os

from t5x._runtime.errors import UserError
from t5x._runtime.signals import Terminated
from t5x.apps.serving.settings import LOOPBACK, BatchSettings, ModelSettings, RequestLimits, ServerSettings
from t5x.cli.options import add_import, import_modules
from t5x.cli.parser import VerbParser, add_options, passed_options

_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")


def define(parser: VerbParser) -> None:
    parser.add_argument(
        "models", metavar="DIR", nargs="+",
        help="a checkpoint, or a MODEL_DIR; NAME=DIR sets its name (default: the directory's)",
    )  # fmt: skip
    address = parser.add_argument_group("where")
    address.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    address.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1, this machine only")
    access = parser.add_argument_group("access")
    access.add_argument("--token_file", metavar="FILE", help="bearer token (or set T5X_SERVE_TOKEN)")
    access.add_argument("--without_token", action="store_true", help="allow anyone who can connect, with --host")
    access.add_argument("--tls_cert", metavar="FILE", help="certificate chain, for HTTPS")
    access.add_argument("--tls_key", metavar="FILE", help="private key of the certificate")
    add_options(parser.add_argument_group("batches"), BatchSettings)
    models = parser.add_argument_group("models")
    add_options(models, ModelSettings)
    add_import(models)
    add_options(parser.add_topic("limits", "limits of requests"), RequestLimits)
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
    from t5x.apps.serving.security import read_token

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
    settings = ServerSettings(**passed_options(args, ServerSettings))
    import_modules(args)
    from t5x.apps.serving.server import serve

    serve(
        directories, settings, host=args.host, port=args.port, token=token, tls_cert=args.tls_cert, tls_key=args.tls_key
    )
    raise Terminated(0)  # ends at once, even if a model is being compiled


def _named(models: list[str]) -> dict[str, str]:
    """Return {name: directory}."""
    named: dict[str, str] = {}
    for model in models:
        name, separator, directory = model.partition("=")
        if not separator or "/" in name:
            name, directory = os.path.basename(model.rstrip("/").partition("@")[0]), model
        if not name or not directory:
            raise UserError(f"{model!r} is not a model: pass DIR or NAME=DIR.")
        if name in named:
            raise UserError(f"Two models have the name {name}: pass NAME=DIR for one of them.")
        named[name] = directory
    return named
