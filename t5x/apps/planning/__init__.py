"""`t5x plan`: memory, time and cost of a training run on devices that are not here."""
