class SentencePieceVocabulary:
    def __init__(self, sentencepiece_model_file: str, extra_ids: int = 0):
        self.sentencepiece_model_file, self.extra_ids = sentencepiece_model_file, extra_ids
