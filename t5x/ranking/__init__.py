"""Reranking: passages ordered by a model that reads each with the query and says how relevant it is."""
