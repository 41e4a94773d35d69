"""T5X's program that converts Mesh TensorFlow checkpoints; see `t5x.compat.convert_tf_checkpoint`."""

from t5x.compat.convert_tf_checkpoint import convert_checkpoint  # noqa: F401

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("convert-tf-checkpoint")
