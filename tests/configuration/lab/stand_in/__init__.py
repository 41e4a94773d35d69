from lab.vocabularies import SentencePieceVocabulary

__all__ = ["SentencePieceVocabulary"]
