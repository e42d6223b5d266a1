"""What a file is by its first bytes, for messages about a file of another kind."""

import re

AGAIN = "Write or download it again."
CONVERT_IT = "Convert it."
UNPACK = "Unpack it, and give the file in it."

_MAGIC = {
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a single numpy array (.npy)",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"RIFF": "a sound, an image or a film (RIFF)",
    b"%PDF": "a PDF document",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x80": "a Python pickle, which could execute code and is never loaded",
    b"PK\x05\x06": "an empty zip archive",
    b"GGUF": "a GGUF file",
}
_ZIPPED = {  # by names of entries
    b"/data.pkl": "a file of torch.save",
    b".npy": "a numpy .npz file",
    b"xl/": "an Excel workbook",
    b"[Content_Types].xml": "an Office document",
}


def describe(head: bytes) -> tuple[str, str]:
    """Return what a file that begins like this is, and what to do.

    Args:
        head: The first bytes, at most 4,096.
    """
    if not head:
        return "an empty file", AGAIN
    if head.startswith(b"version https://git-lfs"):
        return "a git-LFS pointer, not the file itself", "Run `git lfs pull`."
    if re.match(rb"\s*<(!doctype|html|head|body|\?xml)", head, re.IGNORECASE):
        return "an HTML page, as a failed download leaves it", "Download the file again."
    if len(head) < 16:
        return f"a file of {len(head)} bytes, probably cut off", AGAIN
    if head[257:262] == b"ustar":
        return "a tar archive", UNPACK
    if head.startswith(b"PK\x03\x04"):
        found = (what for name, what in _ZIPPED.items() if name in head)
        return (what, CONVERT_IT) if (what := next(found, "")) else ("a zip archive", UNPACK)
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return what, UNPACK if "archive" in what else CONVERT_IT
    try:
        text = head[:-4].decode()  # not the last bytes: a character may be cut
    except UnicodeDecodeError:
        text = "\0"
    if all(c.isprintable() or c.isspace() for c in text):
        return "a text file", "Check that it is the right one."
    return "a file of an unknown kind, or a damaged one", AGAIN
