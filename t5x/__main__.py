"""`python -m t5x VERB …`, the same as `t5x VERB …`."""

from t5x.cli.main import main

main()
