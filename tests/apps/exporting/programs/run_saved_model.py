"""Runs signatures of a SavedModel in TensorFlow alone: `run_saved_model.py DIR`, calls as JSON lines on standard input.

A call is [signature, {input: values}]; its outputs are printed as a JSON line. Importing JAX or t5x fails here, and
without `text` as the second argument tensorflow_text too.
"""

import json
import sys

forbidden = {"jax", "jaxlib", "t5x", "flax"} | (set() if sys.argv[2:] == ["text"] else {"tensorflow_text"})
for name in [*forbidden, *(name for name in sys.modules if name.partition(".")[0] in forbidden)]:  # seqio imports some
    sys.modules[name] = None

import tensorflow as tf  # noqa: E402

if sys.argv[2:] == ["text"]:
    import tensorflow_text  # noqa: F401

model = tf.saved_model.load(sys.argv[1])
for line in sys.stdin:
    signature, inputs = json.loads(line)
    found = model.signatures[signature](**{name: tf.constant(x) for name, x in inputs.items()})
    print(json.dumps({name: x.numpy().tolist() for name, x in found.items()}, default=bytes.decode), flush=True)
