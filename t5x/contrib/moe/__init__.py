"""Not available: mixture-of-experts networks of T5X."""

raise ImportError(
    "t5x.contrib.moe does not exist in this package: it has no mixture-of-experts networks. Remove what needs it, "
    "or use T5X for that model."
)
