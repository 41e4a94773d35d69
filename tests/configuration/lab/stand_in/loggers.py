class JSONLogger:
    def __init__(self, output_dir: str, write_n_results: int | None = None):
        self.write_n_results = write_n_results
