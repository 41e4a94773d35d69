from collections.abc import Callable


class Trainer:
    def __init__(self, model, learning_rate_fn: Callable[[int], float], num_microbatches: int | None):
        self.model, self.learning_rate_fn, self.num_microbatches = model, learning_rate_fn, num_microbatches
