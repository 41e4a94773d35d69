"""`t5x serve`: its arguments and the call of its entry point."""

import argparse
import importlib.util
import os

from t5x._runtime.errors import UserError
from t5x._runtime.signals import Terminated
from t5x.apps.serving import settings
from t5x.apps.serving.settings import LOOPBACK, ServerSettings
from t5x.cli.options import add_import, import_modules
from t5x.cli.parser import VerbParser, add_options, passed_options

_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")


def define(parser: VerbParser) -> None:
    parser.add_argument(
        "models", metavar="DIR", nargs="+",
        help="a checkpoint, or a MODEL_DIR; NAME=DIR sets its name (default: the directory's)",
    )  # fmt: skip
    add_options(parser.add_argument_group("where"), settings.AddressSettings)
    add_options(parser.add_argument_group("access"), settings.AccessSettings)
    add_options(parser.add_argument_group("batches"), settings.BatchSettings)
    models = parser.add_argument_group("models")
    add_options(models, settings.ModelSettings)
    add_import(models)
    add_options(parser.add_topic("limits", "limits of requests"), settings.RequestLimits)
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

    directories, options = _named(args.models), ServerSettings(**passed_options(args, ServerSettings))
    token = read_token(options.token_file)
    if options.host not in LOOPBACK and token is None and not options.without_token:
        raise UserError(
            f"--host {options.host} lets other machines connect: pass --token_file FILE or set T5X_SERVE_TOKEN, or "
            "allow anyone with --without_token."
        )
    import_modules(args)
    from t5x.apps.serving.server import serve

    serve(directories, options, token)
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
