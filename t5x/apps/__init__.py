"""Applications on top of the core, one package each. The core reaches them by name only (`t5x.cli.verbs`)."""
