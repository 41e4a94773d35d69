"""The CRC-32C of TensorFlow's files."""

import google_crc32c
import numpy as np
import pytest

from t5x.files.digests import masked_crc32c


def test_crc32c_is_the_compiled_one():
    assert google_crc32c.implementation == "c"


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_crc32c_has_the_published_values(data, crc):
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    assert masked_crc32c(data) == masked_crc32c(np.frombuffer(data, np.uint8)) == masked
