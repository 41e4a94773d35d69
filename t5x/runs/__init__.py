"""The programs `train`, `eval`, `infer` and `precompile`: one linear function each, configured by gin."""
