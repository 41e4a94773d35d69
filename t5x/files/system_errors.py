"""Operating system errors behind exceptions, including those that TensorStore raises as text."""

import errno
import re

# TensorStore raises ValueError("STATUS: text"); the text does not always include the system's error number.
_STATUS = re.compile(r"([A-Z][A-Z_]+): ")
_STATUS_NUMBERS = {"NOT_FOUND": errno.ENOENT, "PERMISSION_DENIED": errno.EACCES, "RESOURCE_EXHAUSTED": errno.ENOSPC}


def errno_of(error: BaseException | None) -> int | None:
    """Return the operating system's error number behind `error`, even if TensorStore wrapped it in its own text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if match := re.search(r"\[os_error_code='(\d+)'", str(error)):
            return int(match[1])
        if isinstance(error, ValueError) and (status := tensorstore_status(error)):
            return _STATUS_NUMBERS.get(status, errno.EIO)
        error = error.__cause__ or error.__context__
    return None


def tensorstore_status(error: BaseException) -> str | None:
    """Return the status (such as DATA_LOSS) of a TensorStore error."""
    match = _STATUS.match(str(error))
    return match[1] if match else None


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error, without the long specs that TensorStore appends."""
    line = (str(error).split(" [tensorstore_spec=")[0].strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= limit else line[:limit] + "…"
