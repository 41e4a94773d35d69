"""Reranking: a model reads each passage with the query and scores its relevance."""
