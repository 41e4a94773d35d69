"""Not available: early-exit decoding (CALM) of T5X."""

raise ImportError(
    "t5x.contrib.calm does not exist in this package: it has no early-exit decoding (CALM). Remove what needs it, "
    "or use T5X for that model."
)
