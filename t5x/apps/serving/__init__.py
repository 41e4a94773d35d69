"""`t5x serve`: models behind an HTTP API, with requests of many clients computed in shared batches.

| file | contents |
|---|---|
| `server.py` | the process: loading, signals, draining |
| `api.py` | routes: from a checked request to a response |
| `requests.py` | the types of requests, which check them, and the OpenAPI document |
| `security.py` | bearer tokens, hosts, body limits |
| `served_models.py` | the models by name; reloads them; metrics for Prometheus |
| `batched_model.py` | a loaded model that computes in the common batches |
| `batching.py` | the queue, and the thread that computes |
| `settings.py` | the options of a server |
| `page.html` | the page at `/` |
"""
