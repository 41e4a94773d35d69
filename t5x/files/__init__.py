"""Files on disk: atomic writes (`atomic`), checksums (`digests`) and locks (`locks`)."""
