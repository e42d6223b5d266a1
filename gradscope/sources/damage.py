"""What a parser said of a damaged file, in words of the file."""

import errno
import zipfile

from gradscope.core.locate import first_line


def damage(error: BaseException) -> str:
    """Return what is wrong with a file."""
    if isinstance(error, zipfile.BadZipFile) and "not a zip file" in str(error):
        return "the directory at its end is missing"
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return "its directory points outside of it"
    return first_line(error)
